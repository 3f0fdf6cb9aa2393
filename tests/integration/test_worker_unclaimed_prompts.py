"""Prompts that nobody asks to run: the worker asks the broker what became of them, and drops those that will not be run."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from common.worker.broker_client import ASK_S
from common.worker.core.unclaimed import UNCLAIMED_S
from common.worker.service import SWEEP_EVERY_S, WorkerService
from common.worker.unclaimed_prompts import MAX_QUESTIONS
from contracts.codec import encode
from contracts.errors import ErrorCode, ErrorInfo
from contracts.handoff import PrefillFinished, Reserved
from contracts.requests import Accepted, FinishReason, Refused, TokenFrame
from contracts.subjects import WorkerVerb
from services.mixed.service import MixedService
from services.prefill.service import PrefillService
from tests.integration.worker_world import (
    EXPECTED,
    HANDOFF,
    PROMPT,
    REQUEST,
    Mesh,
    in_mesh,
    mixed_run,
    pair,
)

ROUND_S = UNCLAIMED_S + SWEEP_EVERY_S + ASK_S
"""By when a prompt has been asked about, and dropped if it is to be."""

UNKNOWN = Refused(handoff_id=HANDOFF, error=ErrorInfo(code=ErrorCode.UNKNOWN_HANDOFF, message="not known here"))
BUSY = Refused(handoff_id="unknown", error=ErrorInfo(code=ErrorCode.OVERLOADED, message="1024 requests"))
ENDED = TokenFrame(
    handoff_id=HANDOFF,
    request_id=REQUEST,
    attempt=0,
    index=0,
    num_tokens=0,
    final=True,
    error=ErrorInfo(code=ErrorCode.WORKER_LOST, message="prefill-0 was cut off"),
)
RUN_MIXED = mixed_run()


@pytest.mark.parametrize(("outcome", "reason"), [(UNKNOWN, "unknown"), (ENDED, "ended")], ids=["unknown", "ended"])
@pytest.mark.parametrize("kind", [PrefillService, MixedService])
def test_a_prompt_that_nobody_will_run_is_dropped_and_its_room_is_back(
    kind: type[WorkerService], outcome: msgspec.Struct, reason: str
) -> None:
    """Before its deadline: a full buffer takes the next one. It is said once, and counted."""

    async def scenario(mesh: Mesh) -> None:
        role = kind.role
        service = await mesh.add(kind, f"{role}-0", prompt_buffer_tokens=len(PROMPT))
        mesh.outcomes[HANDOFF] = outcome
        with capture_logs() as lines:
            await mesh.send_prompt(role, f"{role}-0")
            await mesh.clock.sleep(UNCLAIMED_S - SWEEP_EVERY_S)
            assert (len(service.prompts), mesh.questions) == (1, [])
            await mesh.clock.sleep(2 * SWEEP_EVERY_S + ASK_S)
        assert (len(service.prompts), service.prompts.num_tokens) == (0, 0)
        told = [line for line in lines if line["event"] == "prompt_dropped"]
        assert told == [
            {"event": "prompt_dropped", "log_level": "info", "handoff_id": HANDOFF, "reason": reason},
        ]
        counted = f'pdmesh_worker_dropped_prompts_total{{reason="{reason}"}} 1.0'
        assert counted in service.metrics.exposition().decode()
        await mesh.send_prompt(role, f"{role}-0", "r2-0")
        assert len(service.prompts) == 1

    in_mesh(scenario)


def test_a_prompt_of_a_request_that_is_under_way_is_kept_and_asked_about_again() -> None:
    """Its order to run may come at any time; once the request has ended it goes."""

    async def scenario(mesh: Mesh) -> None:
        service = await mesh.add(PrefillService, "prefill-0")
        await mesh.send_prompt("prefill", "prefill-0", timeout_ms=600_000)
        await mesh.clock.sleep(ROUND_S)
        assert (len(service.prompts), len(mesh.questions)) == (1, 1)
        mesh.outcomes[HANDOFF] = ENDED
        await mesh.clock.sleep(ROUND_S)
        assert (len(service.prompts), len(mesh.questions)) == (0, 2)

    in_mesh(scenario)


@pytest.mark.parametrize("answer", [None, BUSY], ids=["silence", "busy"])
def test_a_prompt_stays_until_a_broker_answers(answer: msgspec.Struct | None) -> None:
    """No answer is no verdict; half a minute later it is asked about again."""

    async def scenario(mesh: Mesh) -> None:
        service = await mesh.add(PrefillService, "prefill-0")
        mesh.outcomes[HANDOFF] = answer
        await mesh.send_prompt("prefill", "prefill-0", timeout_ms=600_000)
        await mesh.clock.sleep(ROUND_S)
        assert (len(service.prompts), len(mesh.questions)) == (1, 1)
        mesh.outcomes[HANDOFF] = UNKNOWN
        await mesh.clock.sleep(ROUND_S)
        assert (len(service.prompts), len(mesh.questions)) == (0, 2)

    in_mesh(scenario)


def test_a_prompt_that_is_asked_to_run_meanwhile_runs() -> None:
    """The broker's answer is older than its order: it must not end what has begun."""

    async def scenario(mesh: Mesh) -> None:
        await mesh.add(MixedService, "mixed-0")
        mesh.outcomes[HANDOFF] = None
        await mesh.send_prompt("mixed", "mixed-0")
        while not mesh.questions:
            await mesh.clock.sleep(0.01)
        assert await mesh.ask("mixed", "mixed-0", WorkerVerb.RUN, RUN_MIXED) == Accepted(handoff_id=HANDOFF)
        await mesh.questions[0].respond(encode(UNKNOWN))
        ids, final = await mesh.text()
        assert (ids, final.finish_reason) == (EXPECTED, FinishReason.LENGTH)

    in_mesh(scenario)


