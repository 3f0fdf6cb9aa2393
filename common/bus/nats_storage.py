"""JetStream's JSON API: streams, stored messages, compare-and-set. What buckets, readers and events stand on.

Source of requests, answers and error codes: the JetStream API of nats-server 2.11 and later.
"""

import base64
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from common.bus.errors import BusError, BusUnavailable, NoResponders, RevisionConflict, StorageRefused
from common.bus.nats_requests import Requests
from common.bus.nats_wire import headers_of
from common.bus.port import BucketConfig, Headers, Stored, StreamConfig
from common.bus.rules import REQUEST_FILTERS

API_TIMEOUT_S: Final = 5.0
EXPECTED_REVISION_HEADER: Final = "Nats-Expected-Last-Subject-Sequence"

_API: Final = "$JS.API"
_NANOSECONDS: Final = 1_000_000_000
_YEAR_2020: Final = datetime(2020, 1, 1, tzinfo=UTC)
_DEFAULT_DUPLICATE_WINDOW_S: Final = 120.0

_WRONG_LAST_SEQUENCE: Final = (10071, 10164)
_NAME_IN_USE: Final = 10058
_NO_STREAM: Final = 10059
_NOT_FOUND: Final = 404
_TEMPORARY: Final = frozenset({503})


class _ApiError(msgspec.Struct, frozen=True):
    code: int = 0
    err_code: int = 0
    description: str = "refused"


class _StoreAnswer(msgspec.Struct, frozen=True):
    seq: int | None = None
    error: _ApiError | None = None


_stored_answers: Final = msgspec.json.Decoder(_StoreAnswer)


class NotStored(BusError):  # noqa: N818 - a state, like its siblings in `errors`
    """There is no such message, stream or consumer."""

    @property
    def is_stream(self) -> bool:
        """Whether it is the stream itself that does not exist."""
        return self.param == str(_NO_STREAM)


