"""A file descriptor that travels with the arguments of a `multiprocessing` process (spawn or forkserver)."""

from __future__ import annotations

from multiprocessing import reduction


class PassedFd:
    """Wraps a descriptor of the parent; in the child, `fileno()` is the child's own duplicate, which the child closes."""

    def __init__(self, fd: int) -> None:
        """Borrow `fd`, which must stay open until the child has started."""
        self._fd = fd

    def fileno(self) -> int:
        """The descriptor in this process."""
        return self._fd

    def __reduce__(self) -> tuple[object, tuple[object]]:
        """Duplicate the descriptor into the child; pickling for anything but a starting process is refused by multiprocessing."""
        return _rebuild, (reduction.DupFd(self._fd),)


def _rebuild(duplicate: object) -> PassedFd:
    return PassedFd(duplicate.detach())  # type: ignore[attr-defined] # multiprocessing has no type for it
