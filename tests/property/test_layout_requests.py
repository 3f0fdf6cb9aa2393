"""Several sequences at once, with blocks, slots, cached prefixes and chunk borders anywhere, from any cut to any other."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from common.layout.bind import TokenChunk
from common.layout.ranges import RangeSet
from contracts.manifest import Namespace
from services.broker.core.ledger import Ledger
from tests.property.layout_cases import Cut, cuts, kv_sizes
from tests.property.layout_execution import Checker, Pair, link, parts_of
from tests.property.layout_world import Request, Worker, make_shape

NUM_BLOCKS = 14
NUM_SLOTS = 3
BLOCK_SIZE = 3
NUM_KEY_HEADS = 24
DEPTH = 2


@dataclass(frozen=True)
class Transfers:
    """Two workers, and the sequences that travel between them."""

    source: Worker
    destination: Worker
    pairs: tuple[Pair, ...]


@st.composite
def transfers(draw: st.DrawFn) -> Transfers:
    """A model of all roles with up to 8 KV heads, cut in any legal way, and up to three sequences."""
    num_heads = draw(st.integers(1, 8))
    sizes = [tp for tp in kv_sizes(num_heads) if NUM_KEY_HEADS % tp == 0]
    places: list[Cut] = [cut for cut in cuts(num_heads) if cut[0] in sizes]
    source, destination = (
        make_shape(
            layers="fl",
            kv=num_heads,
            hk=NUM_KEY_HEADS,
            hv=NUM_KEY_HEADS,
            depth=DEPTH,
            draft=1,
            draft_whole=draw(st.booleans()),
            num_blocks=NUM_BLOCKS,
        )
        for _ in range(2)
    )
    ids = [list(draw(st.permutations(range(NUM_BLOCKS)))) for _ in range(2)]
    slots = [draw(st.permutations(range(NUM_SLOTS))) for _ in range(2)]
    pairs: list[Pair] = []
    for number in range(draw(st.integers(1, NUM_SLOTS))):
        num_tokens = draw(st.integers(1, BLOCK_SIZE * 4))
        tokens = st.integers(0, num_tokens)
        cached, chunks = draw(tokens), tuple(sorted(draw(st.sets(tokens, max_size=5))))
        sides = []
        for free, slot in zip(ids, slots, strict=True):
            taken = [free.pop() for _ in range(-(-num_tokens // BLOCK_SIZE))]
            row = draw(st.integers(0, DEPTH))
            sides.append(
                Request(
                    block_ids=tuple(taken),
                    slot=slot[number],
                    num_tokens=num_tokens,
                    cached=cached,
                    chunks=chunks,
                    conv_row=row,
                    ssm_row=row,
                )
            )
        pairs.append((sides[0], sides[1]))
    return Transfers(
        source=Worker(source, draw(st.sampled_from(sizes))),
        destination=Worker(destination, *draw(st.sampled_from(places)), name="decode-0"),
        pairs=tuple(pairs),
    )


@settings(deadline=None, max_examples=40)
@given(transfers())
def test_several_sequences_arrive_whole_and_touch_nothing_else(made: Transfers) -> None:
    """Each byte of each sequence is written once, with its own content; cached tokens and all other memory keep their poison."""
    Checker(made.pairs).check(made.source, made.destination)


@settings(deadline=None, max_examples=40)
@given(transfers())
def test_what_is_reported_of_all_chunks_tiles_what_the_ledger_waits_for(made: Transfers) -> None:
    """Part by part, of target and draft: the token ranges of the chunks do not overlap, and together are what is owed."""
    compiled = link(made.source, made.destination)
    assert {part.namespace for part in compiled.parts} == set(Namespace)
    for src, dst in made.pairs:
        ledger = Ledger.open(
            compiled.parts, num_cached_tokens=src.cached, num_prompt_tokens=src.num_tokens, block_size=BLOCK_SIZE
        )
        for copies in parts_of(compiled.templates):
            if copies.is_state:
                assert ledger.owed(copies.part) == ((0, 1),)
                continue
            told = [
                owned
                for start, end in src.cuts(copies.part.namespace)
                for owned in copies.token_ranges(TokenChunk(src.block_ids, dst.block_ids, start, end, BLOCK_SIZE))
            ]
            whole = RangeSet.of(told)
            assert whole.total == sum(end - start for start, end in told)
            assert whole == RangeSet.of(ledger.owed(copies.part))