class JetStream:
    """Typed calls of the API over one connection."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._ensured: dict[str, dict[str, Any]] = {}

    async def call(self, verb: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Call `$JS.API.{verb}`. Raises NotStored, StorageRefused, BusUnavailable, BusTimeout."""
        data = json.dumps(body).encode() if body is not None else b""
        try:
            answer = await self._requests.ask(f"{_API}.{verb}", data, timeout_s=API_TIMEOUT_S)
        except NoResponders as error:
            raise BusUnavailable(f"the server does not answer {verb}: JetStream is not up", maybe_done=False) from error
        return _checked(verb, json.loads(answer.data))

    async def store(self, subject: str, data: bytes, headers: Headers | None = None) -> int:
        """Publish into the stream that captures the subject, and return its sequence there.

        Raises RevisionConflict if an expected revision is not met, StorageRefused, BusUnavailable, BusTimeout.
        """
        try:
            answer = await self._requests.ask(subject, data, timeout_s=API_TIMEOUT_S, headers=headers)
        except NoResponders as error:
            raise BusUnavailable(f"nothing stores {subject} now", maybe_done=False) from error
        return stored_sequence(subject, answer.data)

    async def last_message(self, stream: str, subject: str) -> Stored:
        """Return the last message of one subject, from the stream's leader. Raises NotStored if there is none."""
        answer = await self.call(f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
        message = answer["message"]
        return Stored(
            subject=message["subject"],
            data=base64.b64decode(message.get("data", "")),
            headers=headers_of(base64.b64decode(message.get("hdrs", ""))),
            sequence=int(message["seq"]),
            time=datetime.fromisoformat(_six_digits(message["time"])).timestamp(),
        )

    async def info(self, stream: str) -> dict[str, Any]:
        """Return what the server says of a stream. Raises NotStored if there is none."""
        return await self.call(f"STREAM.INFO.{stream}")

    async def check_requests_uncaptured(self) -> None:
        """Raise StorageRefused if a stream, whosever it is, keeps requests: its acknowledgement would race the answer."""
        for requests in REQUEST_FILTERS:
            answer = await self.call("STREAM.NAMES", {"subject": requests})
            names = answer.get("streams") or []
            if names:
                rule = f"no stream keeps {requests}, where requests travel"
                raise StorageRefused(f"streams: {', '.join(names)} is not allowed; the rule is: {rule}")

    async def ensure(self, config: dict[str, Any], *, may_change: bool = True) -> None:
        """Create the stream, or change it to `config`; `ensure_again` will repeat it. Raises StorageRefused.

        Without `may_change` one that is there stays as it is.
        """
        name = config["name"]
        try:
            await self.call(f"STREAM.CREATE.{name}", config)
        except StorageRefused as error:
            if error.param != str(_NAME_IN_USE):
                raise
            if not may_change:
                return
            await self.call(f"STREAM.UPDATE.{name}", config)
        self._ensured[name] = config

    async def ensure_again(self) -> None:
        """Bring back whatever a server with an empty store no longer has."""
        for config in list(self._ensured.values()):
            await self.ensure(config)


def bucket_stream(config: BucketConfig, replicas: int = 1) -> dict[str, Any]:
    """Return the stream that is the bucket, as every NATS tool expects it: KV_NAME, a subject a key."""
    window_s = min(config.ttl_s or _DEFAULT_DUPLICATE_WINDOW_S, _DEFAULT_DUPLICATE_WINDOW_S)
    return {
        **_stream(f"KV_{config.name}", [f"$KV.{config.name}.>"], config.ttl_s, window_s, replicas),
        "max_msgs_per_subject": config.history,
        "discard": "new",
        "allow_rollup_hdrs": True,
        "allow_direct": True,
        "deny_delete": True,
    }


def event_stream(config: StreamConfig, replicas: int = 1) -> dict[str, Any]:
    """Return the stream of an event log."""
    return {
        **_stream(config.name, list(config.subjects), config.max_age_s, config.duplicate_window_s, replicas),
        "max_bytes": config.max_bytes,
        "max_msg_size": config.max_message_bytes,
        "discard": "old",
    }


def _stream(name: str, subjects: list[str], age_s: float, window_s: float, replicas: int) -> dict[str, Any]:
    return {
        "name": name,
        "subjects": subjects,
        "retention": "limits",
        "storage": "file",  # memory would vanish with the server
        "max_age": round(age_s * _NANOSECONDS),
        "duplicate_window": round(window_s * _NANOSECONDS),
        "num_replicas": replicas,
        "max_msgs": -1,
        "max_bytes": -1,
        "max_msg_size": -1,
        "max_consumers": -1,
    }


def stored_sequence(subject: str, answer: bytes) -> int:
    """The sequence at which a stream has stored what was published on `subject`, from its answer.

    Raises RevisionConflict, StorageRefused, and BusUnavailable for a refusal that passes.
    """
    try:
        stored = _stored_answers.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        stored = _StoreAnswer()
    if stored.error is not None:
        raise _refusal(subject, stored.error)
    if stored.seq is None:
        # Somebody who subscribes to a stream's subject has answered in the place of the stream.
        raise StorageRefused(f"{subject} was answered by something else than a stream")
    return stored.seq


def _checked(what: str, answer: dict[str, Any]) -> dict[str, Any]:
    error = answer.get("error")
    if error is None:
        return answer
    raise _refusal(what, msgspec.convert(error, _ApiError))


def _refusal(what: str, error: _ApiError) -> BusError:
    text = f"{what}: {error.description} (code {error.code}, {error.err_code})"
    if error.err_code in _WRONG_LAST_SEQUENCE:
        return RevisionConflict(text)
    if error.code == _NOT_FOUND:
        return NotStored(text, param=str(error.err_code))
    if error.code in _TEMPORARY:
        return BusUnavailable(text, maybe_done=True)
    return StorageRefused(text, param=str(error.err_code))


def nanoseconds_since_2020(text: str) -> int:
    """Read a time of the server, which has up to nine digits after the seconds."""
    whole, _, fraction = text.removesuffix("Z").partition(".")
    seconds = round((datetime.fromisoformat(f"{whole}+00:00") - _YEAR_2020).total_seconds())
    return seconds * _NANOSECONDS + int(fraction.ljust(9, "0") or "0")


def _six_digits(text: str) -> str:
    """Cut the server's nanoseconds down to what `datetime` reads."""
    whole, dot, fraction = text.removesuffix("Z").partition(".")
    return f"{whole}{dot}{fraction[:6].ljust(6, '0') if dot else ''}+00:00"
