"""Who is there: workers and links, watched in their buckets, and the broker, asked when somebody wants to know."""

from collections.abc import Callable
from typing import Final, TypeVar

from common.bus.heard import HeardTable
from common.bus.port import Bus, Entry, Snapshot, Watch
from common.bus.refusals import Refusals
from common.bus.storage import LINK_TTL_S, LINKS_CONFIG, WORKER_TTL_S, WORKERS_CONFIG, ttl_on
from common.runtime.clock import Clock
from contracts.codec import decode, encode
from contracts.errors import PdmeshError
from contracts.links import LinkRecord
from contracts.requests import Ping, Pong
from contracts.subjects import BrokerVerb, broker_rpc, link_key
from contracts.workers import WorkerRecord
from services.router.core.mesh_view import MeshView

PING_TIMEOUT_S: Final = 1.0
_ROWS: Final[dict[type[object], str]] = {WorkerRecord: "workers", LinkRecord: "links"}

T = TypeVar("T", WorkerRecord, LinkRecord)


class Fleet:
    """A current view of `PD_WORKERS` and `PD_LINKS`."""

    def __init__(self, bus: Bus, clock: Clock, refusals: Refusals) -> None:
        self._bus = bus
        self._clock = clock
        self._refusals = refusals
        self._workers: HeardTable[WorkerRecord] = HeardTable(ttl_s=ttl_on(bus, WORKER_TTL_S))
        self._links: HeardTable[LinkRecord] = HeardTable(ttl_s=ttl_on(bus, LINK_TTL_S))
        self._reconnects = bus.reconnects

    async def open(self) -> tuple[Watch, Watch]:
        """Begin to watch. Pass the watches to `run_workers` and `run_links`. Raises `BusError`."""
        workers = await (await self._bus.ensure_bucket(WORKERS_CONFIG)).watch()
        return workers, await (await self._bus.ensure_bucket(LINKS_CONFIG)).watch()

    async def run_workers(self, watch: Watch) -> None:
        """Follow the watch of workers until the bus is closed."""
        await self._run(watch, self._workers, WorkerRecord, lambda record: record.worker_id)

    async def run_links(self, watch: Watch) -> None:
        """Follow the watch of links until the bus is closed."""
        await self._run(watch, self._links, LinkRecord, _key_of)

    async def _run(self, watch: Watch, table: HeardTable[T], kind: type[T], key_of: Callable[[T], str]) -> None:
        async with watch:
            async for entry in watch:
                match entry:
                    case Snapshot():
                        pass  # what is not in it falls silent, and silence is judged by `HeardTable`
                    case Entry(deleted=True):
                        table.delete(entry.key)
                    case Entry():
                        self._put(entry, table, kind, key_of)

    def _put(self, entry: Entry, table: HeardTable[T], kind: type[T], key_of: Callable[[T], str]) -> None:
        record = self._refusals.record(_ROWS[kind], entry, kind, key_of)
        if record is not None:
            table.put(entry.key, record, self._clock.monotonic())

    @property
    def is_connected(self) -> bool:
        """Whether the bus is there, so that the view is current."""
        return self._bus.is_connected

    def view(self) -> MeshView:
        """Return what counts now. While the bus is away nobody is judged."""
        now = self._clock.monotonic()
        if self._bus.reconnects != self._reconnects:
            self._reconnects = self._bus.reconnects
            self._workers.reconnected(now)
            self._links.reconnected(now)
        if not self._bus.is_connected:
            return MeshView(self._workers.known, self._links.known)
        return MeshView(self._workers.alive(now), self._links.alive(now))

    async def broker_problem(self, request_timeout_s: float) -> str:
        """Why the broker would not take a request that lasts so long now; empty when it would."""
        try:
            reply = await self._bus.request(broker_rpc(BrokerVerb.PING), encode(Ping()), timeout=PING_TIMEOUT_S)
            longest_s = decode(reply.data, Pong).max_timeout_ms / 1e3
        except PdmeshError as error:
            return f"the broker does not answer: {error.message}"
        if request_timeout_s > longest_s:
            return (
                f"request_timeout_s {request_timeout_s:g} is more than the {longest_s:g} of the broker's record_ttl_s"
            )
        return ""


def _key_of(record: LinkRecord) -> str:
    return link_key(record.prefill.worker_id, record.decode.worker_id)
