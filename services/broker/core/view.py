"""One handoff as people see it. Pure."""

from __future__ import annotations

import msgspec

from contracts.codec import MAX_MESSAGE_BYTES, encode
from contracts.handoff import HandoffRecord
from contracts.show import HandoffView, PartView
from services.broker.core import messages
from services.broker.core.handoff import Handoff


def view(handoff: Handoff, max_bytes: int = MAX_MESSAGE_BYTES) -> HandoffView:
    """All that is known of it, with as many parts as a message of `max_bytes` carries: first those that are not complete."""
    parts = () if handoff.ledger is None else handoff.ledger.part_views()
    bare = HandoffView(
        record=messages.for_bucket(messages.with_progress(handoff)),
        parts=(),
        num_parts=len(parts),
        told=tuple(sorted(handoff.told)),
        settled=tuple(sorted(handoff.settled - handoff.unheard)),
        quarantined=tuple(sorted(handoff.quarantined)),
        unheard=tuple(sorted(handoff.unheard)),
    )
    shown: list[PartView] = []
    room = max_bytes - len(encode(bare))
    for part in parts:
        room -= len(encode(part)) + 1  # and the comma
        if room < 0:
            break
        shown.append(part)
    return msgspec.structs.replace(bare, parts=tuple(shown))


def view_of_record(record: HandoffRecord) -> HandoffView:
    """What the record of a handoff says that nobody remembers. Its parts are only counted."""
    num_parts = sum(one.num_parts for one in record.progress)
    return HandoffView(record=messages.for_bucket(record), parts=(), num_parts=num_parts, told=(), settled=())
