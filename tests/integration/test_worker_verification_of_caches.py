"""With `verify_cache=1` a decode worker takes nothing over whose cache is not the one that was computed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from contracts.errors import ErrorCode
from contracts.handoff import PrefillFinished, Released, RequestEnded, Reserved, TakenOver
from contracts.pull import Transfer
from contracts.requests import Accepted, Refused
from tests.integration.worker_world import EXPECTED, HANDOFF, FaultyEngine, Mesh, in_mesh, pair

OTHER = "r2-0"


def _outcomes(mesh: Mesh) -> dict[str, float]:
    text = mesh.services["decode-0"].metrics.exposition().decode()
    found = re.findall(r'worker_cache_verifications_total\{outcome="(\w+)"\} (\S+)', text)
    return {outcome: float(value) for outcome, value in found}


async def _computed(mesh: Mesh, handoff: str) -> PrefillFinished:
    """Reserve, compute, and return what prefill says at its end."""
    await mesh.send_prompt("prefill", "prefill-0", handoff)
    reserved = await mesh.reserve(handoff=handoff)
    assert isinstance(reserved, Reserved)
    assert reserved.verify
    assert await mesh.run(reserved, pulled=reserved.pulled, verify=True) == Accepted(handoff_id=handoff)
    finished = await mesh.heard.get()
    assert isinstance(finished, PrefillFinished)
    assert finished.first_token is not None
    return finished


@pytest.mark.parametrize("changes", [{}, {"tp": 2}], ids=["tp-1", "tp-2"])
def test_only_the_request_whose_cache_differs_is_refused(changes: dict[str, Any]) -> None:
    """The refusal names what differs and is no retry's business; nothing was sent, memory comes back, the other goes on."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh, verify_cache=True, **changes)
        service = mesh.services["decode-0"]
        engine = service.replicas[0].engine
        assert isinstance(engine, FaultyEngine)
        engine.corrupted.add(HANDOFF)
        finished = await _computed(mesh, HANDOFF)
        assert finished.digests
        refused = await mesh.commit(finished.first_token or 0, digests=finished.digests)
        assert isinstance(refused, Refused)
        assert refused.error.code is ErrorCode.CACHE_CORRUPT
        assert not refused.error.rule.retryable
        assert "was computed as" in refused.error.message
        assert isinstance(await mesh.release("decode", "decode-0"), Released)
        assert mesh.frames.empty()
        good = await _computed(mesh, OTHER)
        assert await mesh.commit(good.first_token or 0, OTHER, good.digests) == Accepted(handoff_id=OTHER)
        ids, _ = await mesh.text()
        assert ids == EXPECTED
        assert isinstance(await mesh.heard.get(), TakenOver)
        assert isinstance(await mesh.heard.get(), RequestEnded)
        assert _outcomes(mesh) == {"good": 1.0, "corrupt": 1.0, "unknown": 0.0}
        assert not service.table.sequences
        service.replicas.check_integrity()

    in_mesh(scenario)


def test_a_commit_without_digests_is_refused() -> None:
    """Whoever wants to verify does not take a request over unverified."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh, verify_cache=True)
        finished = await _computed(mesh, HANDOFF)
        refused = await mesh.commit(finished.first_token or 0)
        assert isinstance(refused, Refused)
        assert refused.error.code is ErrorCode.TRANSFER_FAILED  # whoever had them is gone: another attempt has its own
        assert refused.error.message.startswith("digests: none is not allowed")
        assert await mesh.commit(finished.first_token or 0, digests=finished.digests) == Accepted(handoff_id=HANDOFF)
        assert await mesh.commit(finished.first_token or 0, digests=finished.digests) == Accepted(handoff_id=HANDOFF)
        ids, _ = await mesh.text()
        assert ids == EXPECTED
        assert _outcomes(mesh) == {"good": 1.0, "corrupt": 0.0, "unknown": 1.0}

    in_mesh(scenario)


def test_without_the_setting_nothing_is_digested_and_nothing_seen() -> None:
    """The same difference passes: it is the verification that sees it."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)
        engine = mesh.services["decode-0"].replicas[0].engine
        assert isinstance(engine, FaultyEngine)
        engine.corrupted.add(HANDOFF)
        await mesh.send_prompt("prefill", "prefill-0")
        reserved = await mesh.reserve()
        assert not reserved.verify
        await mesh.run(reserved)
        finished = await mesh.heard.get()
        assert isinstance(finished, PrefillFinished)
        assert finished.digests == ()
        assert await mesh.commit(finished.first_token or 0) == Accepted(handoff_id=HANDOFF)

    in_mesh(scenario)


