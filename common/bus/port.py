"""The control plane as services see it: messages, requests, key-value buckets and event streams.

Rules that hold for every adapter, and that the contract suite checks:

- A message is at most `contracts.codec.MAX_MESSAGE_BYTES`, payload and headers together. The server's own limit is
  1 MiB, and it cuts the connection of whoever crosses it.
- Core messages are delivered at most once, and are lost while the connection is down. Whoever needs an answer asks by
  `request`; whoever needs the truth reads a bucket.
- When a call raises `BusTimeout`, or `BusUnavailable` with `maybe_done`, its outcome is unknown: read, then decide.
- A watch outlives a restart of the server. It then repeats what it has said before, so its handlers accept repeats.
- Nothing is buffered while the connection is down: calls fail at once with `BusUnavailable`.
- A message that is sent for a request carries the headers of its trace (`common.runtime.trace.current_trace`).
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

DEFAULT_TIMEOUT = 5.0
"""Seconds that a call without a timeout of its own may take."""

MESSAGE_ID_HEADER = "Nats-Msg-Id"
"""Carries the id by which a stream recognises a repeat."""

Headers = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Message:
    """One message as a subscriber gets it."""

    subject: str
    data: bytes
    headers: Headers
    reply: str
    """Where an answer goes; empty if the sender expects none."""
    bus: "Bus"
    """The bus that it came over, for `respond`."""

    async def respond(self, data: bytes, headers: Headers | None = None) -> None:
        """Answer the request. Without a reply subject this does nothing. Raises as `Bus.publish` does."""
        if self.reply:
            await self.bus.publish(self.reply, data, headers)


class Subscription(Protocol):
    """Messages of one subject, in order of arrival. Iterate it in a task of your own and never block there.

    Iteration ends after `unsubscribe`, and when the bus is closed. It goes on over a reconnect.
    """

    @property
    def dropped(self) -> int:
        """How many messages were thrown away because `max_pending` of them waited already."""
        ...

    def __aiter__(self) -> AsyncIterator[Message]: ...

    async def __anext__(self) -> Message: ...

    async def unsubscribe(self) -> None:
        """Stop. Messages that wait are discarded. Twice is fine, and so is doing it while disconnected."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketConfig:
    """What a bucket is to be."""

    name: str
    """`[A-Z0-9_]+`."""
    ttl_s: float = 0.0
    """Seconds after which a value that was not written again disappears; 0: never. No watch event tells of it."""
    history: int = 1
    """Values kept per key."""
    is_lease: bool = False
    """Whether its values are signs of life: on a bus of several servers they last longer, see `bucket_ttl_s`."""


CLUSTER_TTL_S = 10.0
"""The least ttl of a sign of life among several servers: while they elect a leader, for up to seven seconds, none is kept."""

CLUSTER_SHARE = 1.5
"""How much longer signs of life last there: whoever renews in time on one server does so over an election, too."""


def bucket_ttl_s(ttl_s: float, replicas: int) -> float:
    """How many seconds a sign of life lasts that is kept by so many servers."""
    return ttl_s if replicas == 1 else max(CLUSTER_SHARE * ttl_s, CLUSTER_TTL_S)


@dataclass(frozen=True, slots=True)
class Entry:
    """The state of a key at a revision."""

    key: str
    value: bytes
    """Empty if `deleted`."""
    revision: int
    """Grows with every write to the bucket, over all of its keys."""
    deleted: bool = False
    """Only watches show deleted entries."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A watch has now told all that the bucket holds.

    It comes once at the start, and once after every reconnect. Whatever else the handler remembers is gone.
    """

    keys: frozenset[str]


