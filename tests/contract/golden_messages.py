"""Golden files: one sample of every message. `python -m tests.contract.golden_messages` writes them anew.

A golden file that changes is a change of the contract: old and new services meet during every rolling update.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, get_args

import msgspec

from contracts import codec, events, handoff, leases, links, pull, rank, rank_codec, requests, routers, show, workers
from contracts.codec import Versioned
from tests.contract.golden_rank_samples import RANK_MESSAGES
from tests.contract.golden_samples import BUS_MESSAGES

FOLDER: Final = Path(__file__).parent / "golden"
MODULES: Final = (events, handoff, leases, links, pull, requests, routers, show, workers)


def bus_kinds() -> set[type[Versioned]]:
    """Every message of the bus, as the contract modules define them."""
    found = (getattr(module, name) for module in MODULES for name in vars(module))
    return {
        kind
        for kind in found
        if isinstance(kind, type) and issubclass(kind, Versioned) and kind.__struct_config__.tag is not None
    }


def rank_kinds() -> set[type[msgspec.Struct]]:
    """Every message between a worker and its ranks."""
    return {*get_args(rank.RankCommand), *get_args(rank.RankMessage)}


def tag_of(message: msgspec.Struct) -> str:
    """The name of a message on the wire, and of its golden file."""
    return str(type(message).__struct_config__.tag)


def files() -> dict[Path, bytes]:
    """What every golden file holds: JSON for the bus, msgpack as hexadecimal text for ranks."""
    bus = {FOLDER / f"{tag_of(message)}.json": codec.encode(message) for message in BUS_MESSAGES}
    ranks = {
        FOLDER / f"{tag_of(message)}.msgpack.hex": rank_codec.encode(message).hex().encode()
        for message in RANK_MESSAGES
    }
    return {path: content + b"\n" for path, content in (bus | ranks).items()}


def main() -> None:
    """Write the golden files."""
    FOLDER.mkdir(exist_ok=True)
    for path, content in files().items():
        path.write_bytes(content)


if __name__ == "__main__":
    main()
