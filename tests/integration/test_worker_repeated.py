"""A command that comes again is delivery; one of the same handoff that asks for something else is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from contracts.errors import ErrorCode
from contracts.handoff import Reserved
from contracts.manifest import Role
from contracts.pull import Transfer
from contracts.requests import Accepted, Refused, SamplingParams, WorkerRef
from contracts.subjects import WorkerVerb
from services.mixed.service import MixedService
from tests.integration.worker_world import HANDOFF, SAMPLING, Mesh, in_mesh, mixed_run, pair


@pytest.mark.parametrize(
    "changes",
    [
        {"num_prompt_tokens": 41},
        {"sampling": SamplingParams(max_tokens=13, seed=9, temperature=0.0)},
        {"source": WorkerRef(worker_id="prefill-0", incarnation="i-other")},
    ],
    ids=str,
)
def test_a_reservation_for_something_else_is_refused(changes: dict[str, Any]) -> None:
    """The first stands, and its own repeat still gets its grant."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh, transfer=Transfer.PULL)
        first = await mesh.reserve()
        assert isinstance(first, Reserved)
        second = await mesh.reserve(**({"sampling": SAMPLING} | changes))
        assert isinstance(second, Refused)
        assert second.error.code is ErrorCode.DUPLICATE
        assert (await mesh.reserve()).grant == first.grant
        await mesh.release("decode", "decode-0")
        mesh.assert_empty()

    in_mesh(scenario)


@pytest.mark.parametrize("changes", [{"slot": 1}, {"generation": 99}, {"secret": "00" * 16}], ids=str)
def test_a_run_into_another_grant_is_refused(changes: dict[str, Any]) -> None:
    """The first goes on; so do its repeats. Other roles to be pulled are something else, too."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        await mesh.send_prompt("prefill", "prefill-0")
        reserved = await mesh.reserve()
        assert await mesh.run(reserved) == Accepted(handoff_id=HANDOFF)
        other = msgspec.structs.replace(reserved.grant, **changes)
        for answer in (await mesh.run(reserved, grant=other), await mesh.run(reserved, pulled=(Role.SSM,))):
            assert isinstance(answer, Refused)
            assert answer.error.code is ErrorCode.DUPLICATE
        assert await mesh.run(reserved) == Accepted(handoff_id=HANDOFF)
        for role in ("prefill", "decode"):
            await mesh.release(role, f"{role}-0")
        mesh.assert_empty()

    in_mesh(scenario)


OTHER_WORK = [
    {"prompt_hash": "0" * 64},
    {"num_prompt_tokens": 39},
    {"sampling": msgspec.structs.replace(SAMPLING, max_tokens=13)},
    {"num_delivered_tokens": 1},
    {"router_id": "router-1"},
]
SAME_WORK = {"fence": 2, "timeout_ms": 30_000}
"""What another broker that goes on with a handoff says otherwise."""


@pytest.mark.parametrize("changes", [*OTHER_WORK, {"num_cached_tokens": 16}, {"verify": True}], ids=str)
def test_a_prefill_of_something_else_is_refused(changes: dict[str, Any]) -> None:
    """What is computed is what was asked for first; another broker may ask for that again."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        await mesh.send_prompt("prefill", "prefill-0")
        reserved = await mesh.reserve()
        assert await mesh.run(reserved) == Accepted(handoff_id=HANDOFF)
        answer = await mesh.run(reserved, **changes)
        assert isinstance(answer, Refused)
        assert answer.error.code is ErrorCode.DUPLICATE
        await mesh.lease.lead(2)
        assert await mesh.run(reserved, **SAME_WORK) == Accepted(handoff_id=HANDOFF)
        for role in ("prefill", "decode"):
            await mesh.release(role, f"{role}-0")
        mesh.assert_empty()

    in_mesh(scenario)


@pytest.mark.parametrize("changes", OTHER_WORK, ids=str)
def test_a_mixed_run_of_something_else_is_refused(changes: dict[str, Any]) -> None:
    """The request that was asked for first goes on to its end, and then nobody remembers it."""

    async def scenario(mesh: Mesh) -> None:
        service = await mesh.add(MixedService, "mixed-0")
        await mesh.send_prompt("mixed", "mixed-0")
        run = mixed_run()

        async def ask(**says: Any) -> Any:
            return await mesh.ask("mixed", "mixed-0", WorkerVerb.RUN, msgspec.structs.replace(run, **says))

        assert await ask() == Accepted(handoff_id=HANDOFF)
        answer = await ask(**changes)
        assert isinstance(answer, Refused)
        assert answer.error.code is ErrorCode.DUPLICATE
        await mesh.lease.lead(2)
        assert await ask(**SAME_WORK) == Accepted(handoff_id=HANDOFF)
        await mesh.heard.get()
        mesh.assert_empty()
        assert isinstance(service, MixedService)
        assert not service._runs

    in_mesh(scenario)
