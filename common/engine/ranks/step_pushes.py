"""What a step makes ready for decode workers: KV as each layer has it, states at the prompt's end, and the draft's share behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.engine.drafts.handoff import BOOTSTRAP, DRAFT_LAYER, DraftHandoff
from common.engine.model.mtp_head import FIRST_KEY
from common.engine.ranks.bound_sequence import BoundSequence
from common.engine.transfer.peers import Peer
from common.engine.transfer.push_task import PushTask
from common.layout.bind import TokenChunk
from contracts.handoff import Grant
from contracts.manifest import Namespace, Role
from contracts.rank import BindSequence, StepItem

_PAGED = (Role.KEY, Role.VALUE)
_STATES = (Role.CONV, Role.SSM)


@dataclass(frozen=True, kw_only=True)
class StepPush:
    """What a sequence has to push in a step: KV of the tokens of `chunk` of each full layer, and the states at the end.

    Of the tokens of `draft_chunk` the draft's KV is complete once the drafter has taken in the step. Roles in `pulled` stay.
    """

    binding: BindSequence
    peer: Peer
    grant: Grant
    chunk: TokenChunk
    draft_chunk: TokenChunk
    states: bool
    pulled: tuple[Role, ...] = ()

    def of_layer(self, layer: int, now_ns: int, *, paged: bool) -> Iterator[PushTask]:
        """What layer `layer` of the model has ready. A full layer is `paged`."""
        if paged:
            if self.chunk.start < self.chunk.end:
                yield from self._tasks(Namespace.TARGET, _PAGED, layer, self.chunk, now_ns)
        elif self.states:
            yield from self._tasks(Namespace.TARGET, _STATES, layer, None, now_ns)

    def of_draft(self, handoff: DraftHandoff, now_ns: int) -> Iterator[PushTask]:
        """What the draft head has ready once it has taken in the step: pairs, and behind the last one the state that it goes on from."""
        if self.draft_chunk.start < self.draft_chunk.end:
            yield from self._tasks(Namespace.DRAFT, _PAGED, DRAFT_LAYER, self.draft_chunk, now_ns)
        if self.states:
            handoff.leave(self.binding)
            namespace, role, layer = BOOTSTRAP
            yield from self._tasks(namespace, (role,), layer, None, now_ns)

    def _tasks(
        self, namespace: Namespace, roles: Sequence[Role], layer: int, chunk: TokenChunk | None, now_ns: int
    ) -> Iterator[PushTask]:
        for role in roles:
            if role not in self.pulled:
                yield PushTask(
                    seq=self.binding.seq,
                    handoff_id=self.binding.handoff_id,
                    peer=self.peer,
                    grant=self.grant,
                    namespace=namespace,
                    role=role,
                    layer=layer,
                    chunk=chunk,
                    slot=self.binding.slot,
                    queued_ns=now_ns,
                )


def push_of(item: StepItem, sequence: BoundSequence, block_size: int) -> StepPush | None:
    """What becomes ready with this step: full blocks, or everything when the prompt ends. Each token is pushed once."""
    binding = sequence.binding
    if sequence.peer is None or binding.push is None:
        return None
    end = min(item.start + item.num_tokens, binding.num_prompt_tokens)
    if not item.last_chunk:
        end -= end % block_size
    start = sequence.pushed_end
    end = max(end, start)
    if end == start and not item.last_chunk:
        return None
    grant = binding.push.grant
    chunk = draft_chunk = TokenChunk(binding.block_ids, grant.block_ids, start, end, block_size)
    if start < FIRST_KEY:
        draft_chunk = TokenChunk(binding.block_ids, grant.block_ids, FIRST_KEY, max(end, FIRST_KEY), block_size)
    return StepPush(
        binding=binding,
        peer=sequence.peer,
        grant=grant,
        chunk=chunk,
        draft_chunk=draft_chunk,
        states=item.last_chunk,
        pulled=binding.push.pulled,
    )
