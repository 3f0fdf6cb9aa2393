"""What every collectives adapter promises of a group of 1 to 4 ranks that works."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from common.engine.collectives.port import Collectives
from contracts.errors import InvalidValueError
from tests.contract.collectives_ranks import ADAPTERS, Ranks


@pytest.fixture(
    scope="module",
    params=[(adapter, size) for adapter in ADAPTERS for size in (1, 2, 3, 4)],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """A group that works: shared by the tests that leave it so."""
    running = Ranks(*request.param)
    yield running
    running.close()


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A rank's tensor: distinct in every rank, and so scaled that the order of additions shows in the bits."""
    generator = torch.Generator().manual_seed(1000 + rank)
    scaled = torch.randn(shape, generator=generator) * 10.0 ** (3 * rank)
    return scaled.to(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes, for exact comparison between processes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


SHAPES = ((5,), (3, 7), (2, 3, 4), (0, 4), (3, 1000), (2050,))
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def sum_everything(group: Collectives) -> list[bytes]:
    """All-reduce each shape (the last two are several chunks) in each dtype."""
    sums = []
    for dtype in DTYPES:
        for shape in SHAPES:
            tensor = values(group.rank, shape, dtype)
            group.all_reduce_sum(tensor)
            sums.append(raw(tensor))
    return sums


def test_sum_is_right_and_the_same_bits_on_every_rank(ranks: Ranks) -> None:
    """Sums are close to the exact sum (int64: equal), and all ranks hold identical bits."""
    answers = ranks(sum_everything)
    for answer in answers[1:]:
        assert answer == answers[0]
    position = 0
    for dtype in DTYPES:
        for shape in SHAPES:
            parts = [values(rank, shape, dtype) for rank in range(ranks.size)]
            actual = torch.frombuffer(bytearray(answers[0][position] or b"\0" * 8), dtype=dtype)[
                : parts[0].numel()
            ].view(shape)
            wide = torch.int64 if dtype == torch.int64 else torch.float64
            exact = torch.stack([part.to(wide) for part in parts]).sum(0)
            scale = torch.stack([part.to(torch.float64).abs() for part in parts]).sum(0) if parts[0].numel() else exact
            error = (actual.to(torch.float64) - exact.to(torch.float64)).abs()
            bound = {torch.float32: 2e-7, torch.bfloat16: 2**-7, torch.int64: 0.0}[dtype] * ranks.size
            assert bool((error <= scale * bound).all()), (dtype, shape)
            position += 1


def sum_of_a_transposed_tensor(group: Collectives) -> bytes:
    """All-reduce in place through a view that is not contiguous."""
    base = torch.arange(12, dtype=torch.int64).view(3, 4) + group.rank
    group.all_reduce_sum(base.t())
    return raw(base)


def test_sum_in_place_of_a_non_contiguous_tensor(ranks: Ranks) -> None:
    """The caller's own memory changes, whatever its strides."""
    size = ranks.size
    expected = torch.arange(12, dtype=torch.int64).view(3, 4) * size + sum(range(size))
    assert ranks(sum_of_a_transposed_tensor) == [raw(expected)] * size


def gather_everything(group: Collectives) -> list[tuple[tuple[int, ...], bytes]]:
    """All-gather along the first and the last dimension."""
    gathered = []
    for shape in SHAPES:
        for dim in (0, -1):
            tensor = group.all_gather(values(group.rank, shape, torch.float32), dim)
            gathered.append((tuple(tensor.shape), raw(tensor)))
    return gathered


def test_all_gather_concatenates_in_rank_order(ranks: Ranks) -> None:
    """Every rank gets `torch.cat` of the ranks' tensors, and later collectives do not change it."""
    expected = []
    for shape in SHAPES:
        for dim in (0, -1):
            whole = torch.cat([values(rank, shape, torch.float32) for rank in range(ranks.size)], dim)
            expected.append((tuple(whole.shape), raw(whole)))
    assert ranks(gather_everything) == [expected] * ranks.size


def gather_to_every_root(group: Collectives) -> list[bytes | None]:
    """Gather to each rank in turn."""
    results = []
    for root in range(group.size):
        for shape in ((2, 5), (3, 1000)):
            tensor = group.gather_to(root, values(group.rank, shape, torch.bfloat16))
            results.append(None if tensor is None else raw(tensor))
    return results


def test_gather_reaches_the_root_alone(ranks: Ranks) -> None:
    """The root gets the concatenation, the others None."""
    answers = ranks(gather_to_every_root)
    for rank, answer in enumerate(answers):
        expected: list[bytes | None] = []
        for root in range(ranks.size):
            for shape in ((2, 5), (3, 1000)):
                whole = torch.cat([values(member, shape, torch.bfloat16) for member in range(ranks.size)], -1)
                expected.append(raw(whole) if root == rank else None)
        assert answer == expected


def broadcast_from_every_root(group: Collectives) -> list[bytes]:
    """Broadcast from each rank in turn, in one chunk and in several, and into a view."""
    results = []
    for root in range(group.size):
        for shape in ((4,), (3, 1000)):
            tensor = values(group.rank, shape, torch.float32)
            group.broadcast(root, tensor)
            results.append(raw(tensor))
        view = values(group.rank, (3, 4), torch.float32)
        group.broadcast(root, view.t())
        results.append(raw(view))
    return results


def test_broadcast_gives_all_ranks_the_roots_tensor(ranks: Ranks) -> None:
    """After a broadcast every rank holds the root's bytes."""
    expected = [
        raw(values(root, shape, torch.float32)) for root in range(ranks.size) for shape in ((4,), (3, 1000), (3, 4))
    ]
    assert ranks(broadcast_from_every_root) == [expected] * ranks.size


def exchange_everything(group: Collectives) -> list[bytes]:
    """Exchange rows of each shape in each dtype, contiguous and not; the long ones go in pieces."""
    results = []
    for dtype in DTYPES:
        for shape in SHAPES:
            results.append(raw(group.exchange(values(group.rank, (group.size, *shape), dtype))))
            across = values(group.rank, (*shape, group.size), dtype).movedim(-1, 0)
            results.append(raw(group.exchange(across)))
    return results


def test_an_exchange_gives_each_rank_its_row(ranks: Ranks) -> None:
    """Rank r gets row r of every rank's tensor, in rank order, and later collectives do not change it."""
    size = ranks.size
    for rank, answer in enumerate(ranks(exchange_everything)):
        expected = []
        for dtype in DTYPES:
            for shape in SHAPES:
                mine = [values(member, (size, *shape), dtype)[rank] for member in range(size)]
                expected.append(raw(torch.stack(mine)))
                mine = [values(member, (*shape, size), dtype)[..., rank] for member in range(size)]
                expected.append(raw(torch.stack(mine)))
        assert answer == expected


def exchange_in_pairs(group: Collectives) -> tuple[list[int], list[int]]:
    """Exchange in sub-groups of two ranks, beside the whole group."""
    pairs = [list(range(first, min(first + 2, group.size))) for first in range(0, group.size, 2)]
    pair = group.split(pairs)
    near = pair.exchange(torch.arange(pair.size) + 10 * group.rank)
    far = group.exchange(torch.arange(group.size) + 10 * group.rank)
    return near.tolist(), far.tolist()


def test_an_exchange_in_a_sub_group_stays_there(ranks: Ranks) -> None:
    """Rows go by the number in the sub-group; the whole group exchanges beside it."""
    for rank, (near, far) in enumerate(ranks(exchange_in_pairs)):
        first = rank - rank % 2
        assert near == [10 * member + rank % 2 for member in range(first, min(first + 2, ranks.size))]
        assert far == [10 * member + rank for member in range(ranks.size)]


def count_with_barriers(group: Collectives) -> list[int]:
    """Many meetings in a row, to wrap the slots' double buffer many times."""
    seen = []
    for step in range(50):
        group.barrier()
        tensor = torch.tensor([step + group.rank])
        group.all_reduce_sum(tensor)
        seen.append(int(tensor))
    return seen


def test_many_collectives_in_a_row_do_not_mix(ranks: Ranks) -> None:
    """Fast and slow ranks never read a slot of another generation."""
    size = ranks.size
    assert ranks(count_with_barriers) == [[step * size + sum(range(size)) for step in range(50)]] * size


def sum_in_halves(group: Collectives) -> tuple[int, int, list[float], list[float]]:
    """Split into the even ranks and the odd ranks (in falling order), and sum in both groups, interleaved."""
    groups = [list(range(0, group.size, 2)), list(range(1, group.size, 2))[::-1]]
    half = group.split([members for members in groups if members])
    tensor = torch.tensor([float(group.rank), 1.0])
    half.all_reduce_sum(tensor)
    whole = torch.tensor([1.0])
    group.all_reduce_sum(whole)
    order = half.all_gather(torch.tensor([float(group.rank)]))
    return half.rank, half.size, [*tensor.tolist(), *whole.tolist()], order.tolist()


def test_sub_groups_work_beside_the_whole_group(ranks: Ranks) -> None:
    """A sub-group numbers its ranks by position in its list; its collectives involve nobody else."""
    for rank, answer in enumerate(ranks(sum_in_halves)):
        members = [list(range(0, ranks.size, 2)), list(range(1, ranks.size, 2))[::-1]][rank % 2]
        sums = [float(sum(members)), float(len(members)), float(ranks.size)]
        assert answer == (members.index(rank), len(members), sums, [float(member) for member in members])


def talk_in_both_modes(group: Collectives) -> list[list[float]]:
    """Every collective on tensors of a size, in inference mode and outside of it: once this one is first, once that one."""
    found = []
    for size, modes in ((13 * group.size, (True, False)), (17 * group.size, (False, True)), (0, (True, False))):
        for mode in modes:
            with torch.inference_mode(mode):
                mine = torch.full((size,), float(group.rank + 1))
                found.append(
                    [*group.all_gather(mine).tolist(), *group.exchange(mine.view(group.size, -1))[:, :1].tolist()]
                )
                group.broadcast(0, mine)
                group.all_reduce_sum(mine)
                found.append(mine.tolist())
    return found


def test_inference_mode_is_the_callers_own_affair(ranks: Ranks) -> None:
    """What a call in inference mode leaves behind does not get into the way of one outside of it, nor the other way round."""
    for answer in ranks(talk_in_both_modes):
        for first, second in (answer[0:4:2], answer[1:4:2], answer[4:8:2], answer[5:8:2]):
            assert first == second
            assert first
        assert answer[1] == [float(ranks.size)] * 13 * ranks.size


def refuse_bad_calls(group: Collectives) -> list[str]:
    """Calls that break a rule, on every rank alike; the group must still work afterwards."""
    refused = []
    attempts: list[Callable[[], object]] = [
        lambda: group.all_reduce_sum(torch.zeros(2, dtype=torch.float64)),
        lambda: group.all_gather(torch.zeros(2, 3, 4), 1),
        lambda: group.all_gather(torch.tensor(1.0)),
        lambda: group.exchange(torch.zeros(group.size, dtype=torch.float64)),
        lambda: group.exchange(torch.zeros(group.size + 1, 2)),
        lambda: group.exchange(torch.tensor(1.0)),
        lambda: group.broadcast(group.size, torch.zeros(2)),
        lambda: group.gather_to(-1, torch.zeros(2)),
        lambda: group.split([[0], [0]]),
    ]
    for attempt in attempts:
        try:
            attempt()
        except InvalidValueError as error:
            refused.append(error.field)
    group.barrier()
    return refused


def test_bad_arguments_are_refused_by_name(ranks: Ranks) -> None:
    """A wrong dtype, dimension, root or partition is an error that names it, raised before anybody is waited for."""
    assert (
        ranks(refuse_bad_calls)
        == [["tensor", "dim", "dim", "tensor", "tensor", "tensor", "root", "root", "groups"]] * ranks.size
    )