def test_a_late_order_to_run_a_dropped_prompt_is_refused_as_cancelled() -> None:
    """Until the prompt's own deadline, also when it is sent again: the router makes another attempt of that, not of a broken protocol."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        mesh.outcomes[HANDOFF] = UNKNOWN
        await mesh.send_prompt("prefill", "prefill-0")
        await mesh.clock.sleep(ROUND_S)
        reserved = await mesh.reserve()
        assert isinstance(reserved, Reserved)
        await mesh.send_prompt("prefill", "prefill-0")
        assert len(mesh.services["prefill-0"].prompts) == 0
        await mesh.clock.sleep(60.0 - ROUND_S - SWEEP_EVERY_S)
        late = await mesh.run(reserved)
        assert isinstance(late, Refused)
        assert late.error.code is ErrorCode.CANCELLED
        await mesh.clock.sleep(3 * SWEEP_EVERY_S)
        await mesh.send_prompt("prefill", "prefill-0")
        assert await mesh.run(reserved) == Accepted(handoff_id=HANDOFF)
        assert isinstance(await mesh.heard.get(), PrefillFinished)

    in_mesh(scenario)


def test_a_worker_full_of_prompts_asks_a_bounded_number_of_questions_at_once() -> None:
    """While nobody answers, no more are begun than there is room for; all have their turn."""

    async def scenario(mesh: Mesh) -> None:
        service = await mesh.add(PrefillService, "prefill-0")
        handoffs = [f"r{number}-0" for number in range(2 * MAX_QUESTIONS)]
        answers: dict[str, Any] = {each: msgspec.structs.replace(UNKNOWN, handoff_id=each) for each in handoffs}
        mesh.outcomes |= dict.fromkeys(handoffs)
        for each in handoffs:
            await mesh.send_prompt("prefill", "prefill-0", each, timeout_ms=600_000)
        await mesh.clock.sleep(UNCLAIMED_S + SWEEP_EVERY_S)
        assert len(mesh.questions) == MAX_QUESTIONS
        mesh.outcomes |= answers
        await mesh.clock.sleep(ROUND_S)
        assert len(service.prompts) == 0
        assert len(mesh.questions) == 3 * MAX_QUESTIONS

    in_mesh(scenario)