class Watch(Protocol):
    """Changes of the keys that a pattern matches: first what is there, then a `Snapshot`, then every change.

    Repeats happen after a reconnect; an entry whose revision is not above the last one seen of its key says nothing
    new. Intermediate values of one key may be left out; the last one never is. Expiry by ttl is not told: compare
    with a snapshot or read the key. Iteration ends after `stop` and when the bus is closed.
    """

    def __aiter__(self) -> AsyncIterator[Entry | Snapshot]: ...

    async def __anext__(self) -> Entry | Snapshot: ...

    async def stop(self) -> None:
        """Stop. Twice is fine."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Bucket(Protocol):
    """Keys with values and revisions. Keys are dotted tokens of `[-/_=.a-zA-Z0-9]`; patterns add `*` and `>`."""

    @property
    def name(self) -> str:
        """Name in the configuration."""
        ...

    async def get(self, key: str) -> Entry | None:
        """Return the last value, or None if there is none, or it was deleted or has expired."""
        ...

    async def create(self, key: str, value: bytes) -> int:
        """Write the key's first value and return its revision. A deleted or expired key counts as absent.

        Raises RevisionConflict if there is a value.
        """
        ...

    async def update(self, key: str, value: bytes, last: int) -> int:
        """Write if the key's revision is `last`, and return the new revision. Raises RevisionConflict if it is not."""
        ...

    async def put(self, key: str, value: bytes) -> int:
        """Write whatever the key holds, and return the new revision."""
        ...

    async def delete(self, key: str, last: int | None = None) -> None:
        """Delete; with `last`, only if that is the revision (else RevisionConflict). An absent key is fine."""
        ...

    async def keys(self, pattern: str = ">") -> list[str]:
        """Return the keys with a value that match, sorted."""
        ...

    def entries(self, pattern: str = ">") -> AsyncIterator[Entry]:
        """Read the last values of the keys that match, then end: one pass, whose cost in round trips is that of one key.

        Keys without a value are left out. What is written meanwhile may come too, and its key then comes again: the higher revision
        counts. Take it to its end. Raises BusUnavailable, BusTimeout.
        """
        ...

    async def watch(self, pattern: str = ">") -> Watch:
        """Watch the keys that match. Changes after the return of this call are never missed."""
        ...

    async def epoch(self) -> int:
        """Number this life of the bucket: it grows when the store was wiped, after which revisions start again.

        On a server it is the moment of the bucket's creation, in nanoseconds since 2020 by the server's clock.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """What an event stream is to be. The oldest messages make room for new ones."""

    name: str
    subjects: tuple[str, ...]
    """Patterns of what it keeps. Never the subject of a request: the stream's acknowledgement would race the reply."""
    max_age_s: float = 24 * 3600.0
    max_bytes: int = 1 << 30
    max_message_bytes: int = 64 * 1024
    duplicate_window_s: float = 120.0
    """How long a message id is remembered, to drop repeats."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One message that a stream keeps."""

    subject: str
    data: bytes
    headers: Headers
    sequence: int
    time: float
    """When the server stored it: seconds since 1970 UTC."""


class Bus(Protocol):
    """A connection to the control plane. Adapters are closed by whoever opened them."""

    @property
    def is_connected(self) -> bool:
        """Whether the server is reachable as far as is known."""
        ...

    @property
    def reconnects(self) -> int:
        """How many times the connection came back since the start."""
        ...

    @property
    def replicas(self) -> int:
        """How many servers keep each bucket and stream: 1, 3 or 5."""
        ...

    async def reconnected(self, after: int) -> int:
        """Wait until `reconnects` is above `after`, and return it: every loss of messages is noticed."""
        ...

    async def publish(self, subject: str, data: bytes, headers: Headers | None = None) -> None:
        """Send to whoever listens now.

        Raises BusUnavailable while disconnected, PayloadTooLarge, InvalidSubject.
        """
        ...

    async def request(
        self,
        subject: str,
        data: bytes,
        *,
        timeout: float = DEFAULT_TIMEOUT,  # noqa: ASYNC109 - every caller has one, and the adapter maps its expiry
        headers: Headers | None = None,
    ) -> Message:
        """Send, and return the first answer.

        `timeout` is in seconds; zero or less raises BusTimeout at once. Raises NoResponders within milliseconds if
        nobody subscribes, BusTimeout, BusUnavailable (at once also for a request in flight), PayloadTooLarge,
        InvalidSubject.
        """
        ...

    async def subscribe(self, subject: str, *, queue_group: str = "", max_pending: int = 65536) -> Subscription:
        """Listen to a subject or pattern; of a queue group one member gets each message.

        The server knows of it when this returns. Raises BusUnavailable, InvalidSubject.
        """
        ...

    async def flush(self) -> None:
        """Return once the server has taken all that was sent before. Raises BusUnavailable, BusTimeout."""
        ...

    async def ensure_bucket(self, config: BucketConfig) -> Bucket:
        """Open the bucket, and create or change it to be as configured. Raises StorageRefused, BusUnavailable."""
        ...

    async def ensure_stream(self, config: StreamConfig) -> None:
        """Create the stream, or change it to be as configured. Raises StorageRefused, BusUnavailable."""
        ...

    def publish_event(self, subject: str, data: bytes, *, message_id: str, headers: Headers | None = None) -> bool:
        """Hand over an event for a stream and return at once; it is sent, and repeated if need be, in the background.

        A repeat with the same `message_id` is stored once. Returns False, and counts, if the event was dropped
        because too many wait. Raises PayloadTooLarge, InvalidSubject.
        """
        ...

    @property
    def events_dropped(self) -> int:
        """How many events were lost: too many waited, the stream refused one, or it could not be sent for too long."""
        ...

    async def flush_events(self, timeout: float = DEFAULT_TIMEOUT) -> bool:  # noqa: ASYNC109 - a bounded wait is the meaning
        """Wait until no event waits, `timeout` seconds at most. Returns whether that is so."""
        ...

    def read_stream(self, name: str, subject: str = ">") -> AsyncIterator[Stored]:
        """Read what a stream holds now of the subjects that match, oldest first, then end. Each sequence comes once."""
        ...
