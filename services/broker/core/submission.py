"""What a submitted request must be, whatever the state of the broker. Pure."""

from __future__ import annotations

from collections.abc import Callable

from contracts import ids
from contracts.errors import ErrorCode, InvalidValueError, PdmeshError
from contracts.requests import DisaggregatedRoute, MixedRoute, Route, SubmitRequest, WorkerRef


def check_submit(
    submit: SubmitRequest,
    *,
    is_replaced: Callable[[WorkerRef], bool],
    is_gone: Callable[[WorkerRef], bool],
    max_timeout_ms: int,
) -> None:
    """Raise `PdmeshError` that names the field at fault.

    `incarnation_changed` for a start of a worker that was replaced, `worker_lost` for one that has fallen silent.
    """
    ids.check_token("router_id", submit.router_id)
    for worker in workers_on(submit.route):
        ids.check_token("worker_id", worker.worker_id)
        if is_replaced(worker):
            text = f"incarnation: {worker.incarnation!r} of {worker.worker_id} is gone"
            raise PdmeshError(text, code=ErrorCode.INCARNATION_CHANGED)
        if is_gone(worker):
            raise PdmeshError(f"{worker.worker_id} ({worker.incarnation}) is gone", code=ErrorCode.WORKER_LOST)
    expected = ids.handoff_id(submit.request_id, submit.attempt)
    if submit.handoff_id != expected:
        raise InvalidValueError(field="handoff_id", value=submit.handoff_id, rule=f"{expected}: request and attempt")
    for field, value in (
        ("num_prompt_tokens", submit.num_prompt_tokens),
        ("timeout_ms", submit.timeout_ms),
        ("sampling.max_tokens", submit.sampling.max_tokens),
    ):
        if value < 1:
            raise InvalidValueError(field=field, value=value, rule="1 or more")
    if submit.timeout_ms > max_timeout_ms:
        rule = f"at most {max_timeout_ms}, the record_ttl_s of the broker: no request outlives its record"
        text = f"timeout_ms: {submit.timeout_ms} is not allowed; the rule is: {rule}; lower request_timeout_s of the router"
        raise PdmeshError(text, code=ErrorCode.INTERNAL)  # no client has a say in that
    if submit.num_delivered_tokens >= submit.num_prompt_tokens:
        rule = f"less than num_prompt_tokens, {submit.num_prompt_tokens}: they are the end of the prompt"
        raise InvalidValueError(field="num_delivered_tokens", value=submit.num_delivered_tokens, rule=rule)


def workers_on(route: Route) -> tuple[WorkerRef, ...]:
    """The starts of workers that a route names, in the order in which it passes them."""
    match route:
        case DisaggregatedRoute(prefill=prefill, decode=decode):
            return prefill, decode
        case MixedRoute(mixed=mixed):
            return (mixed,)
