"""Links come and go with the workers: death, sign-off, drain, restart, silence, outage; the bus tells the truth about each."""

from __future__ import annotations

import asyncio

import pytest

from common.bus.storage import LINKS_CONFIG, WORKERS_CONFIG
from contracts.links import LinkState
from contracts.rank import PushOutcome
from contracts.requests import WorkerRef
from tests.integration.links_world import PREFILL, LinksWorld, in_links_world
from tests.integration.part_pushes import part_pushed


def test_a_decode_worker_that_registers_is_linked() -> None:
    """The record names both starts, the topology, and what a handoff moves; the event and the gauge say the same."""

    async def scenario(world: LinksWorld) -> None:
        peer = await world.peer()
        link = await world.linked()
        assert (link.prefill, link.decode) == (PREFILL, peer.ref)
        assert (link.topology, link.transport, link.num_failures) == ("tp2 -> tp1", "none", 0)
        met = world.service.links.met("decode-0", "i0")
        assert met is not None
        assert link.num_parts == len(met.plan.parts)
        # The made-up model: keys and values of 2 heads of 8 floats; conv of 3 x 96 channels, 4 states of 8 x 8 floats.
        assert (link.token_bytes, link.state_bytes) == (2 * 2 * 8 * 4, 3 * 96 * 4 + 4 * 8 * 8 * 4)
        (event,) = await world.events()
        assert (event.event, event.prefill, event.decode) == ("linked", PREFILL, peer.ref)
        assert (event.num_parts, event.topology) == (link.num_parts, "tp2 -> tp1")
        assert [world.gauge(state) for state in LinkState] == [0, 1, 0, 0]
        assert 'pdmesh_link_transitions_total{event="linked"} 1.0' in world.metrics.exposition().decode()

    in_links_world(scenario)


def test_a_dead_decode_worker_is_unlinked_when_its_lease_ends() -> None:
    """Silence is noticed, whatever transfers there are; the record vanishes and nothing can be written to it any more."""

    async def scenario(world: LinksWorld) -> None:
        peer = await world.peer()
        await world.linked()
        world.service.links.transfer_begins("r1-0", peer.ref)
        peer.die()
        await world.until(None, within_s=9.0)
        assert world.engine.calls == [("link", "decode-0", "i0"), ("unlink", "decode-0", "i0")]
        assert world.service.links.met("decode-0", "i0") is None
        assert await world.told() == [("linked", "i0"), ("unlinked", "i0")]
        assert (await world.events())[-1].reason == "the decode worker is gone"
        assert [world.gauge(state) for state in LinkState] == [0, 0, 0, 0]

    in_links_world(scenario)


def test_a_doubted_link_is_undone_and_made_again_as_soon_as_that_is_possible() -> None:
    """The bus says so meanwhile: nothing is placed on the pair, and the reason can be read."""

    async def scenario(world: LinksWorld) -> None:
        peer = await world.peer()
        await world.linked()
        world.service.links.transfer_begins("r1-0", peer.ref)
        world.engine.failing_links = 2
        world.service.links.note_push(0, part_pushed("r1-0", PushOutcome.INDETERMINATE))
        assert world.service.links.met("decode-0", "i0") is None
        await world.until(LinkState.MEETING, within_s=1.0)
        await world.linked()
        assert world.engine.calls == [
            ("link", "decode-0", "i0"),
            ("unlink", "decode-0", "i0"),
            ("link", "decode-0", "i0"),
        ]
        assert await world.told() == [("linked", "i0"), ("unlinked", "i0"), ("linked", "i0")]
        reason = (await world.events())[1].reason
        assert reason == "what was pushed to it did not arrive: it is indeterminate"
        assert world.service.links.met("decode-0", "i0") is not None

    in_links_world(scenario)


def test_what_comes_of_an_earlier_link_says_nothing_of_the_one_after() -> None:
    """Of all that was under way over it nobody may know the end; the link was made anew after the first."""

    async def scenario(world: LinksWorld) -> None:
        peer = await world.peer()
        await world.linked()
        links = world.service.links
        for handoff in ("r1-0", "r2-0", "r3-0"):
            links.transfer_begins(handoff, peer.ref)
            links.transfer_bound(handoff)
        links.transfer_ends("r1-0")
        links.note_push(0, part_pushed("r1-0", PushOutcome.INDETERMINATE))
        await world.until(LinkState.MEETING, within_s=1.0)
        await world.linked()
        links.note_push(0, part_pushed("r2-0", PushOutcome.INDETERMINATE))
        links.note_push(0, part_pushed("r3-0", PushOutcome.INDETERMINATE, rank=1))
        await world.clock.sleep(1.0)
        assert await world.told() == [("linked", "i0"), ("unlinked", "i0"), ("linked", "i0")]
        links.transfer_begins("r4-0", peer.ref)
        links.transfer_bound("r4-0")
        links.note_push(0, part_pushed("r4-0", PushOutcome.INDETERMINATE))
        await world.clock.sleep(1.0)
        assert [name for name, _ in await world.told()] == ["linked", "unlinked", "linked", "unlinked", "linked"]

    in_links_world(scenario)


