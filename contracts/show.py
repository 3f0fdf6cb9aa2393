"""One handoff as people see it: everything that the broker knows, and what each worker holds."""

from __future__ import annotations

import msgspec

from contracts.codec import Versioned
from contracts.handoff import HandoffRecord
from contracts.ids import Token
from contracts.manifest import Namespace, Role
from contracts.numbers import Whole
from contracts.pull import Transfer


class ShowHandoff(Versioned, frozen=True, kw_only=True, tag="show_handoff"):
    """Anybody to the broker: show all that is known of a handoff (verb `show`)."""

    handoff_id: Token


class PartView(msgspec.Struct, frozen=True, kw_only=True):
    """One planned part: what is owed, and what of it has arrived, as ranges `[start, end)`: see `PartDone`."""

    namespace: Namespace
    role: Role
    layer: Whole
    source_rank: Whole
    destination_rank: Whole
    transfer: Transfer
    owed: tuple[tuple[Whole, Whole], ...]
    done: tuple[tuple[Whole, Whole], ...]


class HandoffView(Versioned, frozen=True, kw_only=True, tag="handoff_view"):
    """The broker's answer: the record as it is in memory, every part, and which workers may still hold something.

    `told` are the roles that were told of the request, `settled` those that have said that they hold nothing of it any more.
    `quarantined` are those of them whose memory was not free yet when they said so: a writer could still touch it. `unheard` are those
    that did not answer their release, or are gone: nothing is known of their memory, which comes back with their process, at the
    deadline, or when they are met again. `num_parts` counts all; `parts` are the first of them that are not complete, then the others, as many as a message carries.
    """

    record: HandoffRecord
    parts: tuple[PartView, ...]
    num_parts: Whole
    told: tuple[str, ...]
    settled: tuple[str, ...]
    quarantined: tuple[str, ...] = ()
    unheard: tuple[str, ...] = ()
