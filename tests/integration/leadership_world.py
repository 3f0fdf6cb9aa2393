"""Brokers of one partition as far as leading goes, over a world of scripted workers, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from common.bus.memory import MemoryServer
from common.bus.port import Bus
from common.runtime.metrics import Metrics
from common.runtime.offload import inline
from contracts import subjects
from contracts.codec import decode, encode
from contracts.requests import Ping, Pong
from contracts.subjects import BrokerVerb
from services.broker.app import make_leadership
from services.broker.leadership import Leadership
from services.broker.settings import BrokerSettings
from tests.integration.broker_world import World


class Candidate:
    """One broker process, as far as leading goes."""

    def __init__(self, world: World, bus: Bus, broker_id: str) -> None:
        self.metrics = Metrics()
        self.bus = bus
        self.leadership: Leadership = make_leadership(
            BrokerSettings(broker_id=broker_id),
            bus=bus,
            clock=world.clock,
            log=structlog.get_logger(),
            metrics=self.metrics,
            offload=inline,
        )
        self.task = world.group.create_task(self.leadership.run(), name=broker_id)

    @property
    def leads(self) -> bool:
        """Whether it leads now."""
        return self.leadership.broker is not None

    async def die(self) -> None:
        """Stop without a word."""
        self.task.cancel()
        await asyncio.wait([self.task])

    async def stop(self) -> None:
        """End as a process does that was told to."""
        await self.leadership.drain()
        await self.die()
        await self.leadership.release()


async def two(world: World, server: MemoryServer) -> tuple[Candidate, Candidate]:
    """One that leads, one that stands by."""
    first = Candidate(world, server.connect(), "broker-0")
    await first.leadership.wait_settled()
    second = Candidate(world, server.connect(), "broker-1")
    await second.leadership.wait_settled()
    assert (first.leads, second.leads) == (True, False)
    assert first.leadership.broker is not None
    world.broker, world.broker_bus = first.leadership.broker, first.bus
    return first, second


async def leader_of(world: World) -> str:
    """Who answers."""
    reply = await world.bus.request(subjects.broker_rpc(BrokerVerb.PING), encode(Ping()), timeout=1.0)
    return decode(reply.data, Pong).broker_id


async def follow(world: World, candidate: Candidate) -> None:
    """Wait until this one leads."""
    await world.until(lambda: candidate.leads)
    assert candidate.leadership.broker is not None
    world.broker, world.broker_bus = candidate.leadership.broker, candidate.bus


def fences(world: World, kind: type[Any]) -> list[int]:
    """The fences of what the workers were told."""
    return [message.fence for worker in (world.prefill, world.decode) for message in worker.of(kind)]
