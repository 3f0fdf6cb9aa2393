"""The AsyncAPI 3.0 document of the bus: channels from the table of subjects, operations from the table of operations. Pure.

Payloads are references to the schema files beside it. NATS has bindings for operations alone; what JetStream adds stands
in extensions (`x-jetstream`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from common.schemas.json_schema import tag_of
from contracts import subjects
from contracts.codec import MAX_MESSAGE_BYTES, SCHEMA_VERSION, Versioned
from contracts.events import EventName
from contracts.links import LinkEventName
from contracts.operations import OPERATIONS, Operation, Service, bus_kinds
from contracts.trace import TRACEPARENT, TRACESTATE
from contracts.workers import WorkerRole

VERSION: Final = "3.0.0"
SCHEMA_FORMAT: Final = "application/schema+json;version=draft-2020-12"
SCHEMA_FOLDER: Final = "./schemas/bus"
REPLY_CHANNEL: Final = "reply"

_EXPRESSION: Final = re.compile(r"\{(?P<name>[a-z]+)\}")
_BUCKET: Final = re.compile(r"[A-Z0-9_]+")
_BINDINGS: Final = {"nats": {"bindingVersion": "0.1.0"}}
_MEANINGS: Final = {
    "role": "What the worker does.",
    "worker": "Id of a worker.",
    "partition": "Number of a broker's partition; 0 where there is one broker.",
    "handoff": "Id of a handoff: `{request}-{attempt}`.",
    "router": "Id of a router.",
    "request": "Id of a request.",
    "service": "Who tells.",
    "event": "What happened.",
    "link": "Id of a link: `{prefill}_to_{decode}`, the ids of its workers.",
    "prefill": "Id of a prefill worker.",
    "decode": "Id of a decode worker.",
}
_FIELDS: Final = {"handoff": "handoff_id", "request": "request_id", "router": "router_id", "worker": "worker_id"}


def document() -> dict[str, Any]:
    """The whole document, ready to be written beside the folder of schemas."""
    channels: dict[str, Any] = {}
    for operation in OPERATIONS:
        channels[channel_name(operation)] = _channel(operation)
    answers = dict.fromkeys(kind for operation in OPERATIONS for kind in operation.answers)
    channels[REPLY_CHANNEL] = {
        "address": None,
        "summary": "The reply subject of a request, an inbox of the one who asks.",
        "messages": _message_refs(answers),
    }
    return {
        "asyncapi": VERSION,
        "info": {
            "title": "pdmesh",
            "version": f"{SCHEMA_VERSION}.0.0",
            "description": (
                "What the services of a pdmesh say to each other over NATS. Every message is one UTF-8 JSON object of at "
                f"most {MAX_MESSAGE_BYTES} bytes with its headers. Unknown fields are ignored, a newer `v` is refused."
            ),
        },
        "servers": {"nats": {"host": "127.0.0.1:4222", "protocol": "nats", "description": "The setting `nats_url`."}},
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": {name: each for operation in OPERATIONS for name, each in _sides(operation)},
        "components": {
            "messages": {tag_of(kind): _message(kind) for kind in bus_kinds()},
            "messageTraits": {
                "traced": {
                    "headers": {
                        "type": "object",
                        "properties": {
                            TRACEPARENT: {"type": "string", "description": "W3C Trace Context of the request."},
                            TRACESTATE: {"type": "string", "description": "Passed on unchanged."},
                        },
                    }
                },
                "kept_once": {
                    "headers": {
                        "type": "object",
                        "properties": {"Nats-Msg-Id": {"type": "string", "description": "A repeat is stored once."}},
                        "required": ["Nats-Msg-Id"],
                    }
                },
            },
        },
    }


def channel_name(operation: Operation) -> str:
    """The key of the operation's channel: one for each subject that can be told apart."""
    return operation.name


def address(operation: Operation) -> str:
    """The subject that the operation uses, with what varies in braces. A bucket's keys are subjects, too."""
    row = operation.subject_row
    if _BUCKET.fullmatch(row.subject):
        return f"$KV.{row.subject}.{operation.key}"
    subject = row.subject.replace("{verb}", operation.verb) if operation.verb else row.subject
    return subject.replace("{role}", operation.roles[0]) if len(operation.roles) == 1 else subject


