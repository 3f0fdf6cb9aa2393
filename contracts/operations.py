"""Who says what to whom: for every row of the table of subjects, the messages that it carries and their answers.

Schemas, the AsyncAPI document and the tests with unfriendly peers are made from this; a subject without an operation,
and a message that nobody sends, make them fail.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from contracts import events, handoff, leases, links, pull, requests, routers, show, workers
from contracts.codec import Versioned
from contracts.subjects import TABLE, BrokerVerb, SubjectRow, WorkerVerb
from contracts.workers import WorkerRole


class Service(StrEnum):
    """Who speaks and listens on the bus. A worker's value is its role's."""

    ROUTER = "router"
    BROKER = "broker"
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is said.

    `row` is the purpose of a row of `contracts.subjects.TABLE`. A call has a `verb` and `answers`; `roles` are those of
    the workers that are called. In a bucket, `key` is how its keys are made. People are not named as receivers: they may
    listen to everything.
    """

    name: str
    row: str
    senders: tuple[Service, ...]
    receivers: tuple[Service, ...] = ()
    messages: tuple[type[Versioned], ...]
    answers: tuple[type[Versioned], ...] = ()
    verb: str = ""
    roles: tuple[WorkerRole, ...] = ()
    key: str = ""

    @property
    def subject_row(self) -> SubjectRow:
        """The row that it belongs to."""
        return next(row for row in TABLE if row.purpose == self.row)


_WORKERS: Final = (Service.PREFILL, Service.DECODE, Service.MIXED)
_GENERATING: Final = (Service.DECODE, Service.MIXED)
_COMPUTING: Final = (Service.PREFILL, Service.MIXED)
_TAKEN_OR_NOT: Final = (requests.Accepted, requests.Refused)


def _worker_call(
    verb: WorkerVerb,
    *roles: WorkerRole,
    senders: tuple[Service, ...],
    message: type[Versioned],
    answers: tuple[type[Versioned], ...] = _TAKEN_OR_NOT,
) -> Operation:
    return Operation(
        name=f"{verb}_{roles[0]}" if len(roles) == 1 else f"{verb}_worker",
        row="call a worker",
        senders=senders,
        receivers=tuple(Service(role) for role in roles),
        messages=(message,),
        answers=answers,
        verb=verb,
        roles=roles,
    )


def _broker_call(
    verb: BrokerVerb,
    *senders: Service,
    message: type[Versioned],
    answers: tuple[type[Versioned], ...] = _TAKEN_OR_NOT,
) -> Operation:
    return Operation(
        name=f"tell_{verb}" if Service.ROUTER not in senders else verb,
        row="call the broker",
        senders=senders,
        receivers=(Service.BROKER,),
        messages=(message,),
        answers=answers,
        verb=verb,
    )


_BROKER: Final = (Service.BROKER,)

