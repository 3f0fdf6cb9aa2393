"""What the ranks that share blocks say to each other in a layer: queries of all heads, then each rank's own answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from common.engine.collectives.threads import ThreadCollectives, ThreadGroup
from common.engine.model.context_group import split_context
from common.engine.model.partial import NaturalLse, Partial
from contracts.errors import InvalidValueError

ROWS, HEADS, DIM = 3, 2, 4


def on_all(size: int, run: Callable[[ThreadCollectives], Any]) -> list[Any]:
    """What `run` returns on each rank of a group of threads."""
    group = ThreadGroup(size, timeout_s=20)
    answers: list[Any] = [None] * size

    def work(rank: int) -> None:
        answers[rank] = run(group.join(rank))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return answers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_are_gathered_from_neighbours_in_rank_order(dtype: torch.dtype) -> None:
    """Of four ranks with groups of two, ranks 0 and 1 get each other's heads, and so do 2 and 3, in the model's own dtype."""

    def gather(collectives: ThreadCollectives) -> torch.Tensor:
        context = split_context(collectives, 2)
        assert context is not None
        rows = torch.arange(ROWS * HEADS * DIM, dtype=torch.float32).view(HEADS, ROWS, DIM).transpose(0, 1)
        return context.gather_queries((rows + 50 * collectives.rank).to(dtype))

    answers = on_all(4, gather)
    for rank, answer in enumerate(answers):
        assert (answer.shape, answer.dtype) == ((ROWS, 2 * HEADS, DIM), dtype)
        first = rank - rank % 2
        for head in range(2 * HEADS):
            owner, local = first + head // HEADS, head % HEADS
            for row in range(ROWS):
                assert answer[row, head].tolist() == [
                    50 * owner + local * ROWS * DIM + row * DIM + i for i in range(DIM)
                ]


def test_each_rank_gets_the_answers_to_its_own_queries() -> None:
    """Rank r merges what all shards found for its heads; a shard that saw nothing does not count."""

    def merge(collectives: ThreadCollectives) -> Partial:
        context = split_context(collectives, 4)
        assert context is not None
        # Shard s says 10 * head + s with weight 1 (LSE 0); shard 3 has no key.
        heads = torch.arange(4 * HEADS, dtype=torch.float32) * 10 + collectives.rank
        output = heads[None, :, None].expand(ROWS, -1, DIM).contiguous()
        lse = torch.zeros(ROWS, 4 * HEADS)
        partial = Partial(output, NaturalLse(lse))
        if collectives.rank == 3:
            partial = Partial(output * torch.nan, NaturalLse(lse - torch.inf))
        return context.merge_own(partial)

    for rank, merged in enumerate(on_all(4, merge)):
        assert merged.output.shape == (ROWS, HEADS, DIM)
        wanted = [10 * (rank * HEADS + head) + 1 for head in range(HEADS)]  # the mean of shards 0, 1 and 2
        assert torch.allclose(merged.output, torch.tensor(wanted, dtype=torch.float32)[None, :, None])
        assert torch.allclose(merged.lse.values, torch.tensor(3.0).log())


@pytest.mark.parametrize("lse", [torch.nan, torch.inf])
def test_a_shard_whose_keys_are_broken_is_not_taken_for_one_without_keys(lse: float) -> None:
    """The rows that it answered become NaN, and no others: leaving the shard out would be a wrong answer that nobody sees."""

    def merge(collectives: ThreadCollectives) -> Partial:
        context = split_context(collectives, 2)
        assert context is not None
        found = torch.zeros(ROWS, 2 * HEADS)
        if collectives.rank == 1:
            found[1] = lse
        return context.merge_own(Partial(torch.ones(ROWS, 2 * HEADS, DIM), NaturalLse(found)))

    for merged in on_all(2, merge):
        assert bool(merged.output[1].isnan().all())
        assert bool(merged.lse.values[1].isnan().all())
        assert bool((merged.output[[0, 2]] == 1).all())


def test_groups_of_one_need_no_group() -> None:
    """Without context parallelism nothing is split."""
    assert split_context(None, 1) is None
    assert split_context(ThreadGroup(2, timeout_s=1).join(0), 1) is None


def test_a_group_that_does_not_divide_the_ranks_is_refused() -> None:
    """Three of four ranks cannot be a group: some rank would be in none, or in a smaller one."""

    def split(collectives: ThreadCollectives) -> str:
        with pytest.raises(InvalidValueError) as caught:
            split_context(collectives, 3)
        return caught.value.field

    assert on_all(4, split) == ["groups"] * 4
