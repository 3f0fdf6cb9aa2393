"""Runs a command that dies with the process that started it, even if that one is killed with SIGKILL.

`python -I -S tether.py PARENT_PID COMMAND...` asks the kernel for the signal and then becomes the command. It is a program
of its own, since code between fork and exec of a process with threads may hang.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Tie this process to its parent and replace it by the command. Raises OSError if either is refused."""
    parent, command = int(arguments[0]), arguments[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if os.getppid() != parent:  # it died before the kernel was asked
        sys.exit(1)
    os.execv(command[0], command)  # noqa: S606 - a shell would stand between the launcher and its child


if __name__ == "__main__":
    main(sys.argv[1:])
