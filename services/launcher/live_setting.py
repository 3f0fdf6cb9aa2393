"""`pdmesh set WORKER key=value`: change a setting of a worker that runs."""

from __future__ import annotations

import getpass
import socket
from typing import Final

from common.bus.errors import BusError
from common.bus.port import Bus
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import InvalidValueError
from contracts.ids import check_token
from contracts.requests import Refused
from contracts.subjects import WorkerVerb
from contracts.workers import MAX_AUTHOR_CHARS, SetRefused, SettingChanged, SetWorker
from services.launcher.console import Console
from services.launcher.stream import read_links

EXIT_SET: Final = 0
EXIT_NOT_SET: Final = 1

_ANSWER_S: Final = 5.0


async def change_setting(bus: Bus, worker_id: str, assignment: str, console: Console) -> int:
    """Ask the worker, and print what it was and is; return 1 when nothing was changed, after saying why.

    Raises `InvalidValueError` for what is not `key=value`, and as the bus does.
    """
    key, equals, value = assignment.partition("=")
    if not key or not equals:
        raise InvalidValueError(field="setting", value=assignment, rule="key=value")
    check_token("worker", worker_id)
    workers = {worker.worker_id: worker for worker in (await read_links(bus)).workers}
    worker = workers.get(worker_id)
    if worker is None:
        there = ", ".join(sorted(workers)) or "none"
        console.say(f"no worker {worker_id} is registered, and only workers can be told; there are: {there}")
        return EXIT_NOT_SET
    subject = subjects.worker_rpc(worker.role, worker_id, WorkerVerb.SET)
    try:
        reply = await bus.request(subject, encode(SetWorker(key=key, value=value, by=_author())), timeout=_ANSWER_S)
    except BusError as error:
        console.say(
            f"{worker_id} did not answer within {_ANSWER_S:g} s ({error.code}): whether it was changed is not known"
        )
        return EXIT_NOT_SET
    answer: SettingChanged | SetRefused | Refused = decode(
        reply.data,
        SettingChanged | SetRefused | Refused,  # type: ignore[arg-type]  # a union is not a type
    )
    if isinstance(answer, SettingChanged):
        console.show(f"{answer.worker_id}: {answer.key} was {answer.before}, is {answer.value}")
        return EXIT_SET
    console.say(f"{worker_id} refused: {answer.error.message}")
    return EXIT_NOT_SET


def _author() -> str:
    """Who asks: for the event that tells of the change."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that has no name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"[:MAX_AUTHOR_CHARS]
