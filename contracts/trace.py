"""Which request a message belongs to, for whoever follows one through the mesh: W3C Trace Context.

The rules are those of https://www.w3.org/TR/trace-context/ (Recommendation of 23 November 2021, and the version that a
parser must expect of the future). A header that breaks them is no error: it is as if there were none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
SAMPLED: Final = 0x01
_KNOWN_FLAGS: Final = 0x03  # sampled, and that the trace id is random
_NO_TRACE: Final = 32 * "0"
_NO_SPAN: Final = 16 * "0"
_MAX_TRACESTATE_CHARS: Final = 512
_MAX_TRACESTATE_MEMBERS: Final = 32

_TRACEPARENT: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?",
    re.ASCII | re.DOTALL,
)
_TRACE_ID: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_MEMBER: Final = re.compile(
    r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)


class TraceContext(msgspec.Struct, frozen=True, kw_only=True):
    """One hop of one request. `trace_id` (32 hexadecimal digits) is the request's, `span_id` (16) this hop's.

    `parent_span_id` is that of the hop before, empty at the first. `tracestate` is passed on as it came.
    """

    trace_id: str
    span_id: str
    parent_span_id: str = ""
    flags: int = SAMPLED
    tracestate: str = ""

    @property
    def traceparent(self) -> str:
        """The value of the header, version 00."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a message that is sent by this hop."""
        headers = {TRACEPARENT: self.traceparent}
        if self.tracestate:
            headers[TRACESTATE] = self.tracestate
        return headers

    def child(self, span_id: str) -> TraceContext:
        """The next hop."""
        return msgspec.structs.replace(self, span_id=span_id, parent_span_id=self.span_id)


def trace_id_of(text: str) -> str | None:
    """The trace id in what a person may have at hand of a trace: the id itself, or a whole traceparent. None for anything else."""
    if _TRACE_ID.fullmatch(text):
        return text
    trace = read_trace({TRACEPARENT: text})
    return None if trace is None else trace.trace_id


def read_trace(headers: Mapping[str, str]) -> TraceContext | None:
    """What the headers of a message say of its sender's hop; None when they say nothing valid. Names are in lower case.

    Flags that version 00 does not know are dropped. A state that cannot be passed on is left out.
    """
    found = _TRACEPARENT.fullmatch(headers.get(TRACEPARENT, ""))
    if found is None:
        return None
    version, trace, span, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest) or trace == _NO_TRACE or span == _NO_SPAN:
        return None
    state = headers.get(TRACESTATE)
    return TraceContext(
        trace_id=trace,
        span_id=span,
        flags=int(flags, 16) & _KNOWN_FLAGS,
        tracestate="" if state is None else _valid_state(state),
    )


def _valid_state(state: str) -> str:
    """`state` when it is a list of members as the standard has them, each key once; else nothing."""
    members = [member.strip(" \t") for member in state.split(",")]
    members = [member for member in members if member]
    keys = {member.partition("=")[0] for member in members}
    valid = all(_MEMBER.fullmatch(member) for member in members) and len(keys) == len(members)
    joined = ",".join(members)
    return joined if valid and len(members) <= _MAX_TRACESTATE_MEMBERS and len(joined) <= _MAX_TRACESTATE_CHARS else ""