OPERATIONS: Final[tuple[Operation, ...]] = (
    _worker_call(
        WorkerVerb.PROMPT,
        WorkerRole.PREFILL,
        WorkerRole.MIXED,
        senders=(Service.ROUTER,),
        message=requests.PromptFrame,
    ),
    _worker_call(WorkerVerb.RUN, WorkerRole.PREFILL, senders=_BROKER, message=handoff.RunPrefill),
    _worker_call(WorkerVerb.RUN, WorkerRole.MIXED, senders=_BROKER, message=handoff.RunMixed),
    _worker_call(
        WorkerVerb.RESERVE,
        WorkerRole.DECODE,
        senders=_BROKER,
        message=handoff.ReserveDecode,
        answers=(handoff.Reserved, requests.Refused),
    ),
    _worker_call(WorkerVerb.PULL, WorkerRole.DECODE, senders=_BROKER, message=handoff.PullHandoff),
    _worker_call(WorkerVerb.COMMIT, WorkerRole.DECODE, senders=_BROKER, message=handoff.CommitHandoff),
    _worker_call(
        WorkerVerb.RELEASE,
        *WorkerRole,
        senders=_BROKER,
        message=handoff.ReleaseHandoff,
        answers=(handoff.Released, requests.Refused),
    ),
    _worker_call(
        WorkerVerb.DESCRIBE,
        *WorkerRole,
        senders=(Service.BROKER, *_WORKERS),
        message=workers.DescribeWorker,
        answers=(workers.WorkerDescription, workers.DescribeRefused, requests.Refused),
    ),
    _worker_call(
        WorkerVerb.PARTS,
        WorkerRole.PREFILL,
        WorkerRole.DECODE,
        senders=_BROKER,
        message=handoff.QueryParts,
        answers=(handoff.PartsAnswer, requests.Refused),
    ),
    _worker_call(
        WorkerVerb.REPLAY,
        *WorkerRole,
        senders=(Service.ROUTER,),
        message=requests.ReplayTokens,
        answers=(requests.TokenFrame, requests.Accepted, requests.Refused),
    ),
    _worker_call(
        WorkerVerb.SCAN,
        *WorkerRole,
        senders=(),
        message=workers.ScanWorker,
        answers=(workers.WorkerScan, requests.Refused),
    ),
    _worker_call(
        WorkerVerb.SET,
        *WorkerRole,
        senders=(),
        message=workers.SetWorker,
        answers=(workers.SettingChanged, workers.SetRefused, requests.Refused),
    ),
    _worker_call(
        WorkerVerb.HANDOFFS,
        *WorkerRole,
        senders=_BROKER,
        message=handoff.ListHandoffs,
        answers=(handoff.HandoffList, requests.Refused),
    ),
    _broker_call(BrokerVerb.SUBMIT, Service.ROUTER, message=requests.SubmitRequest),
    _broker_call(BrokerVerb.CANCEL, Service.ROUTER, message=requests.CancelRequest),
    _broker_call(
        BrokerVerb.OUTCOME,
        Service.ROUTER,
        *_COMPUTING,
        message=requests.ReplayTokens,
        answers=(requests.TokenFrame, requests.Accepted, requests.Refused),
    ),
    _broker_call(BrokerVerb.PING, Service.ROUTER, message=requests.Ping, answers=(requests.Pong, requests.Refused)),
    _broker_call(BrokerVerb.SHOW, message=show.ShowHandoff, answers=(show.HandoffView, requests.Refused)),
    _broker_call(BrokerVerb.PULL_ENDED, Service.DECODE, message=pull.PullEnded),
    _broker_call(BrokerVerb.PREFILL_FINISHED, Service.PREFILL, message=handoff.PrefillFinished),
    _broker_call(BrokerVerb.TAKEN_OVER, Service.DECODE, message=handoff.TakenOver),
    _broker_call(BrokerVerb.ENDED, *_GENERATING, message=handoff.RequestEnded),
    Operation(
        name="report_parts",
        row="parts done",
        senders=(Service.PREFILL, Service.DECODE),
        receivers=_BROKER,
        messages=(handoff.PartsReport,),
    ),
    Operation(
        name="stream_tokens",
        row="tokens",
        senders=(Service.BROKER, *_WORKERS),
        receivers=(Service.ROUTER,),
        messages=(requests.TokenFrame,),
    ),
    Operation(
        name="hint_cancel", row="cancel", senders=(Service.ROUTER,), receivers=_WORKERS, messages=(requests.CancelWork,)
    ),
    Operation(
        name="show_event",
        row="inspection",
        senders=(Service.BROKER, *_WORKERS),
        messages=(events.HandoffEvent,),
    ),
    Operation(
        name="show_link_event",
        row="inspection of links",
        senders=(Service.PREFILL,),
        messages=(links.LinkEvent,),
    ),
    Operation(
        name="show_setting_event",
        row="inspection of settings",
        senders=_WORKERS,
        messages=(workers.SettingEvent,),
    ),
    Operation(
        name="keep_worker",
        row="workers",
        senders=_WORKERS,
        receivers=(Service.ROUTER, Service.BROKER, Service.PREFILL, Service.DECODE),
        messages=(workers.WorkerRecord,),
        key="{worker}",
    ),
    Operation(
        name="keep_router",
        row="routers",
        senders=(Service.ROUTER,),
        receivers=(Service.BROKER, *_WORKERS),
        messages=(routers.RouterRecord,),
        key="{router}",
    ),
    Operation(
        name="keep_link",
        row="links",
        senders=(Service.PREFILL,),
        receivers=(Service.ROUTER, Service.BROKER),
        messages=(links.LinkRecord,),
        key="{prefill}.{decode}",
    ),
    Operation(
        name="keep_handoff",
        row="handoff state",
        senders=_BROKER,
        receivers=_BROKER,
        messages=(handoff.HandoffRecord,),
        key="{handoff}",
    ),
    Operation(
        name="keep_lease",
        row="who leads",
        senders=_BROKER,
        receivers=(*_BROKER, *_WORKERS),
        messages=(leases.LeaseValue,),
        key="broker.{partition}",
    ),
)


def bus_kinds() -> tuple[type[Versioned], ...]:
    """Every message and record of the bus, each once, in the order of the table."""
    return tuple(dict.fromkeys(kind for each in OPERATIONS for kind in (*each.messages, *each.answers)))
