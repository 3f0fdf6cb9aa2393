"""What operators and a new broker ask of a worker: live settings, and which handoffs it holds."""

from __future__ import annotations

import re
from typing import Any

import pytest

from common.bus.storage import EVENTS_CONFIG
from common.runtime.settings import SettingsError, load
from common.worker.configuration import rules_of
from common.worker.core.role_settings import misplaced
from common.worker.settings import WorkerSettings
from contracts.errors import ErrorCode
from contracts.handoff import HandoffList, ListHandoffs, Reserved
from contracts.pull import Transfer
from contracts.requests import Refused
from contracts.subjects import WorkerVerb
from contracts.workers import SetRefused, SettingChanged, SettingEvent, SetWorker, WorkerRole
from services.decode.service import DecodeService
from services.launcher.core.setting_event import render_setting_event
from services.launcher.stream import read_all
from services.mixed.service import MixedService
from services.prefill.service import PrefillService
from tests.integration.worker_world import HANDOFF, Mesh, in_mesh, pair

KINDS: dict[WorkerRole, Any] = {
    WorkerRole.PREFILL: PrefillService,
    WorkerRole.DECODE: DecodeService,
    WorkerRole.MIXED: MixedService,
}

VALUES = {"log_level": ("debug", "loud"), "parallel_shard_pull": ("1", "0", "maybe")}


async def change(mesh: Mesh, role: str, key: str, value: str, by: str = "") -> Any:
    """Set one setting of the worker of a role."""
    message = SetWorker(key=key, value=value, by=by)
    return await mesh.ask(role, f"{role}-0", WorkerVerb.SET, message, SettingChanged | SetRefused | Refused)


def test_a_decode_worker_changes_how_it_pulls_while_it_runs() -> None:
    """It holds at once, and the answer says what it was before."""

    async def scenario(mesh: Mesh) -> None:
        service = await mesh.add(DecodeService, "decode-0", transfer=Transfer.PULL)
        for value, before, after in (("0", "1", "0"), ("true", "0", "1"), ("1", "1", "1")):
            answer = await change(mesh, "decode", "parallel_shard_pull", value)
            assert answer == SettingChanged(worker_id="decode-0", key="parallel_shard_pull", before=before, value=after)
            assert service.live.now.parallel_shard_pull is (after == "1")

    in_mesh(scenario)


def test_a_change_is_an_event() -> None:
    """Who asked, which worker, what it was and is; what is refused changes nothing, and is none."""

    async def scenario(mesh: Mesh) -> None:
        await mesh.bus.ensure_stream(EVENTS_CONFIG)
        service = await mesh.add(DecodeService, "decode-0", transfer=Transfer.PULL)
        await change(mesh, "decode", "parallel_shard_pull", "0", "somebody@somewhere")
        assert isinstance(await change(mesh, "decode", "parallel_shard_pull", "perhaps"), SetRefused)
        await change(mesh, "decode", "log_level", "debug")
        assert await service.bus.flush_events()
        told = await read_all(mesh.bus)
        assert told.num_unreadable == 0
        events = [event for event in told.all if isinstance(event, SettingEvent)]
        assert [(event.key, event.before, event.value, event.by) for event in events] == [
            ("parallel_shard_pull", "1", "0", "somebody@somewhere"),
            ("log_level", "info", "debug", ""),
        ]
        assert {(event.service, event.instance, event.incarnation) for event in events} == {
            ("decode", "decode-0", "i-decode-0")
        }
        line = render_setting_event(events[0])
        assert line.endswith(
            "  decode-0  setting_changed  parallel_shard_pull=0  before=1  by=somebody@somewhere",
        )
        assert render_setting_event(events[1]).endswith("  decode-0  setting_changed  log_level=debug  before=info")

    in_mesh(scenario)


@pytest.mark.parametrize("role", WorkerRole)
def test_every_worker_changes_its_log_level(role: WorkerRole) -> None:
    """Whoever writes the log is told; a level that there is not is refused and changes nothing."""

    async def scenario(mesh: Mesh) -> None:
        await mesh.add(KINDS[role], f"{role}-0")
        answer = await change(mesh, role, "log_level", "debug")
        assert answer == SettingChanged(worker_id=f"{role}-0", key="log_level", before="info", value="debug")
        refused = await change(mesh, role, "log_level", "loud")
        assert isinstance(refused, SetRefused)
        assert refused.error.message == (
            "log_level: 'loud' is not allowed; the rule is: one of debug, error, info, warning"
        )
        assert mesh.log_levels == ["debug"]

    in_mesh(scenario)


