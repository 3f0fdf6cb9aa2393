"""How a message of any size travels over a socket of datagrams: in pieces, each of which says whether it begins or ends one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from contracts.errors import CodecError
from contracts.rank_codec import MAX_RANK_MESSAGE_BYTES

MAX_DATAGRAM_BYTES: Final = 192 * 1024
"""What a socket pair carries without special rights: its buffer is 208 KiB, of which the kernel wants some for itself."""
_FIRST: Final = 1
_LAST: Final = 2
_PIECE_BYTES: Final = MAX_DATAGRAM_BYTES - 1


def split(message: bytes) -> Iterator[bytes]:
    """The datagrams of a message, to be sent in this order and with nothing of another message in between."""
    num_pieces = max(1, -(-len(message) // _PIECE_BYTES))
    for number in range(num_pieces):
        flags = (_FIRST if number == 0 else 0) | (_LAST if number == num_pieces - 1 else 0)
        yield bytes((flags,)) + message[number * _PIECE_BYTES : (number + 1) * _PIECE_BYTES]


class Joiner:
    """Makes messages out of the datagrams of one socket.

    One that begins while another is unfinished takes its place: whoever sent that one has given up in the middle of it.
    """

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    def put(self, datagram: bytes) -> bytes | None:
        """Take the next datagram; the message, if it ends here.

        Raises `CodecError` for a piece that does not begin a message when none has begun, an unknown flag, and more than
        `MAX_RANK_MESSAGE_BYTES`.
        """
        flags = datagram[0]
        if flags & ~(_FIRST | _LAST):
            raise CodecError(
                f"flags: {flags} of a datagram are not allowed; the rule is: first is {_FIRST}, last {_LAST}"
            )
        if flags & _FIRST:
            self._pieces, self._num_bytes = [], 0
        elif not self._pieces:
            raise CodecError("a datagram goes on with a message that has not begun")
        self._pieces.append(datagram[1:])
        self._num_bytes += len(datagram) - 1
        if self._num_bytes > MAX_RANK_MESSAGE_BYTES:
            raise CodecError(f"a message of more than {MAX_RANK_MESSAGE_BYTES} bytes")
        if not flags & _LAST:
            return None
        message = b"".join(self._pieces)
        self._pieces, self._num_bytes = [], 0
        return message
