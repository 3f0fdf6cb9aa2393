"""One handoff as the broker holds it in memory, and what can be asked of it without changing it."""

from __future__ import annotations

import msgspec

from contracts.errors import ErrorCode, ErrorInfo
from contracts.handoff import HandoffRecord, HandoffState, PartsReport, PrefillFinished, RequestEnded, TakenOver
from contracts.manifest import PlannedPart
from contracts.pull import PullEnded, Transfer
from contracts.requests import DisaggregatedRoute, FinishReason, MixedRoute, SubmitRequest, WorkerRef
from contracts.workers import WorkerRole
from services.broker.core.ledger import Ledger


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers that a handoff obeys.

    `fence` names this broker's term. A release stands as a tombstone for the rest of the deadline and `tombstone_margin_ms`.
    Open ledgers are asked about `parts_query_ms` after the prefill's end, then at growing intervals.
    """

    fence: int = 1
    tombstone_margin_ms: int = 5_000
    parts_query_ms: int = 50


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How a handoff is to end, once its record says so."""

    state: HandoffState
    error: ErrorInfo | None = None
    finish_reason: FinishReason | None = None
    num_tokens: int = 0


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """All that the broker knows of a handoff.

    `record` is what it has decided, `stored` what the bucket held at `revision` when last heard of, `writing` the
    compare-and-set under way. COMMITTED and the terminal states enter `record` only after the bucket has taken them (at
    the deadline: whatever the bucket does); the others are written behind. A `verdict` waits for its compare-and-set.
    `told` are the workers that may hold something, `settled` those of which nothing is waited for any more: they have given all back,
    some into quarantine (`quarantined`), or are `unheard`: no answer to their release came. An `adopted` one was begun by
    another broker: it is `resumed` once the bucket holds this term, and what that one was told is asked for again; a mixed worker
    that is asked to run once more `may_be_over` with it, and its word of that is under way. One `is_behind` in the bucket, whose last
    write had no answer in all of its time. `num_locks` counts how often the request's lock was taken.
    """

    policy: Policy
    record: HandoffRecord
    deadline_ns: int
    begun_ns: int
    planned: tuple[PlannedPart, ...] = ()
    block_size: int = 1
    stored: HandoffRecord | None = None
    revision: int = 0
    writing: HandoffRecord | None = None
    num_writes: int = 0
    is_behind: bool = False
    verdict: Verdict | None = None
    ledger: Ledger | None = None
    finished: PrefillFinished | None = None
    adopted: bool = False
    resumed: bool = True
    may_be_over: bool = False
    num_locks: int = 0
    lock_taken_ns: int = 0
    pull_accepted: bool = False
    pull_ended: PullEnded | None = None
    told: frozenset[WorkerRole] = frozenset()
    settled: frozenset[WorkerRole] = frozenset()
    quarantined: frozenset[WorkerRole] = frozenset()
    unheard: frozenset[WorkerRole] = frozenset()
    release_asked: frozenset[WorkerRole] = frozenset()
    submit_answered: bool = False
    run_accepted: bool = False
    commit_asked: bool = False
    digests_awaited: bool = False
    commit_accepted: bool = False
    taken_over: bool = False
    router_answered: bool = False
    forgotten: bool = False
    num_queries: int = 0
    asked_ns: int = 0

    @property
    def handoff_id(self) -> str:
        """Its id."""
        return self.record.handoff_id

    @property
    def state(self) -> HandoffState:
        """Where it is."""
        return self.record.state

    @property
    def terminal(self) -> bool:
        """Whether it has ended."""
        return self.record.state.terminal

    @property
    def is_elsewhere(self) -> bool:
        """Whether another broker goes on with it: what is told here changes nothing."""
        return self.forgotten and not self.terminal

    @property
    def is_claiming(self) -> bool:
        """Whether the bucket may still hold more of another broker, which began it, than was found: it has not taken this term yet."""
        unclaimed = self.adopted and self.stored is not None and self.stored.fence < self.policy.fence
        return unclaimed and self.writing is not None

    @property
    def workers(self) -> dict[WorkerRole, WorkerRef]:
        """The workers of its route, by role."""
        match self.record.route:
            case DisaggregatedRoute(prefill=prefill, decode=decode):
                return {WorkerRole.PREFILL: prefill, WorkerRole.DECODE: decode}
            case MixedRoute(mixed=mixed):
                return {WorkerRole.MIXED: mixed}

    @property
    def ending_role(self) -> WorkerRole:
        """The role of the worker that streams the last token."""
        return WorkerRole.MIXED if isinstance(self.record.route, MixedRoute) else WorkerRole.DECODE

    @property
    def ledger_closed(self) -> bool:
        """Whether every planned byte is where it belongs."""
        return self.ledger is not None and self.ledger.closed

    @property
    def reading(self) -> bool:
        """Whether decode still has to read cache, or may be reading it."""
        return bool(self.record.pulled) and self.pull_ended is None

    @property
    def lacks_digests(self) -> bool:
        """Whether decode was promised digests that prefill has not brought."""
        owes = self.ledger is not None and self.ledger.owes
        return self.record.verify and owes and self.finished is not None and not self.finished.digests

    @property
    def num_missing_parts(self) -> int:
        """Parts that are owed and have not arrived in full; 0 once decode has been given the request."""
        if self.ledger is None or self.record.state is not HandoffState.PREFILLING:
            return 0
        return len(self.ledger.planned) - len(self.ledger.closed_parts)

    @property
    def commit_ready(self) -> bool:
        """Whether decode may be given the request: the prompt is computed, all of its cache has arrived, nobody reads it."""
        return (
            self.record.state is HandoffState.PREFILLING
            and self.finished is not None
            and self.finished.first_token is not None
            and self.ledger_closed
            and not self.reading
        )

    def remaining_ms(self, at_ns: int) -> int:
        """Whole milliseconds until the deadline; 0 once it has passed."""
        return max(0, (self.deadline_ns - at_ns) // 1_000_000)


def same_identity(one: HandoffRecord | SubmitRequest, other: HandoffRecord | SubmitRequest) -> bool:
    """Whether both are the same request, attempt and route: then one is the delivery, once more, of the other."""
    return _identity(one) == _identity(other)


def _identity(one: HandoffRecord | SubmitRequest) -> tuple[object, ...]:
    ids = (one.handoff_id, one.request_id, one.attempt, one.router_id)
    prompt = (one.num_prompt_tokens, one.prompt_hash, one.num_delivered_tokens)
    return (*ids, one.router_incarnation, one.route, *prompt, one.sampling)


def refusal(
    handoff: Handoff, message: PrefillFinished | PartsReport | PullEnded | TakenOver | RequestEnded
) -> ErrorInfo | None:
    """Why a worker's message is not for this handoff, or None. `step` ignores such a message; its sender should hear it."""
    match message:
        case PartsReport(transfer=Transfer.PUSH) | PrefillFinished():
            role = WorkerRole.PREFILL
        case PartsReport() | PullEnded() | TakenOver():
            role = WorkerRole.DECODE
        case RequestEnded():
            role = handoff.ending_role
    worker = handoff.workers.get(role)
    if worker is None:
        return ErrorInfo(code=ErrorCode.PROTOCOL, message=f"{handoff.handoff_id} has no {role} worker")
    if worker.incarnation != message.incarnation:
        text = (
            f"{handoff.handoff_id} belongs to {worker.incarnation} of {worker.worker_id}, not to {message.incarnation}"
        )
        return ErrorInfo(code=ErrorCode.INCARNATION_CHANGED, message=text)
    return None
