"""What a mesh's bus tells after a load: the handoffs of the event stream, and the layout of the workers that took over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from common.bus.port import Bus
from common.runtime.clock import Clock, Deadline
from contracts import subjects
from contracts.codec import decode, encode
from contracts.links import LinkRecord, LinkState
from contracts.manifest import RankManifest
from contracts.subjects import WorkerVerb
from contracts.workers import DescribeWorker, WorkerDescription
from loadtest.client import Sample
from loadtest.ideal import Destination
from loadtest.mesh import Mesh
from loadtest.phases import Handoff, read_handoffs, with_admission, within
from services.launcher.bus import with_bus
from services.launcher.stream import read_all, read_links

_SETTLE_S: Final = 10.0
_POLL_S: Final = 0.3


async def handoffs_of(mesh: Mesh, samples: Sequence[Sample], clock: Clock, say: Callable[[str], None]) -> list[Handoff]:
    """The handoffs of `samples`, in order. Events come in the background: waits for the last, but not for ever.

    Fewer than there are good samples are returned when the stream has not told of all of them by then.
    """
    good = [sample for sample in samples if not sample.error]

    async def read(bus: Bus) -> list[Handoff]:
        deadline = Deadline.after(clock, _SETTLE_S)
        while True:
            told = within(read_handoffs((await read_all(bus)).events), good)
            if deadline.passed or (len(told) >= len(good) and all(each.finished for each in told)):
                return with_admission(told, good)
            await clock.sleep(_POLL_S)

    return await with_bus(mesh.nats_url, read, say=say)


async def destination_of(mesh: Mesh, say: Callable[[str], None]) -> Destination:
    """The mesh's first decode worker: the layout of every rank, as it describes itself, and what its links bring."""
    worker_id = mesh.spec.worker_ids("decode")[0]

    async def ask(bus: Bus) -> Destination:
        found: list[RankManifest] = []
        num_ranks = 1
        while len(found) < num_ranks:
            subject = subjects.worker_rpc("decode", worker_id, WorkerVerb.DESCRIBE)
            answer = await bus.request(subject, encode(DescribeWorker(rank=len(found))))
            description = decode(answer.data, WorkerDescription)
            num_ranks = description.num_ranks
            found.append(description.manifest)
        return Destination(ranks=tuple(found), has_drafts=brings_drafts((await read_links(bus)).links, worker_id))

    return await with_bus(mesh.nats_url, ask, say=say)


def brings_drafts(links: Sequence[LinkRecord], decode: str) -> bool:
    """Whether all who hand over to a decode worker hand over the caches of a draft head, too."""
    linked = [each for each in links if each.decode.worker_id == decode and each.state is LinkState.LINKED]
    return bool(linked) and all(each.has_drafts for each in linked)
