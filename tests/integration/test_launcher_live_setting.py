"""`pdmesh set` asks the worker that is meant, and says what came of it."""

from __future__ import annotations

import io

import msgspec
import pytest

from common.bus.storage import WORKERS_CONFIG
from contracts.codec import encode
from contracts.errors import InvalidValueError
from contracts.pull import Transfer
from services.decode.service import DecodeService
from services.launcher.arguments import parse
from services.launcher.console import Console
from services.launcher.live_setting import change_setting
from tests.integration.worker_world import Mesh, in_mesh


class _Screen:
    """A console whose lines can be read."""

    def __init__(self, mesh: Mesh) -> None:
        self.out, self.progress = io.StringIO(), io.StringIO()
        self.console = Console(mesh.clock, out=self.out, progress=self.progress)


@pytest.mark.parametrize(
    ("worker", "setting", "status", "out", "said"),
    [
        ("decode-0", "parallel_shard_pull=0", 0, "decode-0: parallel_shard_pull was 1, is 0\n", ""),
        ("decode-0", "num_blocks=3", 1, "", "it is read at the start alone"),
        ("decode-0", "parallel_shard_pull=", 1, "", "decode-0 refused: parallel_shard_pull: '' is not allowed"),
        (
            "decode-9",
            "log_level=debug",
            1,
            "",
            "no worker decode-9 is registered, and only workers can be told; there are: decode-0",
        ),
    ],
)
def test_a_setting_is_changed_or_the_reason_is_told(
    worker: str, setting: str, status: int, out: str, said: str
) -> None:
    """Status 0 and what it was and is; else status 1 and why nothing was changed."""

    async def scenario(mesh: Mesh) -> None:
        await mesh.add(DecodeService, "decode-0", transfer=Transfer.PULL)
        screen = _Screen(mesh)
        assert await change_setting(mesh.bus, worker, setting, screen.console) == status
        assert screen.out.getvalue() == out
        assert said in screen.progress.getvalue()

    in_mesh(scenario)


def test_a_worker_that_does_not_answer_is_named() -> None:
    """It is registered, and silent: whether it will be changed is not known."""

    async def scenario(mesh: Mesh) -> None:
        service = await mesh.add(DecodeService, "decode-0")
        record = msgspec.structs.replace(service.record(), worker_id="decode-1")
        await (await mesh.bus.ensure_bucket(WORKERS_CONFIG)).put("decode-1", encode(record))
        screen = _Screen(mesh)
        assert await change_setting(mesh.bus, "decode-1", "log_level=debug", screen.console) == 1
        assert "decode-1 did not answer within 5 s" in screen.progress.getvalue()

    in_mesh(scenario)


@pytest.mark.parametrize("setting", ["parallel_shard_pull", "=0"])
def test_what_is_no_assignment_is_refused(setting: str) -> None:
    """Before anybody is asked."""

    async def scenario(mesh: Mesh) -> None:
        with pytest.raises(InvalidValueError, match="key=value"):
            await change_setting(mesh.bus, "decode-0", setting, _Screen(mesh).console)

    in_mesh(scenario)


def test_the_command_line_names_worker_and_setting() -> None:
    """`pdmesh set WORKER key=value --nats URL`."""
    arguments = parse(["set", "decode-0", "parallel_shard_pull=0", "--nats", "nats://h:1"])
    assert (arguments.command, arguments.worker, arguments.setting, arguments.nats) == (
        "set",
        "decode-0",
        "parallel_shard_pull=0",
        "nats://h:1",
    )
