"""What a broker takes, and what it refuses before anything is asked of a worker; over scripted workers, in virtual time."""

from __future__ import annotations

from common.bus.memory import MemoryServer
from contracts.codec import encode
from contracts.errors import ErrorCode
from contracts.handoff import (
    ReserveDecode,
)
from contracts.requests import Accepted, DisaggregatedRoute, Refused, WorkerRef
from contracts.workers import DescribeWorker
from services.broker.core.messages import first_record
from tests.integration.broker_world import DECODE, HANDOFF, PREFILL, World, in_world
from tests.integration.handoff_stages import OK, committed, prefilling
from tests.integration.scripted_worker import manifests


def test_the_same_submit_is_delivery_and_another_is_a_duplicate() -> None:
    """Repeating a submit changes nothing; the same id for something else is refused."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await prefilling(world)
        assert await world.submit() == OK
        answer = await world.submit(num_prompt_tokens=41)
        assert isinstance(answer, Refused)
        assert answer.error.code is ErrorCode.DUPLICATE
        assert len(world.decode.of(ReserveDecode)) == 1

    in_world(scenario)


def test_a_record_of_another_request_wins() -> None:
    """A key that is taken already refuses the submit before anybody is asked; the same request's key accepts it."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        bucket = await world.bus.ensure_bucket(world.broker._records._config)
        other = first_record(
            world.submit_request(prompt_hash="other"), fence=1, deadline_at="2030-01-01T00:00:00+00:00"
        )
        await bucket.create(HANDOFF, encode(other))
        answer = await world.submit()
        assert isinstance(answer, Refused)
        assert answer.error.code is ErrorCode.DUPLICATE
        assert not world.decode.of(ReserveDecode)
        assert world.broker.num_in_flight == 0

    in_world(scenario)


def test_what_is_not_known_is_refused() -> None:
    """Messages about a handoff that is not there are answered, not ignored."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        for answer in (await world.cancel(), await world.end(), await world.finish_prefill()):
            assert isinstance(answer, Refused)
            assert answer.error.code is ErrorCode.UNKNOWN_HANDOFF

    in_world(scenario)


def test_bad_submits_name_the_field() -> None:
    """A submit that breaks a rule is refused before anything is written."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        for changes, field in (
            ({"handoff_id": "r9-0"}, "handoff_id"),
            ({"num_prompt_tokens": 0}, "num_prompt_tokens"),
            ({"timeout_ms": 0}, "timeout_ms"),
            ({"router_id": "No Router"}, "router_id"),
        ):
            answer = await world.submit(**changes)
            assert isinstance(answer, Refused)
            assert answer.error.param == field or answer.error.message.startswith(field)
        assert world.broker.num_in_flight == 0

    in_world(scenario)


def test_workers_that_do_not_fit_are_refused_by_rule() -> None:
    """Different block sizes: the submit is refused with the broken rule, and asked about only once."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        world.decode.manifests = await manifests(world.clock, DECODE, 1, block_size=32)
        for _ in range(2):
            answer = await world.submit()
            assert isinstance(answer, Refused)
            assert answer.error.code is ErrorCode.INCOMPATIBLE_WORKERS
            assert "same_block_size" in answer.error.message
        assert [message.rank for message in world.prefill.of(DescribeWorker)] == [0, 1]

    in_world(scenario)


def test_a_worker_that_is_not_there_refuses_the_submit() -> None:
    """A pair that cannot be described is no pair: the router is told at once, and may choose another."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        nobody = WorkerRef(worker_id="decode-9", incarnation="i9")
        answer = await world.submit(route=DisaggregatedRoute(prefill=PREFILL, decode=nobody))
        assert isinstance(answer, Refused)
        assert answer.error.code is ErrorCode.WORKER_LOST

    in_world(scenario)


def test_a_draining_broker_ends_what_it_has() -> None:
    """What comes meanwhile is taken, since nobody else may take it, and not waited for: under load there would be no end."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await committed(world)
        drained = world.group.create_task(world.broker.drain())
        await world.clock.sleep(0.1)
        assert await world.submit(handoff_id="r2-0", request_id="r2") == Accepted(handoff_id="r2-0")
        assert await world.submit() == OK
        assert not drained.done()
        await world.take_over()
        await world.end()
        await drained
        assert world.broker.num_in_flight == 1

    in_world(scenario)


def test_too_many_handoffs_are_refused() -> None:
    """The bound on what is in flight is a refusal that says so."""

    async def scenario(world: World, _server: MemoryServer) -> None:
        await prefilling(world)
        answer = await world.submit(handoff_id="r2-0", request_id="r2")
        assert isinstance(answer, Refused)
        assert answer.error.code is ErrorCode.OVERLOADED

    in_world(scenario, max_in_flight=1)