def test_a_decode_worker_that_signs_off_is_unlinked_at_once() -> None:
    """Nobody waits for a lease."""

    async def scenario(world: LinksWorld) -> None:
        peer = await world.peer()
        await world.linked()
        await peer.leave()
        await world.until(None, within_s=0.5)

    in_links_world(scenario)


def test_a_draining_decode_worker_keeps_its_link_until_its_transfers_have_ended() -> None:
    """The bus says `unlinking` from the first moment; the plan stays for grants that are out, and goes with the last of them."""

    async def scenario(world: LinksWorld) -> None:
        peer = await world.peer()
        await world.linked()
        for handoff in ("r1-0", "r2-0"):
            world.service.links.transfer_begins(handoff, peer.ref)
        world.service.links.transfer_begins("r3-0", WorkerRef(worker_id="decode-0", incarnation="another"))
        await peer.drain()
        await world.until(LinkState.UNLINKING, within_s=0.5)
        await world.clock.sleep(20.0)
        world.service.links.transfer_ends("r1-0")
        await world.clock.sleep(5.0)
        assert world.service.links.met("decode-0", "i0") is not None
        assert world.gauge(LinkState.UNLINKING) == 1
        world.service.links.transfer_ends("r2-0")
        world.service.links.transfer_ends("r2-0")
        await world.until(None, within_s=0.5)
        assert world.engine.linked == {}
        assert (await world.events())[-1].reason == "the decode worker drains"
        await world.clock.sleep(10.0)
        assert await world.link() is None, "it was linked again while it drained"

    in_links_world(scenario)


def test_a_draining_prefill_worker_leaves_no_link_behind() -> None:
    """Its own drain waits for its transfers and then empties the table; who registers meanwhile is not met."""

    async def scenario(world: LinksWorld) -> None:
        peer = await world.peer()
        await world.linked()
        world.service.links.transfer_begins("r1-0", peer.ref)
        drain = world.group.create_task(world.host.drain())
        await world.until(LinkState.UNLINKING, within_s=0.5)
        late = await world.peer("decode-1", "i1")
        await world.clock.sleep(3.0)
        assert not drain.done()
        assert world.engine.linked == {"decode-0": "i0"}
        world.service.links.transfer_ends("r1-0")
        await drain
        assert await (await world.bus.ensure_bucket(LINKS_CONFIG)).keys() == []
        assert late.num_described == 0
        assert (await world.events())[-1].reason == "the prefill worker drains"

    in_links_world(scenario)


def test_a_drain_without_transfers_takes_no_time() -> None:
    """Who stops an idle mesh does not wait for it."""

    async def scenario(world: LinksWorld) -> None:
        await world.peer()
        await world.linked()
        before = world.clock.monotonic()
        await world.host.drain()
        assert world.clock.monotonic() - before == pytest.approx(world.engine.link_s)
        assert await world.link() is None

    in_links_world(scenario)


def test_a_restarted_decode_worker_is_unlinked_and_linked_again() -> None:
    """Its new start is another worker: the old link goes first, and a grant of the old start is worth nothing."""

    async def scenario(world: LinksWorld) -> None:
        peer = await world.peer()
        await world.linked()
        peer.die()
        await world.peer(incarnation="i1")
        link = await world.linked(incarnation="i1")
        assert link.decode.incarnation == "i1"
        assert world.engine.calls == [
            ("link", "decode-0", "i0"),
            ("unlink", "decode-0", "i0"),
            ("link", "decode-0", "i1"),
        ]
        assert world.service.links.met("decode-0", "i0") is None
        assert await world.told() == [("linked", "i0"), ("unlinked", "i0"), ("linked", "i1")]
        assert (await world.events())[1].reason == "the decode worker has restarted"

    in_links_world(scenario)


