"""What a MemoryServer stores: buckets and event streams, with the semantics of JetStream. Synchronous throughout."""

from collections import deque
from dataclasses import dataclass

from common.bus.errors import RevisionConflict, StorageRefused
from common.bus.port import MESSAGE_ID_HEADER, BucketConfig, Entry, Headers, Stored, StreamConfig
from common.bus.queues import QueuedWatch
from common.bus.rules import matches
from common.runtime.clock import Clock


@dataclass(frozen=True, slots=True)
class _Kept:
    entry: Entry
    written_at: float


class StoredBucket:
    """Keys, revisions and watches of one bucket."""

    def __init__(self, config: BucketConfig, clock: Clock, epoch: int) -> None:
        self.config = config
        self.epoch = epoch
        self._clock = clock
        self._kept: dict[str, _Kept] = {}
        self._revision = 0
        self._watches: dict[QueuedWatch, str] = {}

    def last(self, key: str) -> Entry | None:
        """Return the last entry, a deleted one too; None if there is none or it has expired."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        if self.config.ttl_s > 0 and self._clock.monotonic() - kept.written_at >= self.config.ttl_s:
            del self._kept[key]
            return None
        return kept.entry

    def matching(self, pattern: str) -> list[Entry]:
        """Return the last entries, deleted ones too, oldest revision first."""
        entries = [self.last(key) for key in list(self._kept) if matches(pattern, key)]
        return sorted((entry for entry in entries if entry is not None), key=lambda entry: entry.revision)

    def write(self, key: str, value: bytes, *, last: int | None, deleted: bool = False) -> int:
        """Write if the key's revision is `last` (0: nothing is there; None: whatever), and tell the watches."""
        before = self.last(key)
        found = 0 if before is None else before.revision
        if last is not None and found != last:
            raise RevisionConflict(f"{self.config.name}/{key}: revision is {found}; the rule is: it equals {last}")
        self._revision += 1
        entry = Entry(key, b"" if deleted else value, self._revision, deleted)
        self._kept[key] = _Kept(entry, self._clock.monotonic())
        for watch, pattern in self._watches.items():
            if matches(pattern, key):
                watch.offer(entry)
        return entry.revision

    def create(self, key: str, value: bytes) -> int:
        """Write the first value of a key that is absent or deleted."""
        before = self.last(key)
        return self.write(key, value, last=before.revision if before is not None and before.deleted else 0)

    def wipe(self, epoch: int) -> None:
        """Lose everything and begin a new life. Watches hear of it by `repeat_to_watches`."""
        self._kept.clear()
        self._revision = 0
        self.epoch = epoch

    def add_watch(self, watch: QueuedWatch, pattern: str) -> None:
        """Tell the watch all that there is, and from now on every change."""
        self._watches[watch] = pattern
        self._fill(watch, pattern)

    def remove_watch(self, watch: QueuedWatch) -> None:
        """Forget the watch. Twice is fine."""
        self._watches.pop(watch, None)

    def repeat_to_watches(self) -> None:
        """Do to every watch what a reconnect does."""
        for watch, pattern in self._watches.items():
            self._fill(watch, pattern)

    def _fill(self, watch: QueuedWatch, pattern: str) -> None:
        watch.restart()
        for entry in self.matching(pattern):
            watch.offer(entry)
        watch.caught_up()


class StoredStream:
    """Messages of one event stream."""

    def __init__(self, config: StreamConfig, clock: Clock) -> None:
        self.config = config
        self._clock = clock
        self._messages: deque[tuple[float, Stored]] = deque()
        self._size_bytes = 0
        self._sequence = 0
        self._seen: dict[str, float] = {}

    def captures(self, subject: str) -> bool:
        """Whether the stream keeps messages of the subject."""
        return any(matches(pattern, subject) for pattern in self.config.subjects)

    def append(self, subject: str, data: bytes, headers: Headers) -> bool:
        """Keep a message unless its Nats-Msg-Id was seen within the window; say whether it is new.

        Raises StorageRefused if it is over the stream's limit.
        """
        if len(data) > self.config.max_message_bytes:
            limit = self.config.max_message_bytes
            raise StorageRefused(f"{self.config.name}: event of {len(data)} bytes; the rule is: at most {limit}")
        now = self._clock.monotonic()
        while self._seen and now - next(iter(self._seen.values())) >= self.config.duplicate_window_s:
            del self._seen[next(iter(self._seen))]
        message_id = headers.get(MESSAGE_ID_HEADER)
        if message_id is not None:
            if message_id in self._seen:
                return False
            self._seen[message_id] = now
        self._sequence += 1
        self._messages.append((now, Stored(subject, data, headers, self._sequence, self._clock.wall_time())))
        self._size_bytes += len(data)
        self._trim(now)
        return True

    def matching(self, pattern: str) -> list[Stored]:
        """Return what is kept now of the subjects that match, oldest first."""
        self._trim(self._clock.monotonic())
        return [stored for _, stored in self._messages if matches(pattern, stored.subject)]

    def _trim(self, now: float) -> None:
        while self._messages and (
            self._size_bytes > self.config.max_bytes or now - self._messages[0][0] >= self.config.max_age_s
        ):
            _, oldest = self._messages.popleft()
            self._size_bytes -= len(oldest.data)
