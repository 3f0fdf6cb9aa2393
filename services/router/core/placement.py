"""Where a request goes: a linked pair of a prefill and a decode worker, or a mixed worker."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from contracts.errors import ErrorCode, PdmeshError
from contracts.requests import DisaggregatedRoute, MixedRoute, Route, WorkerRef
from contracts.workers import WorkerRecord, WorkerRole, WorkerState
from services.router.core.mesh_view import MeshView


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """What is to be placed. `model` is the name that workers give to it."""

    model: str
    num_prompt_tokens: int
    max_tokens: int
    blame: Mapping[WorkerRef, int] = field(default_factory=dict)
    """What starts of workers have to do with earlier attempts that came to nothing: of all ways, the least blamed are taken."""
    turn: int = 0
    """Counts up with every placement, so that equally loaded workers take turns."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way through the mesh, with the workers on it in order."""

    route: Route
    workers: tuple[WorkerRecord, ...]

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that every worker on it can hold, and compute where it does that."""
        return min(worker.longest_prompt for worker in self.workers)

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


def candidates(view: MeshView, *, model: str) -> Iterator[Candidate]:
    """Yield every complete way through the mesh, whatever its load: mixed workers, then pairs, each in the order of ids."""
    usable = {key: view.workers[key] for key in sorted(view.workers) if _usable(view.workers[key], model)}
    for worker in usable.values():
        if worker.role is WorkerRole.MIXED:
            yield Candidate(MixedRoute(mixed=ref_of(worker)), (worker,))
    for key in sorted(view.links):
        link = view.links[key]
        prefill, decode = usable.get(link.prefill.worker_id), usable.get(link.decode.worker_id)
        if prefill is None or decode is None or not view.is_linked(prefill, decode):
            continue
        if prefill.role is WorkerRole.PREFILL and decode.role is WorkerRole.DECODE:
            yield Candidate(DisaggregatedRoute(prefill=ref_of(prefill), decode=ref_of(decode)), (prefill, decode))


def largest_sequence(view: MeshView, *, model: str) -> int | None:
    """Return the most tokens, prompt and answer together, that any way serves; None if there is no way at all."""
    return max((each.max_sequence_tokens for each in candidates(view, model=model)), default=None)


def place(view: MeshView, loads: Loads, placing: Placing) -> Route:
    """Return the least loaded way that the request fits into.

    Less blamed ways go before all others, then ways with room for it now before full ones. Raises `PdmeshError`:
    `no_route` with what is missing, and if no way can ever hold it `prompt_too_long`, or `context_length_exceeded` if the prompt
    alone would fit.
    """
    ways = list(candidates(view, model=placing.model))
    if not ways:
        raise PdmeshError(f"no worker can take the request: {why_no_way(view, placing.model)}", code=ErrorCode.NO_ROUTE)
    fitting = [way for way in ways if way.fits(placing.num_prompt_tokens, placing.max_tokens)]
    if not fitting:
        raise _nowhere(ways, placing)
    turned = [(index - placing.turn) % len(fitting) for index in range(len(fitting))]
    ranked = zip(fitting, turned, strict=True)
    return min(ranked, key=lambda each: _rank(each[0], each[1], loads, placing))[0].route


def _nowhere(ways: Sequence[Candidate], placing: Placing) -> PdmeshError:
    """Say that no way can ever hold it, and whether a shorter answer would do."""
    most = max(way.max_sequence_tokens for way in ways)
    longest = max(way.max_prompt_tokens for way in ways)
    prompt_fits = any(way.fits(placing.num_prompt_tokens, 1) for way in ways)
    return PdmeshError(
        f"prompt: {placing.num_prompt_tokens} tokens and {placing.max_tokens} to generate fit on no worker; "
        f"the largest holds {most}, and prompts of {longest}{_whole_prompts_alone(ways, placing.num_prompt_tokens)}",
        code=ErrorCode.CONTEXT_LENGTH if prompt_fits else ErrorCode.PROMPT_TOO_LONG,
        param="max_tokens" if prompt_fits else "prompt",
    )


def _whole_prompts_alone(ways: Sequence[Candidate], num_prompt_tokens: int) -> str:
    """Say which workers could hold the prompt, but compute none of that length."""
    workers = {worker.worker_id: worker for way in ways for worker in way.workers}
    names = [
        key for key, each in workers.items() if each.longest_prompt < num_prompt_tokens <= each.max_sequence_tokens
    ]
    return f"; computed in one step, because chunked_prefill is off: {', '.join(sorted(names))}" if names else ""


def why_no_way(view: MeshView, model: str) -> str:
    """Say in words what a complete way lacks."""
    reasons: list[str] = []
    usable: dict[WorkerRole, list[WorkerRecord]] = {role: [] for role in WorkerRole}
    for key in sorted(view.workers):
        worker = view.workers[key]
        if worker.model != model:
            reasons.append(f"{key} serves {worker.model!r}, not {model!r}")
        elif worker.state is not WorkerState.READY:
            reasons.append(f"{key} is {worker.state}")
        else:
            usable[worker.role].append(worker)
    prefills, decodes = usable[WorkerRole.PREFILL], usable[WorkerRole.DECODE]
    if prefills and decodes:
        problems = (view.link_problem(prefill, decode) for prefill in prefills for decode in decodes)
        reasons += [problem for problem in problems if problem]
        reasons.append("no prefill worker is linked to a decode worker")
    elif prefills or decodes:
        reasons.append(f"no {WorkerRole.DECODE if prefills else WorkerRole.PREFILL} worker is ready")
    else:
        reasons.append("no worker is ready")
    return "; ".join(reasons)


def _usable(record: WorkerRecord, model: str) -> bool:
    return record.state is WorkerState.READY and record.model == model


def _rank(way: Candidate, turn: int, loads: Loads, placing: Placing) -> tuple[int, bool, float, int]:
    blame = sum(placing.blame.get(ref_of(worker), 0) for worker in way.workers)
    # A mixed worker does both halves of the work, so its load counts for both.
    load = sum(loads.of(worker) for worker in (way.workers[0], way.workers[-1]))
    return (blame, not _has_room(way, placing), load, turn)


def _has_room(way: Candidate, placing: Placing) -> bool:
    """Whether each worker has one replica that could take it at once; only the one that decodes also holds the answer."""
    first, last = way.workers[0], way.workers[-1]
    whole = placing.num_prompt_tokens + placing.max_tokens
    return _has_room_for(first, placing.num_prompt_tokens) and _has_room_for(last, whole)


def _has_room_for(worker: WorkerRecord, num_tokens: int) -> bool:
    return worker.load.has_room(num_tokens, block_tokens=worker.block_size * worker.dcp)
