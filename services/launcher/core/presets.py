"""Meshes that have a name: which workers, and their settings. Pure data.

A preset stands below everything that is given beside it: flags, SPECs, variables and the config file win over its settings, and a
worker that is given replaces those of its role.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """A mesh with a name. `settings` are as in a config file: for everybody, or in a section for one role; `text` is one line."""

    name: str
    text: str
    roles: tuple[str, ...]
    settings: Mapping[str, Any]


def _two_to_one(depth: int) -> Preset:
    """Two prefill ranks that hand over to one decode rank, which guesses `depth` tokens with the draft head.

    The design that it is named after also captures its steps (`graph`, `decode_no_padding`) and overlaps their planning
    (`schedule_overlap`): these are not built yet, refused by name when they are set, and not in here.
    """
    settings = {
        "num_speculative_tokens": depth,
        "drafter": "mtp",
        "mtp_draft_body_tp1": True,
        "graph_double_buffer": False,
        "prefix_cache": False,
        "chunked_prefill": True,
        "prefill": {"tp": 2},
        "decode": {"tp": 1, "transfer": "push"},
    }
    text = f"prefill on two ranks, decode on one, which guesses {depth} tokens with the draft head"
    return Preset(name=f"p2d1-mtp{depth}", text=text, roles=("prefill", "decode"), settings=settings)


PRESETS: Final[Mapping[str, Preset]] = MappingProxyType({each.name: each for each in map(_two_to_one, (3, 5))})
"""All of them, by name."""
