"""Sleeping on a word of shared memory (Linux `futex(2)`), through ctypes."""

from __future__ import annotations

import ctypes
import platform
from typing import Final

_SYSCALL_NUMBERS: Final = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT: Final = 0
_FUTEX_WAKE: Final = 1
_EVERYBODY: Final = 2**31 - 1

MACHINE: Final = platform.machine()
SUPPORTED: Final = MACHINE in _SYSCALL_NUMBERS
"""Whether the number of the system call is known on this machine."""
_NUMBER: Final = _SYSCALL_NUMBERS.get(MACHINE, -1)


class _TimeSpec(ctypes.Structure):
    """`struct timespec` of a 64-bit machine."""

    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


_ARGUMENTS: Final = (ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p)
# Waking never blocks, so it keeps the interpreter lock (PyDLL); waiting lets it go (CDLL).
_wait_call: Final = ctypes.CDLL(None).syscall
_wait_call.argtypes = _ARGUMENTS
_wake_call: Final = ctypes.PyDLL(None).syscall
_wake_call.argtypes = _ARGUMENTS
_fence_word: Final = ctypes.c_uint32()
_FENCE_ADDRESS: Final = ctypes.addressof(_fence_word)


def futex_wait(address: int, value: int, timeout_s: float) -> None:
    """Sleep while the aligned u32 at `address` equals `value`: until woken, until a signal, or for `timeout_s` seconds.

    May return early for no reason: the caller looks at the word again.
    """
    whole = int(timeout_s)
    limit = _TimeSpec(whole, int((timeout_s - whole) * 1e9))
    _wait_call(_NUMBER, address, _FUTEX_WAIT, value, ctypes.addressof(limit))


def futex_wake(address: int) -> None:
    """Wake everybody who sleeps on the word at `address`."""
    _wake_call(_NUMBER, address, _FUTEX_WAKE, _EVERYBODY, None)


if MACHINE == "x86_64":

    def fence() -> None:
        """Nothing to do: x86 keeps the order of stores among each other, and of loads."""

else:

    def fence() -> None:
        """Order memory accesses before and after: the kernel runs a full barrier on its way to look for sleepers."""
        futex_wake(_FENCE_ADDRESS)
