"""Draft heads of a mesh's workers that do not meet: nothing is wrong with it, and nobody means it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from common.worker.core.compatibility import Caution
from common.worker.settings import WorkerSettings
from contracts.rank import DrafterKind
from contracts.workers import WorkerRole

_NAME: Final = "drafts_stay_behind"


def lonely_drafts(
    prefill: Mapping[str, WorkerSettings], decode: Mapping[str, WorkerSettings]
) -> Iterator[tuple[str, Caution]]:
    """Name and warning of each worker that has a draft head while no worker of the other side has; both are settings by name.

    A decode worker then guesses nothing for what is handed over to it, and a prefill worker computes a cache that goes nowhere.
    """
    keeping = [name for name, settings in prefill.items() if _has_head(settings, WorkerRole.PREFILL)]
    guessing = [name for name, settings in decode.items() if _has_head(settings, WorkerRole.DECODE)]
    if prefill and not keeping:
        for name in guessing:
            text = "it guesses nothing: no prefill worker computes the cache that its draft head goes on from"
            remedy = (
                "set num_speculative_tokens for prefill workers too, drafter=ngram, or num_speculative_tokens=0 here"
            )
            yield name, Caution(name=_NAME, text=text, remedy=remedy)
    if decode and not guessing:
        for name in keeping:
            text = "it computes the cache of a draft head with which no decode worker guesses"
            remedy = "set num_speculative_tokens for decode workers too, or to 0 here"
            yield name, Caution(name=_NAME, text=text, remedy=remedy)


def _has_head(settings: WorkerSettings, role: WorkerRole) -> bool:
    return settings.drafter_of(role) is DrafterKind.MTP
