"""What the ranks of both sides say that a sequence's cache adds up to, on real engines."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from common.dataplane.port import DataPlane, Region
from common.engine.port import EngineError
from common.engine.ranks.group import RankGroup
from common.worker.core.verification import differences
from contracts.handoff import PartDigest
from contracts.rank import PeerSide, StartRank
from tests.integration.engine_world import binding, engine, starts, thread_launcher
from tests.integration.push_pair import Pair


async def _digests(pair: Pair, seq: int, length: int) -> tuple[tuple[PartDigest, ...], tuple[PartDigest, ...]]:
    return (
        await pair.prefill.digest(seq, PeerSide.SOURCE, 0, length),
        await pair.decode.digest(seq, PeerSide.DESTINATION, 0, length),
    )


@pytest.mark.parametrize("tps", [(1, 1), (4, 1), (1, 4), (2, 4), (4, 2)])
async def test_both_sides_agree_when_every_byte_has_arrived(
    reference: Any, tmp_path: Path, tps: tuple[int, int]
) -> None:
    """Two prompts that end inside of a block, in other blocks and slots, over other numbers of ranks."""
    prompts = [reference.prompts[2].token_ids, reference.prompts[3].token_ids]
    lengths = [len(prompt) for prompt in prompts]
    async with AsyncExitStack() as stack:
        pair = await Pair.make(stack, reference.folder, tmp_path, tps)
        for seq, length in enumerate(lengths):
            await pair.bind(seq, length)
        await pair.compute(prompts)
        await pair.collect(lengths)
        for seq, length in enumerate(lengths):
            sent, held = await _digests(pair, seq, length)
            assert sent == held
            assert len(sent) == len({(part.namespace, part.role, part.layer, part.dst_rank) for part in pair.parts})
        assert (await _digests(pair, 0, lengths[0]))[0] != (await _digests(pair, 1, lengths[1]))[0]
        shorter = await pair.decode.digest(0, PeerSide.DESTINATION, 16, lengths[0])
        assert differences(shorter, (await _digests(pair, 0, lengths[0]))[1])


async def test_one_wrong_byte_on_one_rank_is_named(reference: Any, tmp_path: Path) -> None:
    """A part that was left out shows as one difference: its cache, on its rank."""
    prompt = reference.prompts[2].token_ids
    async with AsyncExitStack() as stack:
        pair = await Pair.make(
            stack, reference.folder, tmp_path, (2, 2), failpoints="zero:role=ssm,layer=0,destination=1"
        )
        await pair.bind(0, len(prompt))
        await pair.compute([prompt])
        await pair.collect([len(prompt)])
        sent, held = await _digests(pair, 0, len(prompt))
        found = differences(sent, held)
        assert len(found) == 1
        assert found[0].startswith("target ssm of layer 0 on rank 1 is ")


async def test_a_flipped_bit_changes_one_digest(reference: Any, tmp_path: Path) -> None:
    """In the destination's own memory, after everything has arrived: it is seen, and only there."""
    prompt = reference.prompts[2].token_ids
    regions: list[Region] = []

    class Watched:
        """Remembers what is allocated."""

        def __init__(self, inner: DataPlane) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def allocate(self, nbytes: int, num_cells: int) -> Region:
            """As the inner one."""
            regions.append(self._inner.allocate(nbytes, num_cells))
            return regions[-1]

    def watch(_: StartRank, plane: DataPlane) -> DataPlane:
        return Watched(plane)

    async with AsyncExitStack() as stack:
        group: RankGroup
        group, info = await stack.enter_async_context(
            engine(starts(reference.folder, tmp_path, 1), thread_launcher(1, watch=watch))
        )
        await group.bind(binding(0, len(prompt)))
        before = await group.digest(0, PeerSide.DESTINATION, 0, len(prompt))
        span = info.ranks[0].manifest.spans[0]
        regions[0].data[span.place.offset] ^= 1
        after = await group.digest(0, PeerSide.DESTINATION, 0, len(prompt))
        assert len(differences(before, after)) == 1


async def test_what_cannot_be_digested_is_refused(reference: Any, tmp_path: Path) -> None:
    """An unknown sequence, tokens beyond its blocks, and the source's side of a sequence that is pushed nowhere."""
    async with engine(starts(reference.folder, tmp_path, 1), thread_launcher(1)) as (group, _):
        with pytest.raises(EngineError, match="seq: 7 is not allowed"):
            await group.digest(7, PeerSide.DESTINATION, 0, 1)
        await group.bind(binding(0, 20))
        with pytest.raises(EngineError, match="within the sequence's blocks"):
            await group.digest(0, PeerSide.DESTINATION, 0, 28 * 16 + 1)
        with pytest.raises(EngineError, match="without a push target"):
            await group.digest(0, PeerSide.SOURCE, 0, 20)
