"""Transfers that tests hold in their middle, for as long as they like."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from common.dataplane import shm_remote, tcp_caller
from common.dataplane.copier import copy_group

PATIENCE_S = 60


@dataclass
class Gate:
    """Holds whoever comes through a function: all of them, until it is opened."""

    entered: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    opened: threading.Event = field(default_factory=threading.Event)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which waits first."""

        def held(*arguments: Any, **named: Any) -> Any:
            self.entered.release()
            assert self.opened.wait(PATIENCE_S)
            return function(*arguments, **named)

        return held

    async def reached(self, count: int = 1) -> None:
        """Wait until so many more are held."""
        for _ in range(count):
            assert await asyncio.to_thread(self.entered.acquire, timeout=PATIENCE_S)


def hold_reads(transport: str, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Hold every read in its middle: the grant has been looked at, and no byte has been copied."""
    gate = Gate()
    if transport == "shm":
        monkeypatch.setattr(shm_remote, "copy_group", gate.before(copy_group))
    else:
        monkeypatch.setattr(tcp_caller.Caller, "lend", gate.before(tcp_caller.Caller.lend))
    return gate
