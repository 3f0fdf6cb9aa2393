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
from tests.integration.worker_world import HANDOFF, SAMPLING, Mesh, in_mesh, pair


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
