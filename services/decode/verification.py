"""Whether a request's cache is, byte for byte, what prefill has computed: looked at before decode takes the request over."""

from __future__ import annotations

from functools import partial

from common.bus.rpc import RefusedError
from common.engine.port import EngineDeadError, EngineError
from common.runtime.clock import Clock
from common.runtime.lifecycle import Log
from common.runtime.metrics import PHASE_BUCKETS, Metrics
from common.worker.core.sequence import Sequence
from common.worker.core.verification import differences
from common.worker.replica import Replica
from common.worker.shared_calls import SharedCalls
from contracts.errors import ErrorCode
from contracts.handoff import CommitHandoff
from contracts.manifest import Namespace
from contracts.rank import PeerSide

_OUTCOMES = ("good", "corrupt", "unknown")
_MAX_NAMED = 4


class CacheVerification:
    """Asks all ranks for digests, and gives one verdict for all of them: once for a sequence, however often its commit comes."""

    def __init__(self, clock: Clock, log: Log, metrics: Metrics) -> None:
        self._clock = clock
        self._log = log
        self._verdicts = metrics.counter(
            "worker_cache_verifications_total",
            "Caches that were held against prefill's digests; unknown: there were none, or the ranks could not tell.",
            ("outcome",),
        )
        self._seconds = metrics.histogram(
            "worker_cache_verify_seconds", "How long one verification took.", buckets=PHASE_BUCKETS
        )
        self._under_way: SharedCalls[str] = SharedCalls()
        for outcome in _OUTCOMES:
            self._verdicts.labels(outcome)

    async def check(self, command: CommitHandoff, sequence: Sequence, replica: Replica, num_cached_tokens: int) -> None:
        """Return if everything that prefill has computed lies where it belongs.

        A commit that comes again waits for the digests that are being made, or gets the verdict that was given: making them holds
        up every step. Raises `RefusedError`: CACHE_CORRUPT, which names what differs and is for no retry, TRANSFER_FAILED without
        digests (a broker that went on with it found nobody who has them any more), or the code of an engine that could not tell, which is asked anew at the next commit.
        """
        if not command.digests:
            self._verdicts.labels("unknown").inc()
            text = "digests: none is not allowed; the rule is: those of the prefill worker, with verify_cache=1"
            raise RefusedError(command.handoff_id, ErrorCode.TRANSFER_FAILED, text)
        if sequence.cache_differences is None:
            judge = partial(self._judge, command, sequence, replica, num_cached_tokens)
            sequence.cache_differences = await self._under_way.join(str(sequence.seq), judge)
        if sequence.cache_differences:
            raise RefusedError(command.handoff_id, ErrorCode.CACHE_CORRUPT, sequence.cache_differences)

    async def _judge(self, command: CommitHandoff, sequence: Sequence, replica: Replica, num_cached_tokens: int) -> str:
        """What differs, in words; empty if nothing does."""
        began = self._clock.monotonic()
        try:
            found = await replica.loop.digest(sequence, PeerSide.DESTINATION, num_cached_tokens)
        except EngineDeadError:
            raise
        except EngineError as error:
            self._verdicts.labels("unknown").inc()
            raise RefusedError(command.handoff_id, error.code, error.message) from error
        self._seconds.observe(self._clock.monotonic() - began)
        if not command.drafts:  # what this worker keeps of a draft of its own is nobody's prompt
            found = tuple(each for each in found if each.namespace is not Namespace.DRAFT)
        wrong = differences(command.digests, found)
        self._verdicts.labels("corrupt" if wrong else "good").inc()
        if not wrong:
            return ""
        more = f" and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
        text = f"the cache that has arrived is not the one that was computed: {'; '.join(wrong[:_MAX_NAMED])}{more}"
        self._log.error("cache_corrupt", handoff_id=command.handoff_id, num_differences=len(wrong), reason=text)
        return text
