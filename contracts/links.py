"""Links between prefill and decode workers: their record in `PD_LINKS`, and the events that tell of them."""

from __future__ import annotations

from enum import StrEnum

from contracts.codec import Versioned
from contracts.numbers import Whole
from contracts.requests import WorkerRef


class LinkState(StrEnum):
    """Where the meeting of a prefill worker with a decode worker stands. Without a record they have not met, or no more."""

    MEETING = "meeting"
    LINKED = "linked"
    REFUSED = "refused"
    UNLINKING = "unlinking"


class LinkEventName(StrEnum):
    """What happened to a link, in the past tense; the last token of its subject."""

    LINKED = "linked"
    LINK_REFUSED = "link_refused"
    UNLINKED = "unlinked"


class LinkRecord(Versioned, frozen=True, kw_only=True, tag="link_record", omit_defaults=True):
    """The key `{prefill}.{decode}` of `PD_LINKS`, written by the prefill worker: the truth about a pair of workers.

    It counts for the two starts that it names and for no other. Requests may be placed on the pair while it is LINKED.
    `since` is when `state` began (RFC 3339, UTC). A refusal names its `rule` and says in `reason` what differs and what to
    change; while MEETING, `reason` is why the last of `num_failures` tries failed. `topology` reads "tp2 -> tp1", a handoff
    is complete with `num_parts` parts, and moves `token_bytes` a token and `state_bytes` once. With `has_drafts` the cache of
    the draft head comes along; if a worker keeps one and it does not, `why_no_drafts` says what differs and what to change.
    """

    prefill: WorkerRef
    decode: WorkerRef
    state: LinkState
    since: str
    rule: str = ""
    reason: str = ""
    num_failures: Whole = 0
    topology: str = ""
    transport: str = ""
    num_parts: Whole = 0
    token_bytes: Whole = 0
    state_bytes: Whole = 0
    has_drafts: bool = False
    why_no_drafts: str = ""


class LinkEvent(Versioned, frozen=True, kw_only=True, tag="link_event", omit_defaults=True):
    """One transition of one link, on `PD_EVENTS`. `at` and `at_ns` are as in `HandoffEvent`, the rest as in `LinkRecord`.

    `reason` says why a pair was refused or unlinked. A pair is refused once for the two starts that it names, however often
    they are seen; `unlinked` follows `linked` alone.
    """

    event: LinkEventName
    service: str
    instance: str
    prefill: WorkerRef
    decode: WorkerRef
    at: str
    at_ns: int
    rule: str = ""
    reason: str = ""
    topology: str = ""
    transport: str = ""
    num_parts: Whole = 0
    has_drafts: bool = False
    why_no_drafts: str = ""
