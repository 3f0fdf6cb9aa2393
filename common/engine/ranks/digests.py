"""What a rank's caches of one sequence add up to: all that it holds, or what it owes to each destination rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from common.engine.transfer.peers import Peer
from common.layout.digest import DIGEST_MASK, CacheName, Held, Units, digest, show, units_held, units_sent
from common.layout.shape import CacheShape
from contracts.handoff import PartDigest
from contracts.manifest import RankManifest
from contracts.rank import BindSequence, CacheDigest, SequenceDigests

_Sums = Counter[tuple[CacheName, int]]


class Digester:
    """Reads one rank's region. It reads every byte that counts once: some GB a second."""

    def __init__(self, rank: int, manifest: RankManifest, shape: CacheShape, data: memoryview) -> None:
        self._rank: Final = rank
        self._shape: Final = shape
        self._data: Final = data
        self._held: Final = units_held(manifest, shape)

    def held(self, binding: BindSequence, start: int, end: int) -> tuple[CacheDigest, ...]:
        """Every cache that this rank has of a sequence, tokens `[start, end)`; the rank is the destination."""
        return self._sums(((self._rank, units) for units in self._held), binding, start, end)

    def sent(self, binding: BindSequence, peer: Peer, start: int, end: int) -> tuple[CacheDigest, ...]:
        """What this rank owes to each destination rank of a peer, or what those pull from it."""
        return self._sums(units_sent(peer.templates, self._shape), binding, start, end)

    def _sums(
        self, units: Iterable[tuple[int, Units]], binding: BindSequence, start: int, end: int
    ) -> tuple[CacheDigest, ...]:
        place = Held(
            block_ids=binding.block_ids, slot=binding.slot, start=start, end=end, block_size=self._shape.block_size
        )
        sums: _Sums = Counter()
        for destination_rank, each in units:
            sums[each.cache, destination_rank] += digest(each, self._data, place)
        return tuple(
            CacheDigest(
                namespace=cache[0],
                role=cache[1],
                layer=cache[2],
                destination_rank=destination_rank,
                value=value & DIGEST_MASK,
            )
            for (cache, destination_rank), value in sums.items()
        )


def add_up(answers: Iterable[SequenceDigests]) -> tuple[PartDigest, ...]:
    """The digests of several ranks as one: what they all say of a cache of a destination rank is added."""
    sums: _Sums = Counter()
    for answer in answers:
        for each in answer.digests:
            sums[(each.namespace, each.role, each.layer), each.destination_rank] += each.value
    return part_digests(sums)


def part_digests(sums: Mapping[tuple[CacheName, int], int]) -> tuple[PartDigest, ...]:
    """Sums as they travel, ordered by cache and destination rank."""
    return tuple(
        PartDigest(
            namespace=namespace,
            role=role,
            layer=layer,
            destination_rank=destination_rank,
            digest=show(value & DIGEST_MASK),
        )
        for ((namespace, role, layer), destination_rank), value in sorted(sums.items())
    )
