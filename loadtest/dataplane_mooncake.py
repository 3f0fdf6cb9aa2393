"""Mooncake's transfer engine over TCP, where it is installed: an engine that others use, for comparison.

It listens on every interface and lets anybody in: a load test starts it for seconds, and nothing else of this project does.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from common.layout.run import Run
from loadtest.dataplane_ends import LOOPBACK, Address, TransferFailed, address_of, starts

_MODULE: Final = "mooncake.engine"
_ENVIRONMENT: Final = {
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",  # without it, it runs out of ports
    "MC_FORCE_TCP": "1",  # else the presence of hardware decides
    "GLOG_minloglevel": "3",
}


def why_not() -> str:
    """Why there is no such engine here; "" if there is one."""
    try:
        _module()
    except ModuleNotFoundError:
        return "not installed"
    except ImportError as error:  # a library that it needs
        return f"cannot be loaded: {error}"
    return ""


class MooncakeEnd:
    """An engine with some memory registered."""

    def __init__(self, data: memoryview) -> None:
        """Borrows `data`. Raises `TransferFailed`."""
        self._data = data
        self._memory = address_of(data)
        self._engine = _module().TransferEngine()
        if self._engine.initialize(LOOPBACK, "P2PHANDSHAKE", "tcp", ""):
            raise TransferFailed("mooncake does not start")
        if self._engine.register_memory(self._memory, len(data)):
            raise TransferFailed("mooncake does not take the memory")

    @property
    def data(self) -> memoryview:
        """The memory."""
        return self._data

    @property
    def address(self) -> Address:
        """See `Destination.address`."""
        return Address(host=LOOPBACK, port=self._engine.get_rpc_port(), memory=self._memory)

    def close(self) -> None:
        """Give the memory back; the engine's threads end with the process."""
        self._engine.unregister_memory(self._memory)


class MooncakeSource(MooncakeEnd):
    """The end that sends."""

    def __init__(self, data: memoryview, address: Address) -> None:
        super().__init__(data)
        self._peer = f"{address.host}:{address.port}"
        self._there = address.memory

    def prepare(self, runs: Sequence[Run], nbytes: int) -> Callable[[], None]:
        """See `Source.prepare`."""
        local, remote = starts(runs)
        return partial(self._send, self._memory + local, self._there + remote, nbytes)

    def _send(self, origin: int, to: int, nbytes: int) -> None:
        status = self._engine.transfer_sync_write(self._peer, origin, to, nbytes)
        if status:
            raise TransferFailed(f"a transfer of mooncake ended with {status}")


def _module() -> Any:
    for name, value in _ENVIRONMENT.items():
        os.putenv(name, value)  # for its C++, which reads the environment itself
    return importlib.import_module(_MODULE)
