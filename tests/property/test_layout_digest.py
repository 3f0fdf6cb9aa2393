"""Digests of caches: the same however a cache is cut, changed by every byte that moves, and by no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice

import pytest

from common.layout.digest import DIGEST_MASK, CacheName, Held, digest, show, units_held, units_sent
from common.layout.shape import CacheShape
from contracts.errors import InvalidValueError
from contracts.manifest import Namespace, Role
from tests.property.layout_cases import HEADS, Case, hybrid_cases, kv_cases, state_cases
from tests.property.layout_execution import link
from tests.property.layout_world import Request, Worker, make_shape, unsharded

SOURCE = Request(block_ids=(4, 5, 1, 7), slot=2, conv_row=2, ssm_row=1)
DESTINATION = Request(block_ids=(2, 3, 0, 6), slot=1, conv_row=1, ssm_row=2)
PLAIN_SOURCE = Request(block_ids=(4, 5, 1, 7), slot=2)
PLAIN_DESTINATION = Request(block_ids=(2, 3, 0, 6), slot=1)
Sums = dict[tuple[CacheName, int], int]
STEP = 7
"""Every so many cases are looked at: the planner's own tests look at all."""


def _place(worker: Worker, request: Request) -> Held:
    return Held(
        block_ids=request.block_ids,
        slot=request.slot,
        start=request.cached,
        end=request.num_tokens,
        block_size=worker.shape.block_size,
        conv_row=request.conv_row,
        ssm_row=request.ssm_row,
    )


def _filled(shape: CacheShape, tp: int, request: Request, dcp: int = 1, name: str = "prefill-0") -> Worker:
    worker = Worker(shape, tp, dcp, name=name)
    worker.fill(unsharded(shape, request.num_tokens), request)
    return worker


def _held(worker: Worker, request: Request) -> Sums:
    sums: Counter[tuple[CacheName, int]] = Counter()
    for rank, manifest in enumerate(worker.manifests()):
        data = worker.regions[rank].data
        for units in units_held(manifest, worker.shape):
            sums[units.cache, rank] += digest(units, data, _place(worker, request))
    return {key: value & DIGEST_MASK for key, value in sums.items()}


def _sent(source: Worker, destination: Worker, request: Request) -> Sums:
    plan = link(source, destination)
    sums: Counter[tuple[CacheName, int]] = Counter()
    for rank in range(source.tp):
        data = source.regions[rank].data
        for dst_rank, units in units_sent(plan.templates_for(rank), source.shape):
            sums[units.cache, dst_rank] += digest(units, data, _place(source, request))
    return {key: value & DIGEST_MASK for key, value in sums.items()}


def _some_cases() -> Iterator[Case]:
    grids = (grid(heads) for heads in HEADS for grid in (kv_cases, state_cases, hybrid_cases))
    return islice(chain.from_iterable(grids), 0, None, STEP)


def test_what_sources_send_adds_up_to_what_a_destination_holds() -> None:
    """For every cache and destination rank, over heads, tp 1 to 8 a side, dcp 1 to 8, drafts, speculation, 16 and 32 bits."""
    num_cases = 0
    for src_shape, tp, dst_shape, (dst_tp, dcp) in _some_cases():
        pair = (SOURCE, DESTINATION) if src_shape.num_speculative_tokens else (PLAIN_SOURCE, PLAIN_DESTINATION)
        source = _filled(src_shape, tp, pair[0])
        destination = _filled(dst_shape, dst_tp, pair[1], dcp, name="decode-0")
        assert _sent(source, destination, pair[0]) == _held(destination, pair[1])
        num_cases += 1
    assert num_cases > 150


def test_the_digest_of_a_cache_does_not_depend_on_its_cut() -> None:
    """Added up over ranks that hold different units, it is that of one rank that holds everything."""
    shape = make_shape(layers="lf", kv=8, hk=8, hv=16)
    totals = []
    for tp in (1, 2, 4, 8):
        sums: Counter[CacheName] = Counter()
        for (cache, _), value in _held(_filled(shape, tp, PLAIN_SOURCE), PLAIN_SOURCE).items():
            sums[cache] += value
        totals.append({cache: value & DIGEST_MASK for cache, value in sums.items()})
    assert all(total == totals[0] for total in totals)
    assert len(set(totals[0].values())) == len(totals[0])


def test_any_byte_of_a_sequence_changes_its_cache_s_digest_and_no_other() -> None:
    """Each byte of each rank's region is flipped: bytes that move change exactly one digest, all others none."""
    shape = make_shape(layers="lf", kv=2, hk=2, hv=4, num_blocks=8)
    worker = _filled(shape, 2, PLAIN_DESTINATION)
    content = unsharded(shape, PLAIN_DESTINATION.num_tokens)
    _, owned = worker.images([content], [PLAIN_DESTINATION])
    before = _held(worker, PLAIN_DESTINATION)
    for rank, region in enumerate(worker.regions):
        for place in range(0, region.size, 3):
            region[place] ^= 0x10
            after = _held(worker, PLAIN_DESTINATION)
            changed = [key for key in before if before[key] != after[key]]
            assert [key[1] for key in changed] == [rank] * int(owned[rank][place])
            region[place] ^= 0x10


def test_what_was_moved_to_another_place_of_the_same_cache_shows() -> None:
    """Two blocks, two heads and two rows that change places: the bytes are the same, their names are not."""
    shape = make_shape(layers="lf", kv=2, hk=1, hv=2)
    worker = _filled(shape, 1, PLAIN_DESTINATION)
    before = _held(worker, PLAIN_DESTINATION)
    swapped = Request(block_ids=(3, 2, 0, 6), slot=1, cached=0)
    whole = Request(block_ids=(2, 3, 0, 6), slot=1, cached=0)
    worker.fill(unsharded(shape, whole.num_tokens), whole)
    key: tuple[CacheName, int] = ((Namespace.TARGET, Role.KEY, 1), 0)
    assert _held(worker, whole)[key] != _held(worker, swapped)[key]
    ssm = worker.ranks[0].cache(Role.SSM, 0)
    view = worker.regions[0][ssm.offset : ssm.offset + ssm.nbytes].reshape(shape.num_slots, 1, 2, -1)
    view[1, 0] = view[1, 0][::-1].copy()
    assert (
        _held(worker, PLAIN_DESTINATION)[(Namespace.TARGET, Role.SSM, 0), 0]
        != before[(Namespace.TARGET, Role.SSM, 0), 0]
    )


def test_zeroed_caches_differ_from_each_other_by_their_names() -> None:
    """A cache of zeros has a digest like any other: nothing adds up to nothing."""
    shape = make_shape(layers="ll", hk=1, hv=1)
    worker = Worker(shape, 1)
    worker.regions[0].fill(0)
    sums = _held(worker, PLAIN_DESTINATION)
    assert len(set(sums.values())) == len(sums) == 4
    assert all(sums.values())
    assert show(0xAB) == "00000000000000ab"


def test_channels_that_cut_a_head_are_refused() -> None:
    """A plan that cut a conv segment within a key head could not be compared: that is said, not guessed."""
    shape = make_shape(layers="l", hk=2, hv=2)
    other = make_shape(layers="l", hk=4, hv=4)
    with pytest.raises(InvalidValueError, match="multiples of 2, the channels of a key head"):
        units_held(
            Worker(other, 4).manifests()[1],
            CacheShape(
                **{name: getattr(shape, name) for name in shape.__struct_fields__}
                | {"key_head_dim": 2, "value_head_dim": 2}
            ),
        )