def test_a_flapping_decode_worker_is_never_linked_twice_at_once() -> None:
    """Thirty starts while links are being made and undone: the engine sees them one by one, and ends with the last."""

    async def scenario(world: LinksWorld) -> None:
        peer = await world.peer()
        for number in range(1, 31):
            await world.clock.sleep(0.013 * number)
            peer.die()
            peer = await world.peer(incarnation=f"i{number}")
        await world.linked(incarnation="i30")
        assert world.engine.linked == {"decode-0": "i30"}
        told = await world.told()
        assert [name for name, _ in told] == ["linked", "unlinked"] * (len(told) // 2) + ["linked"]

    in_links_world(scenario)


def test_a_decode_worker_that_does_not_answer_holds_up_no_other() -> None:
    """It is tried again with growing pauses, refused by name after some tries, and linked as soon as it answers."""

    async def scenario(world: LinksWorld) -> None:
        silent = await world.peer("decode-0")
        silent.answers = False
        await world.peer("decode-1", "i1")
        await world.until(LinkState.LINKED, "decode-1", within_s=1.0)
        async with asyncio.timeout(60.0):
            while (link := await world.link()) is None or not link.num_failures:
                await world.clock.sleep(0.1)
        assert link.state is LinkState.MEETING
        assert "no answer from pd.v1.rpc.decode.decode-0.describe" in link.reason
        refused = await world.until(LinkState.REFUSED, within_s=80.0)
        assert refused is not None
        assert refused.rule == "reachable"
        await world.clock.sleep(100.0)
        assert [name for name, start in await world.told() if start == "i0"] == ["link_refused"]
        assert len(world.notes.of("link_refused")) == 1
        silent.answers = True
        await world.until(LinkState.LINKED, within_s=45.0)

    in_links_world(scenario)


def test_a_connection_that_fails_is_tried_again() -> None:
    """What the engine could not reach this time is no refusal."""

    async def scenario(world: LinksWorld) -> None:
        world.engine.failing_links = 2
        await world.peer()
        await world.clock.sleep(0.5)
        link = await world.link()
        assert link is not None
        assert (link.state, link.num_failures) == (LinkState.MEETING, 1)
        assert "connection refused" in link.reason
        link = await world.linked()
        assert (link.num_failures, link.reason) == (0, "")

    in_links_world(scenario)


def test_an_outage_of_the_bus_unlinks_nobody() -> None:
    """An outage silences everybody, and records expire meanwhile: links and transfers stay, and the table comes back."""

    async def scenario(world: LinksWorld) -> None:
        await world.peer()
        await world.linked()
        world.server.go_down()
        await world.clock.sleep(40.0)
        world.server.come_back()
        await world.clock.sleep(3.0)
        assert await world.link() is not None
        await world.clock.sleep(20.0)
        assert world.engine.calls == [("link", "decode-0", "i0")]
        assert await world.told() == [("linked", "i0")]

    in_links_world(scenario)


def test_the_links_of_a_dead_prefill_worker_vanish() -> None:
    """Its records live only as long as it writes them."""

    async def scenario(world: LinksWorld) -> None:
        await world.peer()
        await world.linked()
        await world.clock.sleep(60.0)
        assert await world.link() is not None
        await world.worker_bus.close()
        await world.until(None, within_s=16.0)

    in_links_world(scenario)


def test_what_an_earlier_start_left_in_the_table_is_removed() -> None:
    """Nobody need wait for it to expire, and other workers' records stay."""

    async def scenario(world: LinksWorld) -> None:
        bucket = await world.bus.ensure_bucket(LINKS_CONFIG)
        await bucket.put("prefill-0.decode-7", b"left")
        await bucket.put("prefill-1.decode-7", b"another's")
        assert not world.notes.of("peer_linked"), "the worker has begun already"
        await world.peer()
        await world.linked()
        assert await bucket.keys() == ["prefill-0.decode-0", "prefill-1.decode-7"]

    in_links_world(scenario)


@pytest.mark.parametrize("garbage", [b"", b"\xff", b"{}", b'{"type":"worker_record"}'])
def test_unreadable_records_are_passed_over(garbage: bytes) -> None:
    """A stranger's record stops no link."""

    async def scenario(world: LinksWorld) -> None:
        await (await world.bus.ensure_bucket(WORKERS_CONFIG)).put("decode-9", garbage)
        await world.peer()
        await world.linked()
        assert world.notes.of("message_refused")

    in_links_world(scenario)
