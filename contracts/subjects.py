"""One table of everything that is said over NATS: subjects, buckets, the stream. Nobody else spells a subject."""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from typing import Final

import msgspec

from contracts.ids import check_token

PREFIX: Final = "pd.v1"

WORKERS_BUCKET: Final = "PD_WORKERS"
HANDOFFS_BUCKET: Final = "PD_HANDOFFS"
ROUTERS_BUCKET: Final = "PD_ROUTERS"
LEASES_BUCKET: Final = "PD_LEASES"
LINKS_BUCKET: Final = "PD_LINKS"
EVENTS_STREAM: Final = "PD_EVENTS"
EVENTS_FILTER: Final = f"{PREFIX}.ev.>"
RPC_FILTER: Final = f"{PREFIX}.rpc.>"
PARTS_FILTER: Final = f"{PREFIX}.ho.*.parts"


class WorkerVerb(StrEnum):
    """What a worker is asked: `pd.v1.rpc.{role}.{worker}.{verb}`."""

    PROMPT = "prompt"
    RUN = "run"
    RESERVE = "reserve"
    PULL = "pull"
    COMMIT = "commit"
    RELEASE = "release"
    DESCRIBE = "describe"
    PARTS = "parts"
    REPLAY = "replay"
    SCAN = "scan"
    SET = "set"
    HANDOFFS = "handoffs"


class BrokerVerb(StrEnum):
    """What the broker is asked: `pd.v1.rpc.broker.{partition}.{verb}`."""

    SUBMIT = "submit"
    PREFILL_FINISHED = "prefill_finished"
    PULL_ENDED = "pull_ended"
    TAKEN_OVER = "taken_over"
    ENDED = "ended"
    CANCEL = "cancel"
    OUTCOME = "outcome"
    SHOW = "show"
    PING = "ping"


class SubjectRow(msgspec.Struct, frozen=True):
    """One line of the table."""

    purpose: str
    subject: str
    carrier: str


TABLE: Final[tuple[SubjectRow, ...]] = (
    SubjectRow("call a worker", f"{PREFIX}.rpc.{{role}}.{{worker}}.{{verb}}", "core request"),
    SubjectRow("call the broker", f"{PREFIX}.rpc.broker.{{partition}}.{{verb}}", "core request"),
    SubjectRow("parts done", f"{PREFIX}.ho.{{handoff}}.parts", "core publish, cumulative"),
    SubjectRow("tokens", f"{PREFIX}.tok.{{router}}.{{request}}", "core publish, indexed"),
    SubjectRow("cancel", f"{PREFIX}.cancel.{{worker}}.{{request}}", "core publish, repeated"),
    SubjectRow("inspection", f"{PREFIX}.ev.{{service}}.{{handoff}}.{{event}}", f"JetStream {EVENTS_STREAM}"),
    SubjectRow("inspection of links", f"{PREFIX}.ev.{{service}}.{{link}}.{{event}}", f"JetStream {EVENTS_STREAM}"),
    SubjectRow("inspection of settings", f"{PREFIX}.ev.{{service}}.{{worker}}.{{event}}", f"JetStream {EVENTS_STREAM}"),
    SubjectRow("workers", WORKERS_BUCKET, "KV, one key a worker"),
    SubjectRow("routers", ROUTERS_BUCKET, "KV, one key a router"),
    SubjectRow("links", LINKS_BUCKET, "KV, one key a pair: {prefill}.{decode}"),
    SubjectRow("handoff state", HANDOFFS_BUCKET, "KV, one key a handoff"),
    SubjectRow("who leads", LEASES_BUCKET, "KV, one key a broker partition"),
)


def worker_rpc(role: str, worker: str, verb: WorkerVerb) -> str:
    """Subject of one verb of one worker."""
    return f"{PREFIX}.rpc.{check_token('role', role)}.{check_token('worker_id', worker)}.{verb}"


def worker_rpc_filter(role: str, worker: str) -> str:
    """Everything that one worker is asked."""
    return f"{PREFIX}.rpc.{check_token('role', role)}.{check_token('worker_id', worker)}.*"


def broker_rpc(verb: BrokerVerb, partition: int = 0) -> str:
    """Subject of one verb of one broker partition."""
    return f"{PREFIX}.rpc.broker.{partition}.{verb}"


def broker_rpc_filter(partition: int = 0) -> str:
    """Everything that one broker partition is asked."""
    return f"{PREFIX}.rpc.broker.{partition}.*"


def broker_lease(partition: int = 0) -> str:
    """Key of the lease of one broker partition: whoever holds it is the one who is asked."""
    return f"broker.{partition}"


def verb_of(subject: str) -> str:
    """The verb of an rpc subject: its last token."""
    return subject.rsplit(".", 1)[-1]


def parts(handoff: str) -> str:
    """Where the parts of one handoff are reported."""
    return f"{PREFIX}.ho.{check_token('handoff_id', handoff)}.parts"


def tokens(router: str, request: str) -> str:
    """Where the tokens of one request go."""
    return f"{PREFIX}.tok.{check_token('router_id', router)}.{check_token('request_id', request)}"


def tokens_filter(router: str) -> str:
    """Every token frame for one router."""
    return f"{PREFIX}.tok.{check_token('router_id', router)}.*"


def cancel(worker: str, request: str) -> str:
    """Tells one worker that a request is not wanted any more."""
    return f"{PREFIX}.cancel.{check_token('worker_id', worker)}.{check_token('request_id', request)}"


def cancel_filter(worker: str) -> str:
    """Every cancel for one worker."""
    return f"{PREFIX}.cancel.{check_token('worker_id', worker)}.*"


def event(service: str, handoff: str, name: str) -> str:
    """Subject of one event of one handoff."""
    return f"{_events_of(service, handoff)}.{name}"


@lru_cache(maxsize=512)
def _events_of(service: str, handoff: str) -> str:
    """What the subjects of a handoff's events begin with: it has a dozen of them."""
    return f"{PREFIX}.ev.{check_token('service', service)}.{check_token('handoff_id', handoff)}"


def handoff_events_filter(handoff: str) -> str:
    """Every event of one handoff, from whichever service."""
    return f"{PREFIX}.ev.*.{check_token('handoff_id', handoff)}.>"


def link_id(prefill: str, decode: str) -> str:
    """What a pair of workers is called in the subjects of its events: one token."""
    return f"{check_token('worker_id', prefill)}_to_{check_token('worker_id', decode)}"


def link_event(service: str, prefill: str, decode: str, name: str) -> str:
    """Subject of one event of one link."""
    return f"{PREFIX}.ev.{check_token('service', service)}.{link_id(prefill, decode)}.{name}"


def setting_event(service: str, worker: str, name: str) -> str:
    """Subject of one event of one worker's settings."""
    return f"{PREFIX}.ev.{check_token('service', service)}.{check_token('worker_id', worker)}.{name}"


def link_key(prefill: str, decode: str) -> str:
    """The key of a pair of workers in `PD_LINKS`."""
    return f"{check_token('worker_id', prefill)}.{check_token('worker_id', decode)}"


def links_filter(prefill: str) -> str:
    """The keys of all pairs of one prefill worker in `PD_LINKS`."""
    return f"{check_token('worker_id', prefill)}.*"