@pytest.mark.parametrize(
    ("role", "key", "value", "rule"),
    [
        ("decode", "parallel_shard_pull", "maybe", "0, 1, true or false"),
        ("decode", "parallel_shard_pull", "0", "only with transfer=pull; this worker has transfer=push"),
        ("decode", "num_blocks", "7", "it is read at the start alone"),
        ("decode", "parallel_pull", "0", "there is no such setting"),
        ("prefill", "parallel_shard_pull", "0", "one of log_level may change while this worker runs"),
    ],
)
def test_what_cannot_be_set_is_refused_by_name(role: str, key: str, value: str, rule: str) -> None:
    """The error names the key, the value, the rule, and what could be set instead."""

    async def scenario(mesh: Mesh) -> None:
        service = await mesh.add(KINDS[WorkerRole(role)], f"{role}-0")
        before = service.live.now
        answer = await change(mesh, role, key, value)
        assert isinstance(answer, SetRefused)
        assert answer.error.code is ErrorCode.INVALID_REQUEST
        assert answer.error.param == key
        assert answer.error.message.startswith(f"{key}: {value!r} is not allowed; the rule is: ")
        assert rule in answer.error.message
        assert service.live.now == before

    in_mesh(scenario)


@pytest.mark.parametrize("transfer", Transfer)
@pytest.mark.parametrize("role", WorkerRole)
def test_what_a_worker_would_not_start_with_it_does_not_change_to(role: WorkerRole, transfer: Transfer) -> None:
    """Every live setting with every kind of value: the start's rule word for word, or the change."""

    async def scenario(mesh: Mesh) -> None:
        await mesh.add(KINDS[role], f"{role}-0", transfer=transfer)
        unknown = await change(mesh, role, "nothing", "1")
        keys = [key for key in VALUES if re.search(rf"\b{key}\b", unknown.error.message)]
        assert f"one of {', '.join(keys)} may change" in unknown.error.message, "VALUES has every live setting"
        for key in keys:
            for value in VALUES[key]:
                answer = await change(mesh, role, key, value)
                told = answer.error.message if isinstance(answer, SetRefused) else ""
                rule = _rule_at_start(role, transfer, key, value)
                assert told == (f"{key}: {value!r} is not allowed; the rule is: {rule}" if rule else "")

    in_mesh(scenario)


def _rule_at_start(role: WorkerRole, transfer: Transfer, key: str, value: str) -> str:
    """Why a worker of this transfer does not start with a value of its own; empty: it does."""
    try:
        load(
            WorkerSettings,
            role=role,
            spec=f"worker_id=w,model=m,engine=fake,{key}={value}",
            overrides=(f"transfer={transfer}",),
            environ={},
            rules=rules_of(role),
            misplaced=misplaced(role),
        )
    except SettingsError as error:
        (problem,) = error.problems
        assert problem.key == key
        return problem.rule
    return ""


def test_a_new_broker_hears_which_handoffs_a_worker_holds() -> None:
    """Those with a sequence, until they are over; a prompt that nobody has asked to run is none.

    Its question deposes the broker before, which hears nothing any more; one whose fence nobody holds deposes nobody.
    """

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh)

        async def held(role: str, fence: int = 1) -> Any:
            message = ListHandoffs(fence=fence)
            return await mesh.ask(role, f"{role}-0", WorkerVerb.HANDOFFS, message, HandoffList | Refused)

        await mesh.send_prompt("prefill", "prefill-0")
        reserved = await mesh.reserve()
        assert isinstance(reserved, Reserved)
        assert await held("decode") == HandoffList(incarnation="i-decode-0", handoff_ids=(HANDOFF,))
        assert await held("prefill") == HandoffList(incarnation="i-prefill-0", handoff_ids=())
        await mesh.run(reserved)
        forged = await held("prefill", 2)
        assert forged.error.message == "fence: 2 was given to no broker; the one that leads has 1"
        assert await held("prefill", 1) == HandoffList(incarnation="i-prefill-0", handoff_ids=(HANDOFF,))
        await mesh.lease.lead(2)
        assert await held("prefill", 2) == HandoffList(incarnation="i-prefill-0", handoff_ids=(HANDOFF,))
        late = await mesh.run(reserved)
        assert (late.error.code, late.error.message) == (
            ErrorCode.STALE_FENCE,
            "fence: 1 is below the highest one seen",
        )
        assert (await held("prefill", 1)).error.code is ErrorCode.STALE_FENCE
        for role in ("prefill", "decode"):
            await mesh.release(role, f"{role}-0")
            assert (await held(role, 2)).handoff_ids == ()

    in_mesh(scenario)
