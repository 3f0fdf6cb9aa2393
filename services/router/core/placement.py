"""Where a request goes: a linked pair of a prefill and a decode worker, or a mixed worker."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from contracts.errors import ErrorCode, PdmeshError
from contracts.requests import DisaggregatedRoute, MixedRoute, Route, WorkerRef
from contracts.workers import Link, LinkState, WorkerRecord, WorkerRole, WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """What is to be placed. `model` is the name that workers give to it."""

    model: str
    num_prompt_tokens: int
    max_tokens: int
    avoid: Collection[str] = ()
    """Workers that have just refused or failed it: taken only if nothing else is left."""
    turn: int = 0
    """Counts up with every placement, so that equally loaded workers take turns."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way through the mesh, with the workers on it in order."""

    route: Route
    workers: tuple[WorkerRecord, ...]

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that every worker on it can hold."""
        return min(worker.max_sequence_tokens for worker in self.workers)

    @property
    def max_sequence_tokens(self) -> int:
        """The longest prompt and answer together: only the worker that decodes holds the answer."""
        return self.workers[-1].max_sequence_tokens

    def fits(self, num_prompt_tokens: int, max_tokens: int) -> bool:
        """Whether an empty mesh could serve it."""
        return (
            num_prompt_tokens <= self.max_prompt_tokens and num_prompt_tokens + max_tokens <= self.max_sequence_tokens
        )


@dataclass(slots=True)
class Loads:
    """How many requests this router has on each start of each worker: fresher than what records say."""

    counts: dict[WorkerRef, int] = field(default_factory=dict)
    turn: int = 0

    def next_turn(self) -> int:
        """Count placements."""
        self.turn += 1
        return self.turn

    def add(self, worker: WorkerRef) -> None:
        """Count a request in."""
        self.counts[worker] = self.counts.get(worker, 0) + 1

    def remove(self, worker: WorkerRef) -> None:
        """Count it out. Counts of zero are not kept, so that nothing is left of workers that are gone."""
        left = self.counts[worker] - 1
        if left:
            self.counts[worker] = left
        else:
            del self.counts[worker]

    def of(self, record: WorkerRecord) -> float:
        """Return the requests on a worker per slot that it has.

        A record counts everybody's requests but is old, our count is new but counts only ours: the larger one holds.
        """
        reported = record.load.num_waiting + record.load.num_running
        return max(reported, self.counts.get(ref_of(record), 0)) / max(1, record.num_slots)


def ref_of(record: WorkerRecord) -> WorkerRef:
    """Return the start of the worker that wrote this record."""
    return WorkerRef(worker_id=record.worker_id, incarnation=record.incarnation)


def workers_of(route: Route) -> tuple[WorkerRef, ...]:
    """Return who works on a route: the one that computes the prompt first, the one that decodes last."""
    match route:
        case DisaggregatedRoute(prefill=prefill, decode=decode):
            return (prefill, decode)
        case MixedRoute(mixed=mixed):
            return (mixed,)


def candidates(records: Mapping[str, WorkerRecord], *, model: str) -> Iterator[Candidate]:
    """Yield every complete way through the mesh, whatever its load, in the order of worker ids."""
    usable = [records[key] for key in sorted(records) if _usable(records[key], model)]
    decodes = {worker.worker_id: worker for worker in usable if worker.role is WorkerRole.DECODE}
    for worker in usable:
        match worker.role:
            case WorkerRole.MIXED:
                yield Candidate(MixedRoute(mixed=ref_of(worker)), (worker,))
            case WorkerRole.PREFILL:
                for link in worker.links:
                    decode = decodes.get(link.worker_id)
                    if link.state is LinkState.LINKED and decode and decode.incarnation == link.incarnation:
                        route = DisaggregatedRoute(prefill=ref_of(worker), decode=ref_of(decode))
                        yield Candidate(route, (worker, decode))
            case WorkerRole.DECODE:
                pass


def largest_sequence(records: Mapping[str, WorkerRecord], *, model: str) -> int | None:
    """Return the most tokens, prompt and answer together, that any way serves; None if there is no way at all."""
    return max((each.max_sequence_tokens for each in candidates(records, model=model)), default=None)


def place(records: Mapping[str, WorkerRecord], loads: Loads, placing: Placing) -> Route:
    """Return the least loaded way that the request fits into.

    Ways with room for it now go before full ones, ways without avoided workers before those. Raises `PdmeshError`:
    `no_route` with what is missing, or `prompt_too_long` if no way can ever hold it.
    """
    ways = list(candidates(records, model=placing.model))
    if not ways:
        raise PdmeshError(
            f"no worker can take the request: {why_no_way(records, placing.model)}", code=ErrorCode.NO_ROUTE
        )
    fitting = [way for way in ways if way.fits(placing.num_prompt_tokens, placing.max_tokens)]
    if not fitting:
        most = max(way.max_sequence_tokens for way in ways)
        longest = max(way.max_prompt_tokens for way in ways)
        raise PdmeshError(
            f"prompt: {placing.num_prompt_tokens} tokens and {placing.max_tokens} to generate fit on no worker; "
            f"the largest holds {most}, and prompts of {longest}",
            code=ErrorCode.PROMPT_TOO_LONG,
            param="prompt",
        )
    turned = [(index - placing.turn) % len(fitting) for index in range(len(fitting))]
    ranked = zip(fitting, turned, strict=True)
    return min(ranked, key=lambda each: _rank(each[0], each[1], loads, placing))[0].route


def why_no_way(records: Mapping[str, WorkerRecord], model: str) -> str:
    """Say in words what a complete way lacks."""
    reasons: list[str] = []
    for key in sorted(records):
        worker = records[key]
        if worker.model != model:
            reasons.append(f"{key} serves {worker.model!r}, not {model!r}")
        elif worker.state is not WorkerState.READY:
            reasons.append(f"{key} is {worker.state}")
    roles = {worker.role for worker in records.values() if _usable(worker, model)}
    if {WorkerRole.PREFILL, WorkerRole.DECODE} <= roles:
        for key in sorted(records):
            reasons += [f"{key} has refused {link.worker_id}: {link.reason}" for link in _refusals(records[key])]
        reasons.append("no prefill worker is linked to a decode worker")
    elif roles:
        missing = WorkerRole.DECODE if WorkerRole.PREFILL in roles else WorkerRole.PREFILL
        reasons.append(f"no {missing} worker is ready")
    else:
        reasons.append("no worker is ready")
    return "; ".join(reasons)


def _refusals(record: WorkerRecord) -> list[Link]:
    return [link for link in record.links if link.state is LinkState.REFUSED]


def _usable(record: WorkerRecord, model: str) -> bool:
    return record.state is WorkerState.READY and record.model == model


def _rank(way: Candidate, turn: int, loads: Loads, placing: Placing) -> tuple[bool, bool, float, int]:
    avoided = any(worker.worker_id in placing.avoid for worker in way.workers)
    # A mixed worker does both halves of the work, so its load counts for both.
    load = sum(loads.of(worker) for worker in (way.workers[0], way.workers[-1]))
    return (avoided, not _has_room(way, placing), load, turn)


def _has_room(way: Candidate, placing: Placing) -> bool:
    last = way.workers[-1]
    needed = placing.num_prompt_tokens + placing.max_tokens
    free = last.load.num_free_blocks * last.block_size * last.dcp
    return free >= needed and all(worker.load.num_free_slots > 0 for worker in way.workers)
