"""Which combinations of switches a worker may start with, and what the others break. Pure; every start and `pdmesh up` ask here.

Whatever has not been shown to work is refused: by a rule of its own, or by `dcp_validated`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Final, Protocol

import msgspec

from common.worker.core.dcp_validated import not_validated
from common.worker.core.effective import Resolved, given_for_pulls, is_prefill_chunked, resolved_of
from common.worker.settings import ARRIVAL, DEFAULT_TRANSPORT_HOST, MTP, WorkerSettings
from contracts.dataplane import Transport
from contracts.errors import InvalidValueError
from contracts.pull import Transfer
from contracts.rank_codec import most_step_tokens
from contracts.workers import WorkerRole

DEVICES: Final = ("cpu",)
_MOST_RANKS: Final = 64
_EVERYWHERE: Final = frozenset({"0.0.0.0", "::"})
_LATER: Final[Mapping[str, tuple[object, str]]] = {
    "graph": (False, "steps are computed as they come"),
    "decode_no_padding": (False, "nothing is captured, so nothing is padded"),
    "prefix_cache": (False, "every prompt is computed from its beginning"),
    "schedule_overlap": (False, "a step is planned when the one before has been computed"),
    "priority_strategy": (ARRIVAL, "whoever came first goes first"),
}
"""Switches that are known and not built: the only value that they may have, and what is done instead."""


class Cuttable(Protocol):
    """What is asked of a model: over how many ranks it can be cut (both checks raise `InvalidValueError` with the rule), and its draft head."""

    @property
    def num_mtp_layers(self) -> int:
        """Layers of the draft head; 0 without one."""
        ...

    def check_tensor_parallel(self, tp: int) -> None:
        """Refuse a number of ranks."""
        ...

    def check_context_parallel(self, tp: int, dcp: int) -> None:
        """Refuse a number of ranks out of `tp` that share the blocks of a sequence."""
        ...


class Rule(StrEnum):
    """The names of the rules."""

    TP = "tp_cuts_the_model"
    DCP_ROLE = "dcp_where_tokens_are_generated"
    DCP_CUT = "dcp_ranks_hold_one_kv_head"
    DCP_CHUNKED = "dcp_chunked_prefill_is_experimental"
    DCP_VALIDATED = "validated_with_dcp"
    INTERLEAVE = "interleave_is_one_block"
    LAYERWISE = "no_layerwise_kv_sharding"
    NOT_BUILT = "not_built_yet"
    DOUBLE_BUFFER = "no_graph_double_buffer"
    DEVICE = "device_is_known"
    STEP = "a_step_holds_every_sequence"
    STEP_MESSAGE = "a_step_fits_into_a_message"
    WHOLE_PROMPTS = "whole_prompts_are_not_computed_again"
    DRAFT_HEAD = "mtp_needs_a_draft_head"
    GUESSES_FIT = "a_step_holds_a_token_and_its_guesses"
    GUESSING_ONLY = "only_with_guesses"
    DRAFT_SHARED = "dcp_ranks_share_the_draft_cache"
    PULL_ONLY = "only_with_pull"
    STAGING_ROWS = "a_staging_row_needs_a_slot"
    TCP_ONLY = "only_with_tcp"
    TCP_ADDRESS = "peers_can_come"


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A combination that is not allowed: the setting, its value, the rule by name and in words, and what to change.

    `addressed_only`: set for everybody it is no mistake, but passed over by this worker.
    """

    rule: Rule
    key: str
    value: str
    text: str
    remedy: str
    addressed_only: bool = False


