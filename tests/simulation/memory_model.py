"""The memory of one simulated engine: who owns each block and slot, what its header cells say, and what really lies there."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from common.layout.context_parallel import held_range
from common.layout.planner import ReshardPlan
from contracts.handoff import Grant
from contracts.manifest import Namespace, PlannedPart
from contracts.rank import BindSequence, Extension


@dataclass(slots=True)
class Content:
    """What was last written into a block or slot: by whom, and which tokens of which part. Bits are tokens of the block."""

    handoff_id: str
    generation: int
    bits: dict[PlannedPart, int] = field(default_factory=dict)


@dataclass(slots=True)
class Owner:
    """A bound sequence. One that is `over` has been released, and is in quarantine."""

    binding: BindSequence
    blocks: list[int]
    over: bool = False
    started: bool = False
    locks: int = 0

    @property
    def generation(self) -> int:
        """What its header cells hold."""
        return self.binding.generation


class ModelMemory:
    """Blocks, slots and cells, which are the same on every rank: grants go to all of them in lockstep."""

    def __init__(self, name: str, block_size: int) -> None:
        self.name = name
        self.is_gone = False
        self._block_size = block_size
        self._owners: dict[int, Owner] = {}
        self._block_owner: dict[int, Owner] = {}
        self._slot_owner: dict[int, Owner] = {}
        self._blocks: dict[int, Content] = {}
        self._slots: dict[int, Content] = {}

    def owner(self, seq: int) -> Owner | None:
        """Who is bound under this number."""
        return self._owners.get(seq)

    def take(self, binding: BindSequence) -> str:
        """Give a sequence its blocks and slot. Returns what is wrong with that; "" when nothing is."""
        owner = Owner(binding, list(binding.block_ids))
        problems = [f"block {block}" for block in binding.block_ids if block in self._block_owner]
        if binding.slot in self._slot_owner:
            problems.append(f"slot {binding.slot}")
        self._owners[binding.seq] = owner
        self._block_owner.update(dict.fromkeys(owner.blocks, owner))
        self._slot_owner[binding.slot] = owner
        return f"{self.name}: {', '.join(problems)} given to {binding.handoff_id} have an owner" if problems else ""

    def add(self, extension: Extension) -> str:
        """Give a bound sequence more blocks. Returns what is wrong with that."""
        problems = [f"block {block}" for block in extension.block_ids if block in self._block_owner]
        owner = self._owners.get(extension.seq)
        if owner is None:
            return f"{self.name}: blocks {extension.block_ids} added to sequence {extension.seq}, which owns nothing"
        owner.blocks += extension.block_ids
        self._block_owner.update(dict.fromkeys(extension.block_ids, owner))
        whose = owner.binding.handoff_id
        return f"{self.name}: {', '.join(problems)} added to {whose} have an owner" if problems else ""

    def give_back(self, seq: int) -> None:
        """End an ownership."""
        owner = self._owners.pop(seq, None)
        if owner is None:
            return
        for block in owner.blocks:
            if self._block_owner.get(block) is owner:
                del self._block_owner[block]
        if self._slot_owner.get(owner.binding.slot) is owner:
            del self._slot_owner[owner.binding.slot]

    @property
    def num_owned(self) -> int:
        """Sequences that own something."""
        return len(self._owners)

    def granted(self, grant: Grant) -> Owner | None:
        """Whose cells still hold the generation of a grant; None when it has been taken back."""
        owner = self._slot_owner.get(grant.slot)
        if owner is None or owner.generation != grant.generation or owner.over:
            return None
        return owner

    def write(self, grant: Grant, handoff_id: str, part: PlannedPart, start: int, end: int) -> str:
        """Bytes land. Returns what is wrong with that: whoever owns the memory must be whom the grant was given to.

        Tokens are counted by those that the part's destination keeps: a block id is the same on all ranks, their content is not.
        """
        part = _named(part)
        if not part.role.is_paged:
            owner = self._slot_owner.get(grant.slot)
            content = self._slots.get(grant.slot)
            if content is None or content.generation != grant.generation:
                content = self._slots[grant.slot] = Content(handoff_id, grant.generation)
            content.bits[part] = 1
            if owner is not None and owner.started:
                return f"{self.name}: {handoff_id} wrote {part.role} into slot {grant.slot}, which is in use"
            return self._outside(owner, grant, handoff_id, f"slot {grant.slot}")
        size = self._block_size
        for index in range(start // size, -(-end // size)):
            if index >= len(grant.block_ids):
                return f"{self.name}: {handoff_id} wrote into block {index} of a grant of {len(grant.block_ids)}"
            block = grant.block_ids[index]
            content = self._blocks.get(block)
            if content is None or content.generation != grant.generation:
                content = self._blocks[block] = Content(handoff_id, grant.generation)
            first, last = max(start - index * size, 0), min(end - index * size, size)
            content.bits[part] = content.bits.get(part, 0) | ((1 << last) - (1 << first))
            problem = self._outside(self._block_owner.get(block), grant, handoff_id, f"block {block}")
            if problem:
                return problem
        return ""

    def missing(self, owner: Owner, plan: ReshardPlan, num_cached_tokens: int) -> str:
        """The first planned part that does not lie where it belongs, in full; "" when all of them do."""
        binding, size = owner.binding, self._block_size
        for part in plan.parts:
            name = _named(part)
            if not part.role.is_paged:
                content = self._slots.get(binding.slot)
                if content is None or content.generation != binding.generation or name not in content.bits:
                    return f"{part.role} of layer {part.layer} from rank {part.src_rank} to {part.dst_rank}"
                continue
            first_token = max(num_cached_tokens, part.namespace is Namespace.DRAFT)
            share = part.modulus, part.residue
            for start, end in held_range(first_token, binding.num_prompt_tokens, size, *share):
                for index in range(start // size, -(-end // size)):
                    content = self._blocks.get(owner.blocks[index])
                    first, last = max(start - index * size, 0), min(end - index * size, size)
                    wanted = (1 << last) - (1 << first)
                    if (
                        content is None
                        or content.generation != binding.generation
                        or content.bits.get(name, 0) & wanted != wanted
                    ):
                        return f"{part.role} of block {index} from rank {part.src_rank} to {part.dst_rank}"
        return ""

    def _outside(self, owner: Owner | None, grant: Grant, handoff_id: str, where: str) -> str:
        if owner is None:
            return f"{self.name}: {handoff_id} wrote into {where}, which was given back"
        if owner.generation != grant.generation:
            return f"{self.name}: {handoff_id} wrote into {where} of {owner.binding.handoff_id}"
        return ""


def _named(part: PlannedPart) -> PlannedPart:
    """The part without its share of the blocks, of which those who write say nothing."""
    return msgspec.structs.replace(part, modulus=1, residue=0)
