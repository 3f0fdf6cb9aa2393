"""Who is there: the workers, watched in their bucket, and the broker, asked when somebody wants to know."""

from collections.abc import Mapping
from typing import Final

from common.bus.port import Bus, Entry, Snapshot, Watch
from common.bus.storage import WORKER_TTL_S, WORKERS_CONFIG
from common.runtime.clock import Clock
from common.runtime.lifecycle import Log
from contracts.codec import decode, encode
from contracts.errors import CodecError, PdmeshError
from contracts.requests import Ping, Pong
from contracts.subjects import BrokerVerb, broker_rpc
from contracts.workers import WorkerRecord
from services.router.core.worker_table import WorkerTable

PING_TIMEOUT_S: Final = 1.0


class Fleet:
    """A current view of `PD_WORKERS`."""

    def __init__(self, bus: Bus, clock: Clock, log: Log) -> None:
        self._bus = bus
        self._clock = clock
        self._log = log
        self._table = WorkerTable(ttl_s=WORKER_TTL_S)
        self._reconnects = bus.reconnects

    async def open(self) -> Watch:
        """Begin to watch. Pass the watch to `run`. Raises `BusError`."""
        bucket = await self._bus.ensure_bucket(WORKERS_CONFIG)
        return await bucket.watch()

    async def run(self, watch: Watch) -> None:
        """Follow the watch until the bus is closed."""
        async with watch:
            async for entry in watch:
                match entry:
                    case Snapshot():
                        pass  # who is not in it falls silent, and silence is judged by `WorkerTable`
                    case Entry(deleted=True):
                        self._table.delete(entry.key)
                    case Entry():
                        self._put(entry)

    @property
    def is_connected(self) -> bool:
        """Whether the bus is there, so that the view is current."""
        return self._bus.is_connected

    def workers(self) -> Mapping[str, WorkerRecord]:
        """Return the workers that count now. While the bus is away nobody is judged."""
        if self._bus.reconnects != self._reconnects:
            self._reconnects = self._bus.reconnects
            self._table.reconnected(self._clock.monotonic())
        return self._table.alive(self._clock.monotonic()) if self._bus.is_connected else self._table.known

    async def broker_problem(self) -> str:
        """Why the broker would not take a request now; empty when it would."""
        try:
            reply = await self._bus.request(broker_rpc(BrokerVerb.PING), encode(Ping()), timeout=PING_TIMEOUT_S)
            pong = decode(reply.data, Pong)
        except PdmeshError as error:
            return f"the broker does not answer: {error.message}"
        return f"{pong.broker_id} is draining" if pong.draining else ""

    def _put(self, entry: Entry) -> None:
        try:
            record = decode(entry.value, WorkerRecord)
        except CodecError as error:
            self._log.error(
                "worker_record_unreadable", worker_id=entry.key, error_code=error.code, reason=error.message
            )
            return
        self._table.put(record, self._clock.monotonic())