class Caution(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator should know of a combination that is allowed, and how to get rid of it."""

    name: str
    text: str
    remedy: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of one worker's settings. It may start without refusals."""

    refusals: tuple[Refusal, ...]
    cautions: tuple[Caution, ...]
    resolved: tuple[Resolved, ...]


class _Case(msgspec.Struct, frozen=True, kw_only=True):
    """What is judged. `model` is None where it cannot be read."""

    settings: WorkerSettings
    role: WorkerRole
    model: Cuttable | None


def judge(settings: WorkerSettings, role: WorkerRole, model: Cuttable | None) -> Verdict:
    """Judge the settings of a worker of `role`. Without a `model` what depends on its heads is left to the ranks."""
    case = _Case(settings=settings, role=role, model=model)
    return Verdict(
        refusals=tuple(refusal for rule in _RULES for refusal in rule(case)),
        cautions=tuple(_cautions(case)),
        resolved=resolved_of(settings, role),
    )


def _cuts(case: _Case) -> Iterator[Refusal]:
    model, tp, dcp = case.model, case.settings.tp, case.settings.dcp
    if model is None:
        if tp % dcp:
            text, remedy = f"divides tp = {tp}", "set dcp to a divisor of tp"
            yield _refuse(case, Rule.DCP_CUT, "dcp", text, remedy)
        return
    try:
        model.check_tensor_parallel(tp)
    except InvalidValueError as error:
        legal = [each for each in range(1, _MOST_RANKS + 1) if _passes(model.check_tensor_parallel, each)]
        yield _refuse(case, Rule.TP, "tp", error.rule_text, f"set tp to {_any_of(legal)}")
        return
    if case.role is WorkerRole.PREFILL:
        return
    try:
        model.check_context_parallel(tp, dcp)
    except InvalidValueError as error:
        legal = [each for each in range(1, tp + 1) if _passes(model.check_context_parallel, tp, each)]
        wider = [
            each
            for each in range(tp + 1, _MOST_RANKS + 1)
            if _passes(model.check_tensor_parallel, each) and _passes(model.check_context_parallel, each, dcp)
        ]
        or_wider = f", or tp to {_any_of(wider)}" if wider else ""
        yield _refuse(case, Rule.DCP_CUT, "dcp", error.rule_text, f"set dcp to {_any_of(legal)}{or_wider}")


def _context_parallel(case: _Case) -> Iterator[Refusal]:
    settings, role = case.settings, case.role
    if settings.dcp_interleave not in {0, settings.block_size}:
        text = f"0, or block_size = {settings.block_size}: whole blocks alternate between ranks"
        yield _refuse(case, Rule.INTERLEAVE, "dcp_interleave", text, "leave it out, or change block_size")
    if settings.dcp == 1:
        return
    if role is WorkerRole.PREFILL:
        text = "must be 1 on a prefill worker: its ranks keep whole KV heads, and push to any dcp"
        yield _refuse(
            case, Rule.DCP_ROLE, "dcp", text, "set it for decode or mixed workers alone: decode.dcp, mixed.dcp"
        )
        return
    if is_prefill_chunked(settings, role) and not settings.experimental_dcp_chunked_prefill:
        text = f"must be 1 where prompts are computed in pieces: with dcp={settings.dcp} that is experimental"
        remedy = (
            f"set {_whole_prompts(settings)} (prompts up to max_step_tokens), or experimental_dcp_chunked_prefill=1 "
            "(answers may differ in bits from those of dcp=1)"
        )
        yield _refuse(case, Rule.DCP_CHUNKED, "dcp", text, remedy)
    for key in not_validated(settings):
        text = f"must be its default with dcp={settings.dcp}: this value has not been shown to work there"
        yield _refuse(case, Rule.DCP_VALIDATED, key, text, f"leave {key} out, or set dcp=1")


def _not_built(case: _Case) -> Iterator[Refusal]:
    if case.settings.layerwise_kv_sharding:
        text = "0: each rank keeps its heads, or its blocks, of all layers"
        yield _refuse(
            case, Rule.LAYERWISE, "layerwise_kv_sharding", text, "leave it out; dcp cuts the KV cache by blocks"
        )
    if case.settings.device not in DEVICES:
        yield _refuse(case, Rule.DEVICE, "device", f"one of {', '.join(DEVICES)}", "leave it out")
    for key, (only, instead) in _LATER.items():
        if getattr(case.settings, key) != only:
            yield _refuse(
                case,
                Rule.NOT_BUILT,
                key,
                f"must be {_shown(only)}, nothing else is built yet: {instead}",
                "leave it out",
            )
    if case.settings.graph_double_buffer:
        text = (
            "must be 0: a step is told what the one before has chosen, so that no two of them can be under way at once"
        )
        yield _refuse(case, Rule.DOUBLE_BUFFER, "graph_double_buffer", text, "leave it out")


def _steps(case: _Case) -> Iterator[Refusal]:
    settings = case.settings
    if settings.max_step_tokens < settings.num_slots:
        text = f"at least num_slots = {settings.num_slots}: every decoding sequence has a token in every step"
        yield _refuse(case, Rule.STEP, "max_step_tokens", text, "raise it, or lower num_slots")
    most = most_step_tokens(settings.num_slots)
    if settings.max_step_tokens > most:
        text = f"at most {max(0, most)} with num_slots = {settings.num_slots}: a rank is told of a step in one message"
        yield _refuse(case, Rule.STEP_MESSAGE, "max_step_tokens", text, "lower it, or num_slots")
    is_whole = case.role is WorkerRole.MIXED and not is_prefill_chunked(settings, case.role)
    if is_whole and settings.reserve_output_tokens:
        text = "0 without chunked_prefill: one that gave way is computed again with its answer, which may not fit into a step"
        yield _refuse(case, Rule.WHOLE_PROMPTS, "reserve_output_tokens", text, "leave it out, or set chunked_prefill=1")


def _guessing(case: _Case) -> Iterator[Refusal]:
    settings, depth = case.settings, case.settings.num_speculative_tokens
    by_head = depth > 0 and settings.drafter == MTP
    if depth and settings.depth_of(case.role) + 1 > settings.max_step_tokens:
        text = f"below max_step_tokens = {settings.max_step_tokens}: a token and its guesses are verified in one step"
        yield _refuse(case, Rule.GUESSES_FIT, "num_speculative_tokens", text, "lower it, or raise max_step_tokens")
    if by_head and case.model is not None and not case.model.num_mtp_layers:
        text = "must be ngram: the checkpoint has no draft head (mtp_num_hidden_layers is 0)"
        remedy = "set drafter=ngram, or num_speculative_tokens=0, or take a checkpoint with a draft head"
        yield _refuse(case, Rule.DRAFT_HEAD, "drafter", text, remedy)
    if settings.drafter != MTP and not depth:
        text = "only with num_speculative_tokens above 0: nothing is guessed here"
        yield _refuse(case, Rule.GUESSING_ONLY, "drafter", text, "leave it out, or set num_speculative_tokens")
    if settings.mtp_draft_body_tp1 and not by_head:
        text = "only with num_speculative_tokens above 0 and drafter=mtp: there is no draft head here"
        yield _refuse(case, Rule.GUESSING_ONLY, "mtp_draft_body_tp1", text, "set it to 0, or let the draft head guess")
    if settings.mtp_draft_body_tp1 and settings.dcp > 1 and case.role is not WorkerRole.PREFILL:
        text = (
            f"must be 0 with dcp={settings.dcp}: ranks that share the blocks of a sequence share the draft's heads too"
        )
        yield _refuse(case, Rule.DRAFT_SHARED, "mtp_draft_body_tp1", text, "set it to 0, or set dcp=1")


def _pulling(case: _Case) -> Iterator[Refusal]:
    """What only a worker that pulls uses: whoever gives it to this one believes that it does."""
    settings = case.settings
    if case.role is not WorkerRole.DECODE:
        return  # set for everybody: it does not concern this one
    if settings.transfer is not Transfer.PULL:
        text = f"only with transfer={Transfer.PULL}; this worker has transfer={settings.transfer}"
        remedy = f"leave it out, or set transfer={Transfer.PULL}"
        for key in given_for_pulls(settings):
            refusal = _refuse(case, Rule.PULL_ONLY, key, text, remedy)
            yield msgspec.structs.replace(refusal, addressed_only=True)
    elif settings.num_staging_rows > settings.num_slots:
        text = f"at most num_slots = {settings.num_slots}: a request that is pulled has a slot"
        yield _refuse(case, Rule.STAGING_ROWS, "num_staging_rows", text, "lower it, or raise num_slots")


def _addresses(case: _Case) -> Iterator[Refusal]:
    """Addresses that nobody looks at, none at all, or one that is only good for listening."""
    settings = case.settings
    host, advertised = settings.transport_host, settings.transport_advertise_host
    if settings.transport is not Transport.TCP:
        text = f"only with transport=tcp; this worker has transport={settings.transport}"
        given = {"transport_host": host != DEFAULT_TRANSPORT_HOST, "transport_advertise_host": advertised != ""}
        for key, is_given in given.items():
            if is_given:
                yield _refuse(case, Rule.TCP_ONLY, key, text, "leave it out, or set transport=tcp")
    elif not host:
        text = "a name or an address of this host; 0.0.0.0 for all of them"
        yield _refuse(case, Rule.TCP_ADDRESS, "transport_host", text, "give one, or leave it out")
    elif (advertised or host) in _EVERYWHERE:
        text = f"what peers can reach, when transport_host is {host}"
        yield _refuse(
            case, Rule.TCP_ADDRESS, "transport_advertise_host", text, "give a name or an address of this host"
        )


_RULES: Final[tuple[Callable[[_Case], Iterator[Refusal]], ...]] = (
    _cuts,
    _context_parallel,
    _not_built,
    _steps,
    _guessing,
    _pulling,
    _addresses,
)


def _whole_prompts(settings: WorkerSettings) -> str:
    """What a mixed worker sets to compute prompts in one piece, and nobody refuses."""
    return "chunked_prefill=0" + (" and reserve_output_tokens=0" if settings.reserve_output_tokens else "")


def _cautions(case: _Case) -> Iterator[Caution]:
    settings = case.settings
    if settings.dcp > 1 and is_prefill_chunked(settings, case.role) and settings.experimental_dcp_chunked_prefill:
        yield Caution(
            name="dcp_chunked_prefill_not_bitwise",
            text=f"prompts are computed in pieces with dcp={settings.dcp}: answers need not be those of dcp=1 bit for bit",
            remedy=f"to roll back set {_whole_prompts(settings)}, or dcp=1",
        )


def _refuse(case: _Case, rule: Rule, key: str, text: str, remedy: str) -> Refusal:
    return Refusal(rule=rule, key=key, value=_shown(getattr(case.settings, key)), text=text, remedy=remedy)


def _shown(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _passes(check: Callable[..., None], *numbers: int) -> bool:
    try:
        check(*numbers)
    except InvalidValueError:
        return False
    return True


def _any_of(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in numbers)