def test_what_is_pulled_is_verified_as_well() -> None:
    """Prefill's digests hold everything, whoever moves it."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh, verify_cache=True, transfer=Transfer.PULL)
        finished = await _computed(mesh, HANDOFF)
        assert finished.source is not None
        assert {each.role for each in finished.digests} == {"key", "value", "conv", "ssm"}
        assert await mesh.pull(finished.source) == Accepted(handoff_id=HANDOFF)
        await mesh.heard.get()
        assert await mesh.commit(finished.first_token or 0, digests=finished.digests) == Accepted(handoff_id=HANDOFF)

    in_mesh(scenario)


async def _committed_three_times(mesh: Mesh, finished: PrefillFinished) -> list[Any]:
    """As a broker does that hears nothing for a while, while the engine is at work."""
    asked = []
    async with mesh.services["decode-0"].replicas[0].loop.lock:
        for _ in range(3):
            asked.append(mesh.group.create_task(mesh.commit(finished.first_token or 0, digests=finished.digests)))
            await mesh.clock.sleep(1.0)
    return [await task for task in asked]


@pytest.mark.parametrize("is_corrupt", [False, True])
def test_a_commit_that_comes_again_is_verified_once(*, is_corrupt: bool) -> None:
    """While the ranks are at it everybody waits for the same digests; later ones get the verdict that stands."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh, verify_cache=True)
        engine = mesh.services["decode-0"].replicas[0].engine
        assert isinstance(engine, FaultyEngine)
        if is_corrupt:
            engine.corrupted.add(HANDOFF)
        finished = await _computed(mesh, HANDOFF)
        answers = await _committed_three_times(mesh, finished)
        answers.append(await mesh.commit(finished.first_token or 0, digests=finished.digests))
        assert answers == [answers[0]] * 4
        if is_corrupt:
            assert isinstance(answers[0], Refused)
            assert answers[0].error.code is ErrorCode.CACHE_CORRUPT
            assert _outcomes(mesh) == {"good": 0.0, "corrupt": 1.0, "unknown": 0.0}
        else:
            assert answers[0] == Accepted(handoff_id=HANDOFF)
            ids, _ = await mesh.text()
            assert ids == EXPECTED
            assert _outcomes(mesh) == {"good": 1.0, "corrupt": 0.0, "unknown": 0.0}

    in_mesh(scenario)


def test_an_engine_that_could_not_tell_is_asked_anew() -> None:
    """That was no verdict."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh, verify_cache=True)
        engine = mesh.services["decode-0"].replicas[0].engine
        assert isinstance(engine, FaultyEngine)
        finished = await _computed(mesh, HANDOFF)
        engine.failing_digests = 1
        refused = await mesh.commit(finished.first_token or 0, digests=finished.digests)
        assert isinstance(refused, Refused)
        assert refused.error.code is ErrorCode.WORKER_FAILED
        assert await mesh.commit(finished.first_token or 0, digests=finished.digests) == Accepted(handoff_id=HANDOFF)
        assert _outcomes(mesh) == {"good": 1.0, "corrupt": 0.0, "unknown": 1.0}

    in_mesh(scenario)
