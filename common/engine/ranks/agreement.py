"""What the ranks of a worker agree on around a step: that all can run it, and which tokens were chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from common.engine.collectives.port import Collectives
from common.engine.model.sampler import Draw, Sampler
from common.engine.model.tensor_parallel import SAMPLING_RANK
from contracts.errors import ErrorCode, PdmeshError

_NOTHING: Final = -2
"""What the sampling rank tells in place of every token when choosing itself went wrong."""


class AgreedError(PdmeshError):
    """A failure that every rank knows of: the engine goes on."""


class Agreement:
    """One rank's end. `collectives` is None with one rank."""

    def __init__(self, sampler: Sampler, collectives: Collectives | None) -> None:
        self._sampler = sampler
        self._group = collectives if collectives is not None and collectives.size > 1 else None

    def agree(self, failure: Exception | None) -> None:
        """Raise `AgreedError` on all ranks when some rank cannot run the step; nothing has been changed then."""
        if self._group is not None:
            failed = torch.zeros(self._group.size, dtype=torch.int64)
            failed[self._group.rank] = failure is not None
            self._group.all_reduce_sum(failed)
            if failure is None and bool(failed.any()):
                raise AgreedError(
                    f"ranks {failed.nonzero()[:, 0].tolist()} cannot run the step", code=ErrorCode.WORKER_FAILED
                )
        if failure is not None:
            raise agreed(failure) from failure

    def choose(self, logits: torch.Tensor | None, draws: Sequence[Draw]) -> list[int]:
        """Choose a token for each row of `logits`, which the sampling rank has; all ranks get the same.

        `NO_TOKEN` for rows that are not sound (see `Sampler.sample`). Raises `AgreedError` on all ranks when it could not choose.
        """
        failure: Exception | None = None
        chosen = [_NOTHING] * len(draws)
        if logits is not None:
            try:
                chosen = self._sampler.sample(logits, draws)
            except Exception as error:  # noqa: BLE001 - the others wait for tokens: they get the sign that there are none
                failure = error
        if self._group is not None:
            told = torch.tensor(chosen, dtype=torch.int64)
            self._group.broadcast(SAMPLING_RANK, told)
            chosen = told.tolist()
        if failure is not None:
            raise agreed(failure) from failure
        if _NOTHING in chosen:
            raise AgreedError("the sampling rank could not choose tokens", code=ErrorCode.WORKER_FAILED)
        return chosen


def agreed(failure: Exception) -> AgreedError:
    """The same failure as one that every rank knows of."""
    code = failure.code if isinstance(failure, PdmeshError) else ErrorCode.INTERNAL
    return AgreedError(f"{type(failure).__name__}: {failure}", code=code)
