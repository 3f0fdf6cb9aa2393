"""What each token id says, in bytes."""

from collections.abc import Collection, Mapping


def _byte_of_char() -> dict[str, int]:
    """Return the alphabet of byte-level BPE: each of the 256 bytes is written as one printable character.

    Printable Latin-1 characters stand for themselves, the other bytes for U+0100 upwards, in order (GPT-2's table).
    """
    themselves = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in themselves}
    others = [byte for byte in range(256) if chr(byte) not in table]
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


class Vocabulary:
    """The bytes of every token of a byte-level BPE tokenizer.

    `vocab` maps a token as the tokenizer file spells it to its id. `added` maps the ids of added tokens to their plain
    text. `silent` are the ids that say nothing to a reader: special tokens, ends. Raises ValueError for a token that is
    neither added nor byte-level.
    """

    def __init__(
        self, *, vocab: Mapping[str, int], added: Mapping[int, str], silent: Collection[int], vocab_size: int
    ) -> None:
        self.size = vocab_size
        """Ids from 0 to below this are legal, also those that no token has (models pad their vocabulary)."""
        self._bytes = [b""] * max([vocab_size, *(token_id + 1 for token_id in vocab.values())])
        for spelled, token_id in vocab.items():
            if token_id in added:
                self._bytes[token_id] = added[token_id].encode()
                continue
            try:
                self._bytes[token_id] = bytes([_BYTE_OF_CHAR[char] for char in spelled])
            except KeyError as error:
                raise ValueError(
                    f"token {token_id} ({spelled!r}) is not byte-level: {error} stands for no byte"
                ) from None
        self._spoken = list(self._bytes)
        for token_id in silent:
            if token_id < len(self._spoken):
                self._spoken[token_id] = b""

    def spoken(self, token_id: int) -> bytes:
        """Return what a reader is shown; nothing for silent and for unassigned ids."""
        return self._spoken[token_id] if 0 <= token_id < len(self._spoken) else b""

    def spelled(self, token_id: int) -> bytes:
        """Return the token's bytes, also if it is silent."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""