def _channel(operation: Operation) -> dict[str, Any]:
    row = operation.subject_row
    subject = address(operation)
    channel: dict[str, Any] = {
        "address": subject,
        "summary": f"{row.purpose}: {row.carrier}",
        "messages": _message_refs(operation.messages),
    }
    parameters = {name: _parameter(name, operation) for name in _EXPRESSION.findall(subject)}
    if parameters:
        channel["parameters"] = parameters
    if _BUCKET.fullmatch(row.subject):
        channel["x-jetstream"] = {"bucket": row.subject}
    elif row.carrier.startswith("JetStream"):
        channel["x-jetstream"] = {"stream": subjects.EVENTS_STREAM}
    return channel


def _parameter(name: str, operation: Operation) -> dict[str, Any]:
    parameter: dict[str, Any] = {"description": _MEANINGS[name]}
    if name == "role":
        parameter["enum"] = [str(role) for role in operation.roles or WorkerRole]
    elif name == "service":
        parameter["enum"] = [str(service) for service in operation.senders]
    elif name == "event":
        parameter["enum"] = [str(event) for event in (LinkEventName if "link" in operation.name else EventName)]
    field = _FIELDS.get(name, "")
    if all(field in kind.__struct_fields__ for kind in operation.messages):
        parameter["location"] = f"$message.payload#/{field}"
    return parameter


def _sides(operation: Operation) -> Iterable[tuple[str, dict[str, Any]]]:
    """Each service's half: who sends, and who receives and answers."""
    for service in operation.senders:
        yield f"{service}_sends_{operation.name}", _side(operation, service, "send")
    for service in operation.receivers:
        yield f"{service}_receives_{operation.name}", _side(operation, service, "receive")


def _side(operation: Operation, service: Service, action: str) -> dict[str, Any]:
    channel = f"#/channels/{channel_name(operation)}"
    side: dict[str, Any] = {
        "action": action,
        "channel": {"$ref": channel},
        "messages": [{"$ref": f"{channel}/messages/{tag_of(kind)}"} for kind in operation.messages],
        "tags": [{"name": str(service)}],
        "bindings": _BINDINGS,
    }
    if operation.answers:
        reply = f"#/channels/{REPLY_CHANNEL}"
        side["reply"] = {
            "channel": {"$ref": reply},
            "messages": [{"$ref": f"{reply}/messages/{tag_of(kind)}"} for kind in operation.answers],
        }
    return side


def _message_refs(kinds: Iterable[type[Versioned]]) -> dict[str, Any]:
    return {tag_of(kind): {"$ref": f"#/components/messages/{tag_of(kind)}"} for kind in kinds}


def _message(kind: type[Versioned]) -> dict[str, Any]:
    tag = tag_of(kind)
    message: dict[str, Any] = {
        "name": tag,
        "title": kind.__name__,
        "summary": _first_sentence(kind),
        "contentType": "application/json",
        "payload": {"schemaFormat": SCHEMA_FORMAT, "schema": {"$ref": f"{SCHEMA_FOLDER}/{tag}.json"}},
    }
    traits = [{"$ref": f"#/components/messageTraits/{name}"} for name in _traits(kind)]
    if traits:
        message["traits"] = traits
    return message


def _traits(kind: type[Versioned]) -> Sequence[str]:
    """What the headers of a message say: the trace of its request, the id by which a stream drops repeats."""
    rows = {operation.subject_row for operation in OPERATIONS if kind in operation.messages}
    if any(row.carrier.startswith("JetStream") for row in rows):
        return ("kept_once",)
    in_bucket = any(_BUCKET.fullmatch(row.subject) for row in rows)
    return ("traced",) if rows and not in_bucket and "handoff_id" in kind.__struct_fields__ else ()


def _first_sentence(kind: type[Versioned]) -> str:
    return (inspect.getdoc(kind) or kind.__name__).split("\n\n", maxsplit=1)[0].replace("\n", " ")
