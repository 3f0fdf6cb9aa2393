"""Each service crashes, is held down for a while, and is restarted; after each, the mesh serves again by itself."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Final

from compose.checks import check_served
from compose.problem import ComposeError
from compose.stack import Stack

_BACK_TIMEOUT_S: Final = 90.0
_NOTICE_TIMEOUT_S: Final = 30.0
_WORKERS: Final = ("prefill", "decode")
_LONG_ANSWER_S: Final = 6.0
"""How long the answer takes that is under way when the stack stops: long enough for a stop to come, less than the drain."""

_RATE_TOKENS: Final = 50


def check_outages(stack: Stack) -> None:
    """Raise ComposeError unless the mesh survives every outage of every service. Prints how long each took."""
    for service in stack.services:
        for name, outage in (("crash", _crash), ("kill", _hold_down), ("restart", _restart)):
            before = stack.started_at()
            started = time.perf_counter()
            outage(stack, service)
            stack.await_back(service, before[service], _BACK_TIMEOUT_S)
            took_s = time.perf_counter() - started
            check_served(stack)
            after = stack.started_at()
            others = [each for each in before if each != service and before[each] != after[each]]
            fallen = f", and took along: {', '.join(others)}" if others else ""
            print(f"  {stack}: {name} of {service}: served again after {took_s:.1f} s{fallen}", flush=True)
            if others:
                raise ComposeError(f"{name} of {service} ended other services: {', '.join(others)}")


def check_stop(stack: Stack) -> None:
    """Raise ComposeError unless an answer under way is finished while the stack stops, and all exit with status 0."""
    started = time.perf_counter()
    stack.client.chat("Go on.", _RATE_TOKENS)
    num_tokens = max(_RATE_TOKENS, round(_RATE_TOKENS * _LONG_ANSWER_S / (time.perf_counter() - started)))
    first = threading.Event()
    outcome: list[tuple[int, float] | ComposeError] = []

    def ask() -> None:
        try:
            outcome.append((stack.client.chat("Go on.", num_tokens, first.set)[2], time.perf_counter()))
        except ComposeError as error:
            outcome.append(error)
        finally:
            first.set()

    asking = threading.Thread(target=ask)
    asking.start()
    first.wait()
    stopping = time.perf_counter()
    statuses = stack.stop()
    asking.join()
    match outcome:
        case [(int(told), float(ended))] if told == num_tokens and ended > stopping:
            pass
        case _:
            raise ComposeError(f"an answer of {num_tokens} tokens was under way when the stack stopped: {outcome[0]}")
    if any(statuses.values()):
        raise ComposeError(f"not every service ended well: {statuses}")


def _crash(stack: Stack, service: str) -> None:
    stack.crash(service)


def _hold_down(stack: Stack, service: str) -> None:
    """Down until the mesh has noticed, where it can: whoever needs the service is then alive, and says that it is not ready."""
    stack.kill(service)
    if service == "nats":
        unready = [each for each in stack.services if each != service]
    else:
        unready = ["router"] if service.startswith(_WORKERS) else []
    for each in unready:
        stack.wait(f"{each} to be not ready", partial(_is_unready, stack, each), _NOTICE_TIMEOUT_S)
        if not stack.probe(each, "/health"):
            raise ComposeError(f"without {service}, {each} is not alive")
    stack.start(service)


def _is_unready(stack: Stack, service: str) -> bool:
    return not stack.probe(service, "/ready")


def _restart(stack: Stack, service: str) -> None:
    stack.restart(service)
