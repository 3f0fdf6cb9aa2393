"""Pairs that do not fit are refused by name: the field, both values, the rule, what to change - once, and for everybody to see."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from contracts.links import LinkEventName, LinkState
from contracts.manifest import CacheDtypes, Dtype, RankManifest, Role, SlotPlace
from tests.integration.links_world import DecodePeer, LinksWorld, in_links_world

BF16 = CacheDtypes(key=Dtype.BFLOAT16, value=Dtype.BFLOAT16, conv=Dtype.BFLOAT16)
F32_TEXT = "key=float32 value=float32 conv=float32 ssm=float32"
BF16_TEXT = "key=bfloat16 value=bfloat16 conv=bfloat16 ssm=float32"

Spoil = Callable[[RankManifest], RankManifest]


def _moves_two_rows(manifest: RankManifest) -> RankManifest:
    """A rank whose conv states are moved in another way."""
    spans = tuple(
        replace(span, place=replace(span.place, moved_rows=2))
        if span.key.role is Role.CONV and isinstance(span.place, SlotPlace)
        else span
        for span in manifest.spans
    )
    return replace(manifest, spans=spans)


def _begins_late(manifest: RankManifest) -> RankManifest:
    """A rank that lacks the first channel of its first conv state."""
    first = next(span for span in manifest.spans if span.key.role is Role.CONV)
    late = replace(first, start=first.start + 1, length=first.length - 1)
    return replace(manifest, spans=tuple(late if span is first else span for span in manifest.spans))


def _holds_twice(manifest: RankManifest) -> RankManifest:
    """A rank of whose conv states two segments are the same bytes."""
    return replace(manifest, spans=(*manifest.spans, manifest.spans[0]))


FIELDS: list[tuple[str, str, Spoil]] = [
    (
        "same_model",
        "model: fake at the prefill worker, other at the decode worker (rule same_model: start both from the same checkpoint)",
        lambda manifest: replace(manifest, model="other"),
    ),
    (
        "same_tensors",
        "cannot plan a transfer: rule same_tensors, destination rank 0: expected caches of the draft d1: bootstrap, key, value, found none",
        lambda manifest: replace(manifest, draft="d1"),
    ),
    (
        "same_block_size",
        "block_size: 16 at the prefill worker, 32 at the decode worker (rule same_block_size: set block_size alike)",
        lambda manifest: replace(manifest, block_size=32),
    ),
    (
        "same_dtypes",
        f"dtypes: {F32_TEXT} at the prefill worker, {BF16_TEXT} at the decode worker (rule same_dtypes: set dtype alike)",
        lambda manifest: replace(manifest, dtypes=BF16),
    ),
    (
        "schema_version",
        "schema_version: 2 at the prefill worker, 3 at the decode worker (rule schema_version: run the same release on both)",
        lambda manifest: replace(manifest, schema_version=3),
    ),
    (
        "interleave_is_one_block",
        "interleave: 16 at the prefill worker, 8 at the decode worker (rule interleave_is_one_block: set dcp_interleave alike, to block_size)",
        lambda manifest: replace(manifest, interleave=8),
    ),
    (
        "dcp_ranks_hold_one_kv_head",
        "cannot plan a transfer: rule dcp_ranks_hold_one_kv_head, destination rank 0: expected dcp_size divides tp_size",
        lambda manifest: replace(manifest, coordinates=replace(manifest.coordinates, dcp_size=2)),
    ),
    (
        "each_rank_once",
        "cannot plan a transfer: rule each_rank_once, destination: expected ranks 0 to 1, found [0]",
        lambda manifest: replace(manifest, coordinates=replace(manifest.coordinates, tp_size=2)),
    ),
    (
        "same_unit",
        "cannot plan a transfer: rule same_unit, target/conv/0/k: expected one unit on all ranks",
        _moves_two_rows,
    ),
    (
        "no_gap",
        "cannot plan a transfer: rule no_gap, destination, target/conv/0/q: expected a span from 0, found 1",
        _begins_late,
    ),
    (
        "no_overlap",
        "cannot plan a transfer: rule no_overlap, destination rank 0, target/conv/0/q: expected from byte 128, found 0",
        _holds_twice,
    ),
]


async def spoiled(world: LinksWorld, spoil: Spoil) -> DecodePeer:
    """A decode worker that does not fit."""
    peer = await world.peer()
    peer.manifests = tuple(map(spoil, peer.manifests))
    return peer


@pytest.mark.parametrize(("rule", "text", "spoil"), FIELDS, ids=[rule for rule, _, _ in FIELDS])
def test_each_field_is_refused_by_name(rule: str, text: str, spoil: Spoil) -> None:
    """Record, event and log say the same, once, however often the worker renews its lease; the engine hears nothing."""

    async def scenario(world: LinksWorld) -> None:
        peer = await spoiled(world, spoil)
        link = await world.until(LinkState.REFUSED, within_s=1.0)
        assert link is not None
        assert link.rule == rule
        assert link.reason.startswith(text), link.reason
        await world.clock.sleep(30.0)
        (event,) = await world.events()
        assert (event.event, event.rule, event.reason) == ("link_refused", rule, link.reason)
        (line,) = world.notes.of("link_refused")
        assert (line["rule"], line["reason"], line["peer_incarnation"]) == (rule, link.reason, "i0")
        assert peer.num_described == len(peer.manifests), "it was met again"
        assert world.engine.calls == []
        assert world.service.links.met("decode-0", "i0") is None
        assert link.reason in world.service.links.why_no_plan("decode-0")
        assert world.gauge(LinkState.REFUSED) == 1
        counted = {name: world.transitions(name) for name in LinkEventName}
        assert counted == {LinkEventName.LINK_REFUSED: 1, LinkEventName.LINKED: 0, LinkEventName.UNLINKED: 0}
        assert await world.link() == link

    in_links_world(scenario)


def test_another_transport_is_refused_by_name() -> None:
    """What one cannot write to by its own means is not linked."""

    async def scenario(world: LinksWorld) -> None:
        peer = await world.peer()
        peer.transport = "tcp"
        link = await world.until(LinkState.REFUSED, within_s=1.0)
        assert link is not None
        assert (link.rule, link.reason) == (
            "same_transport",
            "transport: none at the prefill worker, tcp at the decode worker (rule same_transport: set transport alike)",
        )

    in_links_world(scenario)


def test_all_that_differs_is_named_together() -> None:
    """Who mends a pair can do it in one go."""

    async def scenario(world: LinksWorld) -> None:
        await spoiled(world, lambda manifest: replace(manifest, block_size=32, dtypes=BF16))
        link = await world.until(LinkState.REFUSED, within_s=1.0)
        assert link is not None
        assert [each.partition(":")[0] for each in link.reason.split("; ")] == ["block_size", "dtypes"]

    in_links_world(scenario)


def test_a_refused_worker_that_restarts_is_met_again() -> None:
    """A refusal is about one start: the next one may fit, or is refused in its own name."""

    async def scenario(world: LinksWorld) -> None:
        peer = await spoiled(world, lambda manifest: replace(manifest, model="other"))
        await world.until(LinkState.REFUSED, within_s=1.0)
        peer.die()
        peer = await world.peer(incarnation="i1")
        peer.manifests = tuple(replace(manifest, model="third") for manifest in peer.manifests)
        await world.until(LinkState.REFUSED, incarnation="i1", within_s=1.0)
        peer.die()
        await world.peer(incarnation="i2")
        await world.linked(incarnation="i2")
        assert await world.told() == [("link_refused", "i0"), ("link_refused", "i1"), ("linked", "i2")]

    in_links_world(scenario)


def test_a_refused_worker_that_goes_leaves_no_record() -> None:
    """Nothing is unlinked, for nothing was linked."""

    async def scenario(world: LinksWorld) -> None:
        peer = await spoiled(world, lambda manifest: replace(manifest, model="other"))
        await world.until(LinkState.REFUSED, within_s=1.0)
        peer.die()
        await world.until(None, within_s=9.0)
        assert await world.told() == [("link_refused", "i0")]

    in_links_world(scenario)


def test_a_peer_that_talks_too_much_is_cut_short() -> None:
    """What it says becomes part of a record, and that has a bound."""

    async def scenario(world: LinksWorld) -> None:
        peer = await world.peer()
        peer.refuses = "x" * 200_000
        await world.clock.sleep(0.5)
        link = await world.link()
        assert link is not None
        assert link.num_failures == 1
        assert link.reason == f"internal_error: {'x' * 1000}"

    in_links_world(scenario)


def test_a_stranger_that_answers_for_a_worker_is_not_believed() -> None:
    """A description of another start is no description of this one."""

    async def scenario(world: LinksWorld) -> None:
        peer = await world.peer()
        peer.answers_as = "i9"
        await world.clock.sleep(0.5)
        link = await world.link()
        assert link is not None
        assert link.state is LinkState.MEETING
        assert "decode-0 i9 answered for decode-0 i0" in link.reason

    in_links_world(scenario)
