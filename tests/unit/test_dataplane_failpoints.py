"""Failpoints: what a setting means, what it matches, and what is said of a bad one."""

from __future__ import annotations

import msgspec
import pytest

from common.dataplane.failpoints import Action, Failpoint, Part, parse_failpoints
from contracts.errors import InvalidValueError
from contracts.manifest import Namespace, Role

KEY_PART = Part(namespace=Namespace.TARGET, role=Role.KEY, layer=3, source=0, destination=1)
SSM_PART = msgspec.structs.replace(KEY_PART, role=Role.SSM)


def test_an_empty_setting_is_no_failpoints() -> None:
    """Nothing is planted unless somebody asks for it."""
    points = parse_failpoints("  ; ")
    assert (bool(points), points.delay_ms(KEY_PART), points.is_dropped(KEY_PART)) == (False, 0, False)
    assert (points.is_zeroed(KEY_PART, 0), points.source_block(KEY_PART, 4)) == (False, 4)


def test_a_setting_lists_failpoints() -> None:
    """The grammar, with spaces and every key."""
    text = "zero:role=key,layer=3,block=2; delay:layer=3 , ms=50;swap:namespace=draft,source=1,destination=2,block=0,with=1;drop"
    assert parse_failpoints(text).points == (
        Failpoint(action=Action.ZERO, role=Role.KEY, layer=3, block=2),
        Failpoint(action=Action.DELAY, layer=3, delay_ms=50),
        Failpoint(action=Action.SWAP, namespace=Namespace.DRAFT, source=1, destination=2, block=0, other=1),
        Failpoint(action=Action.DROP),
    )


@pytest.mark.parametrize(
    ("field", "other"),
    [("namespace", Namespace.DRAFT), ("role", Role.VALUE), ("layer", 4), ("source", 2), ("destination", 2)],
)
def test_every_key_narrows(field: str, other: object) -> None:
    """A part that differs in one named key is left alone; one that differs in a key that is not named is not."""
    exact = parse_failpoints("drop:namespace=target,role=key,layer=3,source=0,destination=1")
    changed = msgspec.structs.replace(KEY_PART, **{field: other})
    assert (exact.is_dropped(KEY_PART), exact.is_dropped(changed)) == (True, False)
    assert parse_failpoints("drop").is_dropped(changed)


def test_zero_names_one_block_or_all_of_a_part() -> None:
    """A block that is named is zeroed alone; without one, every block and every state shard is."""
    one = parse_failpoints("zero:block=2")
    assert [one.is_zeroed(KEY_PART, block) for block in range(4)] == [False, False, True, False]
    assert not one.is_zeroed(SSM_PART)
    shard = parse_failpoints("zero:role=ssm,source=0")
    assert (shard.is_zeroed(SSM_PART), shard.is_zeroed(KEY_PART, 0)) == (True, False)


def test_swap_exchanges_two_blocks() -> None:
    """Both blocks arrive, each in the other's place."""
    points = parse_failpoints("swap:role=key,block=1,with=3")
    assert [points.source_block(KEY_PART, block) for block in range(5)] == [0, 3, 2, 1, 4]
    assert points.source_block(msgspec.structs.replace(KEY_PART, role=Role.VALUE), 1) == 1


def test_delays_add_up() -> None:
    """Several delays of one part are one long one."""
    points = parse_failpoints("delay:layer=3,ms=50;delay:ms=7;delay:layer=4,ms=1000")
    assert points.delay_ms(KEY_PART) == 57


def test_fail_names_parts_whose_transfers_fail() -> None:
    """As drop does, but the other side hears of it."""
    points = parse_failpoints("fail:role=key,source=0")
    assert (points.is_failed(KEY_PART), points.is_failed(SSM_PART), points.is_dropped(KEY_PART)) == (True, False, False)


def test_of_several_links_the_slowest_counts() -> None:
    """Latency and rate each; a link that is not named is as fast as it is."""
    points = parse_failpoints("link:source=0,ms=2,mbs=100; link:source=0,destination=1,ms=1,mbs=50; link:source=2,ms=7")
    assert points.link(0, 0) == (2, 100)
    assert points.link(0, 1) == (2, 50)
    assert points.link(2, 5) == (7, 0)
    assert points.link(1, 1) == (0, 0)


@pytest.mark.parametrize(
    ("text", "part_of_message"),
    [
        ("explode", "begins with one of zero, swap, delay, drop"),
        ("zero:layer", "key=value, not 'layer'"),
        ("zero:layer=", "key=value"),
        ("zero:layer=3,layer=4", "'layer' at most once"),
        ("zero:colour=red", "not 'colour'"),
        ("zero:layer=-1", "layer is a whole number of 0 or more, not '-1'"),
        ("zero:layer=three", "not 'three'"),
        ("zero:role=keys", "keys"),
        ("zero:ms=5", "'ms' is for delay and link alone"),
        ("delay:ms=5,mbs=1", "'mbs' is for link alone"),
        ("fail:block=1", "without 'block'"),
        ("link:source=0", "link needs 'ms'"),
        ("link:ms=5,role=ssm", "for all that goes from 'source' to 'destination'"),
        ("delay:layer=3", "delay needs 'ms'"),
        ("delay:ms=5,block=1", "without 'block'"),
        ("drop:block=1", "without 'block'"),
        ("swap:block=1", "swap needs 'with'"),
        ("swap:block=1,with=1", "two different blocks"),
        ("zero:role=ssm,block=1", "ssm has no blocks"),
        ("zero;bad", "'bad'"),
        ("zero;" * 1000, "at most 4096 characters"),
    ],
)
def test_a_bad_setting_is_refused_with_the_failpoint_and_the_rule(text: str, part_of_message: str) -> None:
    """The message names the setting, the item and what is wrong."""
    with pytest.raises(InvalidValueError) as caught:
        parse_failpoints(text)
    assert caught.value.field == "failpoints"
    assert part_of_message in str(caught.value)
