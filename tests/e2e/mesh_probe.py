"""Looks at a running mesh from outside: its processes in `/proc`, its workers' tables, NATS itself, its events as plain JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

import aiohttp
import msgspec
import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from yarl import URL

from common.runtime.clock import Deadline, SystemClock
from contracts import subjects
from contracts.codec import decode, encode
from contracts.subjects import WorkerVerb
from contracts.workers import ScanWorker, WorkerRecord, WorkerScan
from loadtest.mesh import Mesh
from tests.e2e.proc import DEADLINE_S, descendants
from tests.e2e.service_processes import Services

_POLL_S: Final = 0.1
_LISTEN: Final = "0A"

Event = dict[str, Any]


class Holdings(msgspec.Struct, frozen=True, kw_only=True):
    """What a mesh holds at one moment. Two of an idle mesh are equal, whatever it did in between."""

    processes: tuple[tuple[str, int, int], ...]
    """Command, open descriptors and anonymous memory of each process, the launcher's descendants; of the NATS server, which
    opens and closes files of its store as it likes, only that it is there.
    """
    tables: tuple[tuple[str, tuple[str, ...], tuple[int, ...], tuple[int, ...], int], ...]
    """Of each worker: handoffs, blocks, slots, prompt buffers, found by walking its tables."""
    rank_sequences: tuple[tuple[int, ...], ...]
    consumers: tuple[tuple[str, int], ...]
    """JetStream streams and how many consumers each has."""


class Probe:
    """One mesh, seen from outside. A context: it holds a NATS connection of its own."""

    def __init__(self, mesh: Mesh | Services) -> None:
        self.mesh = mesh
        self.url = mesh.url
        self.events: list[Event] = []
        """Those about handoffs."""
        self.link_events: list[Event] = []
        self._news = asyncio.Event()
        self._nats: Client | None = None
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._nats = await nats.connect(self.mesh.nats_url)
        await self._nats.subscribe("pd.v1.ev.>", cb=self._note)
        await self._nats.flush()
        # A connection kept alive would count among the router's descriptors.
        connector = aiohttp.TCPConnector(force_close=True)
        self._http = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=DEADLINE_S))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()
        if self._nats is not None:
            await self._nats.close()

    async def _note(self, message: Msg) -> None:
        event = json.loads(message.data)
        match event["type"]:
            case "handoff_event":
                self.events.append(event)
            case "link_event":
                self.link_events.append(event)
            case _:
                pass  # of settings, which no test here looks at
        self._news.set()

    @property
    def http(self) -> aiohttp.ClientSession:
        """A session with the router."""
        assert self._http is not None
        return self._http

    @property
    def nats(self) -> Client:
        """The connection to the mesh's NATS server."""
        assert self._nats is not None
        return self._nats

    async def model(self) -> str:
        """The name of the model that is served."""
        async with self.http.get(f"{self.url}/v1/models") as response:
            return str((await response.json())["data"][0]["id"])

    async def complete(self, prompt: list[int] | str, max_tokens: int, **parameters: Any) -> dict[str, Any]:
        """One completion, not streamed: its first choice, with `usage` beside it."""
        body = {"model": await self.model(), "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **parameters}
        body |= {"return_token_ids": True}
        async with self.http.post(f"{self.url}/v1/completions", json=body) as response:
            content = await response.json()
            assert response.status == 200, content
            return dict(content["choices"][0]) | {"usage": content["usage"], "id": content["id"]}

    async def event(self, wanted: Callable[[Event], bool]) -> Event:
        """The first event that is wanted, among those seen and those to come."""
        seen = 0
        async with asyncio.timeout(DEADLINE_S):
            while True:
                self._news.clear()
                for event in self.events[seen:]:
                    seen += 1
                    if wanted(event):
                        return event
                await self._news.wait()

    async def link_event(self, name: str, decode_worker: str, after: int = 0) -> Event:
        """The first event of that name about a decode worker, behind the first `after` ones."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                self._news.clear()
                for event in self.link_events[after:]:
                    if event["event"] == name and event["decode"]["worker_id"] == decode_worker:
                        return event
                await self._news.wait()

    def of_request(self, request_id: str) -> list[Event]:
        """The events of one request so far."""
        return [event for event in self.events if event["request_id"] == request_id]

    async def scan(self, role: str, worker_id: str) -> WorkerScan:
        """What a worker finds when it looks at itself."""
        subject = subjects.worker_rpc(role, worker_id, WorkerVerb.SCAN)
        reply = await self.nats.request(subject, encode(ScanWorker()), timeout=10)
        return decode(reply.data, WorkerScan)

    async def workers(self) -> list[WorkerRecord]:
        """The records of all workers."""
        stream, prefix = f"KV_{subjects.WORKERS_BUCKET}", f"$KV.{subjects.WORKERS_BUCKET}."
        ask = json.dumps({"subjects_filter": f"{prefix}>"}).encode()
        info = json.loads((await self.nats.request(f"$JS.API.STREAM.INFO.{stream}", ask)).data)
        found = []
        # A server leaves the list of subjects out where there are none: right after a restart no worker may have written yet.
        for subject in sorted(info["state"].get("subjects", ())):
            last = (await self.nats.request(f"$JS.API.DIRECT.GET.{stream}.{subject}", b"")).data
            if last:  # a worker that has signed off leaves an empty marker for a while
                found.append(decode(last, WorkerRecord))
        return found

    async def holdings(self) -> Holdings:
        """What the mesh holds now, once no client is connected: a router closes a connection some time after its client did."""
        async with asyncio.timeout(DEADLINE_S):
            while _has_clients(URL(self.url).port):
                await SystemClock().sleep(_POLL_S)
        scans = [await self.scan(record.role, record.worker_id) for record in await self.workers()]
        return Holdings(
            processes=tuple(sorted(_process(pid) for pid in self._pids())),
            tables=tuple(
                (scan.worker_id, scan.handoff_ids, scan.held_blocks, scan.held_slots, scan.num_prompt_buffers)
                for scan in scans
            ),
            rank_sequences=tuple(seqs for scan in scans for seqs in scan.rank_sequences),
            consumers=await self._consumers(),
        )

    async def assert_settles(self, baseline: Holdings) -> None:
        """The mesh comes to hold what it held at the baseline: names what it does not, at the deadline."""
        clock = SystemClock()
        deadline = Deadline.after(clock, DEADLINE_S)
        while (now := await self.holdings()) != baseline and not deadline.passed:
            await clock.sleep(_POLL_S)
        differing = {
            name: (getattr(baseline, name), getattr(now, name))
            for name in Holdings.__struct_fields__
            if getattr(baseline, name) != getattr(now, name)
        }
        lines = [f"{name}\n  then {then}\n  now  {now}" for name, (then, now) in differing.items()]
        assert now == baseline, "\n".join(lines)

    def _pids(self) -> list[int]:
        return self.mesh.pids() if isinstance(self.mesh, Services) else descendants(self.mesh.pid)

    async def _consumers(self) -> tuple[tuple[str, int], ...]:
        streams = json.loads((await self.nats.request("$JS.API.STREAM.NAMES", b"")).data)["streams"]
        found = []
        for stream in sorted(streams):
            answer = json.loads((await self.nats.request(f"$JS.API.CONSUMER.NAMES.{stream}", b"")).data)
            found.append((stream, int(answer["total"])))
        return tuple(found)


def _has_clients(port: int | None) -> bool:
    """Whether a process on this machine has an accepted connection of that port open (`proc_pid_net(5)`: local address, state, inode)."""
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if int(fields[1].partition(":")[2], 16) == port and fields[3] != _LISTEN and fields[9] != "0":
            return True
    return False


def _process(pid: int) -> tuple[str, int, int]:
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except FileNotFoundError:
            continue
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    if words[0].endswith(b"nats-server"):
        return "nats-server", 0, 0
    named = (b"forkserver" if b"forkserver" in word else word for word in words)
    name = b" ".join(word for word in named if word.startswith((b"services.", b"forkserver")))
    return name.decode(), len(links), sum("memfd:" in link for link in links)
