"""`loadtest dcp`: what it measures is the engine's own, what it says of it is arithmetic, and what is wrong is found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from common.engine.collectives.group_memory import GroupMemory
from common.engine.collectives.passed_fd import PassedFd
from contracts.errors import InvalidValueError, PdmeshError
from loadtest.arguments import parser
from loadtest.client import Sample
from loadtest.dcp import Bench, group_sizes
from loadtest.dcp_collectives import SimulatedCollectives, Stopwatch, TimedCollectives
from loadtest.dcp_figures import (
    CacheBytes,
    StepFigures,
    crossovers,
    line_of,
    report_memory,
    report_steps,
    step_figures,
)
from loadtest.dcp_meshes import MeshFigures, is_refusal, report_meshes
from loadtest.dcp_rank import StepRank, cache_bytes
from loadtest.dcp_settings import DcpSettings
from loadtest.dcp_shape import attention_bytes, blocks_for
from loadtest.dcp_times import RankPlace, ReadTime, StepTime
from loadtest.figures import ByteFigures
from loadtest.report import EXIT_FAILED, EXIT_GOOD, Machine, Report
from loadtest.statistics import Spread

MS = 1_000_000
LONGEST = 90
SIZES = (1, 2)


def _report() -> Report:
    return Report("dcp", {}, Machine(num_cores=2, load_average=0.5, processor="x", python="3.11"))


def _squeezed(report: Report) -> str:
    """The text of a report with one blank between words."""
    return "\n".join(" ".join(line.split()) for line in report.text().splitlines())


def _settings(*argv: str) -> DcpSettings:
    values = vars(parser().parse_args(["dcp", *argv]))
    del values["command"], values["json"]
    return DcpSettings(**{**values, "overrides": tuple(values["overrides"])})


class ThreadRank:
    """A `Process` that is a thread, with a rank in it."""

    def __init__(self, rank: StepRank) -> None:
        self.rank = rank
        self._thread = ThreadPoolExecutor(1)
        self._answer: Future[Any] | None = None

    def tell(self, what: str, *arguments: Any) -> None:
        """See `Process.tell`."""
        self._answer = self._thread.submit(getattr(self.rank, what), *arguments)

    def hear(self) -> Any:
        """See `Process.hear`."""
        assert self._answer is not None
        return self._answer.result(60)

    def ask(self, what: str, *arguments: Any) -> Any:
        """See `Process.ask`."""
        self.tell(what, *arguments)
        return self.hear()

    def close(self) -> None:
        """End the thread, and leave the group."""
        self._thread.shutdown()
        self.rank.close()


@pytest.fixture
def ranks() -> Iterator[list[ThreadRank]]:
    """Two ranks that share a KV head's blocks, or do not."""
    memory = GroupMemory.create(2, num_splits=2)
    passed = PassedFd(memory.fileno())
    found = [ThreadRank(StepRank(RankPlace(rank=rank, tp=2), passed, SIZES, LONGEST)) for rank in range(2)]
    yield found
    for each in found:
        each.close()
    memory.close()


def test_groups_compute_what_ranks_compute_alone(ranks: list[ThreadRank]) -> None:
    """The same sequence lies in both caches, however it is cut, and the logits agree."""
    report = _report()
    bench = Bench(ranks, 2, SIZES, is_simulated=False)
    for num_tokens in (1, 16, LONGEST):
        bench.check(num_tokens, report)
    assert report.status == EXIT_GOOD, report.text()


def test_a_wrong_shard_is_found(ranks: list[ThreadRank]) -> None:
    """One rank's share of the keys is another's: the run fails, and says where."""
    model = ranks[1].rank.sharded(2)
    for cache in model.caches.key.values():
        cache.neg_()
    report = _report()
    Bench(ranks, 2, SIZES, is_simulated=False).check(LONGEST, report)
    assert report.status == EXIT_FAILED
    assert f"FAILED: 2 ranks, dcp 2, {LONGEST} tokens: logits are off by" in report.text()


def test_every_size_of_groups_is_measured_in_turns(ranks: list[ThreadRank]) -> None:
    """As many steps as asked for in each round, with the collectives that a step has: four more in two layers with groups."""
    settings = _settings("--contexts", "64", "--steps", "2", "--rounds", "3")
    alone, shared = Bench(ranks, 2, SIZES, is_simulated=False).measure(64, settings)
    assert [(each.dcp, each.step_ms.count, each.num_collectives) for each in (alone, shared)] == [
        (1, 6, 18),
        (2, 6, 22),
    ]
    assert 0 < shared.collective_share < 1
    assert alone.num_bytes == 2 * 2 * 65 * 256 * 4
    assert shared.num_bytes == 2 * 2 * 33 * 256 * 4, "of 65 tokens the first rank holds two blocks and the last token"
    assert min(alone.attention_gb_per_s, alone.read_gb_per_s, shared.ratio) > 0


def test_a_rank_whose_peers_are_simulated_makes_the_same_calls() -> None:
    """It needs nobody, and its steps have as many collectives."""
    rank = StepRank(RankPlace(rank=0, tp=4, meeting_ns=10), None, (1, 4), 64)
    assert [rank.steps(dcp, 64, 1)[0].num_collectives for dcp in (1, 4)] == [18, 22]
    assert rank.logits(4, 64) is not None
    rank.close()


@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_bytes_to_read_are_those_of_the_tokens_that_a_rank_holds(dcp: int) -> None:
    """Counted token by token, keys and values of both layers with full attention."""
    for rank in range(4):
        held = sum(token // 16 % dcp == rank % dcp for token in range(1001))
        assert attention_bytes(1000, dcp=dcp, rank=rank) == held * 2 * 2 * 256 * 4


def test_cache_tensors_are_counted_as_they_are_allocated() -> None:
    """Keys and values by the block, states by the slot, of one of so many ranks."""
    assert cache_bytes(1, 10, 3) == (10 * 2 * 2 * 16 * 256 * 4, 3 * 6 * (3 * 3 * 512 * 4 + 8 * 64 * 64 * 4))
    assert cache_bytes(4, 10, 3)[0] == 10 * 2 * 2 * 16 * 256 * 4
    assert cache_bytes(4, 10, 3)[1] * 4 == cache_bytes(1, 10, 3)[1]
    assert (blocks_for(65, 1), blocks_for(65, 2), blocks_for(65, 4)) == (5, 3, 2)


def test_simulated_ranks_bring_zeros() -> None:
    """Shapes are those of a real group, and the time is at least that of a meeting."""
    clock_ns = iter(range(0, 10_000, 10))
    group = SimulatedCollectives(4, 25, lambda: next(clock_ns))
    tensor = torch.arange(4.0)
    group.all_reduce_sum(tensor)
    assert tensor.tolist() == [0, 1, 2, 3]
    assert next(clock_ns) >= 25
    assert group.all_gather(tensor).tolist() == [0, 1, 2, 3, *[0] * 12]
    gathered = group.gather_to(0, tensor[None], 0)
    assert gathered is not None
    assert gathered.shape == (4, 4)
    assert group.gather_to(1, tensor) is None
    assert group.exchange(torch.ones(4, 2)).tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]
    assert group.split([[0, 2], [1, 3]]).size == 2
    group.broadcast(1, tensor)
    assert not tensor.any()


def test_time_in_collectives_is_added_up_over_groups() -> None:
    """What a sub-group does counts as well; a barrier is no part of a step."""
    now_ns = iter(range(0, 1000, 10))
    cpu_ns = iter(range(0, 1000, 3))
    watch = Stopwatch(lambda: next(now_ns), lambda: next(cpu_ns))
    group = TimedCollectives(SimulatedCollectives(2, 0, lambda: 0), watch)
    tensor = torch.ones(2, 2)
    group.all_reduce_sum(tensor)
    group.split([[0, 1]]).exchange(tensor)
    group.all_gather(tensor)
    group.gather_to(0, tensor)
    group.broadcast(0, tensor)
    group.barrier()
    assert (watch.num_calls, watch.spent_ns, watch.spent_cpu_ns) == (5, 50, 15)


def test_the_slowest_rank_makes_the_step() -> None:
    """Steps of the ranks belong together by their order; shares and rates are over all ranks."""
    steps = [[_step(4, 1, cpu_ms=3)] * 2, [_step(2, 1, cpu_ms=2), _step(6, 3, cpu_ms=5)]]
    reads = [[ReadTime(attention_cpu_ns=200, read_cpu_ns=100, num_bytes=400)]]
    reads.append([ReadTime(attention_cpu_ns=50, read_cpu_ns=25, num_bytes=100)])
    found = step_figures(2, 2, 64, steps, reads, is_simulated=False)
    assert (found.step_ms.low, found.step_ms.high) == (4, 6)
    assert (found.cpu_ms.low, found.cpu_ms.high) == (3, 5)
    assert (found.collective_share, found.collective_cpu_share) == (6 / 16, 4 / 13)
    assert (found.num_bytes, found.attention_gb_per_s, found.read_gb_per_s, found.ratio) == (400, 2, 4, 0.5)
    with pytest.raises(PdmeshError, match="no step"):
        step_figures(2, 2, 64, [[], []], reads, is_simulated=False)


def _step(step_ms: int, collective_ms: int, *, cpu_ms: int) -> StepTime:
    return StepTime(
        step_ns=step_ms * MS,
        step_cpu_ns=cpu_ms * MS,
        collective_ns=collective_ms * MS,
        collective_cpu_ns=MS,
        num_collectives=3,
    )


def _figures(dcp: int, num_tokens: int, step_ms: float, cpu_ms: float) -> StepFigures:
    return StepFigures(
        tp=4,
        dcp=dcp,
        num_tokens=num_tokens,
        is_simulated=True,
        step_ms=Spread(count=1, p50=step_ms, p99=step_ms, low=step_ms, high=step_ms),
        cpu_ms=Spread(count=1, p50=cpu_ms, p99=cpu_ms, low=cpu_ms, high=cpu_ms),
        collective_share=0.25,
        collective_cpu_share=0.2,
        num_collectives=22,
        num_bytes=1,
        attention_gb_per_s=1.0,
        read_gb_per_s=4.0,
    )


def test_the_length_from_which_it_pays_is_where_the_lines_meet() -> None:
    """10 + L/100 and 15 + L/200 ms meet at 1,000 tokens; by processor time at none; where it pays at once, at 0."""
    lengths = (400, 800, 4000)
    alone = [_figures(1, length, 10 + length / 100, 5.0) for length in lengths]
    shared = [_figures(2, length, 15 + length / 200, 6.0) for length in lengths]
    better = [_figures(4, length, 5 + length / 400, 4.0) for length in lengths]
    line = line_of(lengths, [each.step_ms.p50 for each in shared])
    assert [line.at_zero_ms, line.per_token_ms] == pytest.approx([15, 1 / 200])
    two, four = crossovers([*alone, *shared, *better])
    assert two.num_tokens == pytest.approx(1000)
    assert [two.speedup, two.speedup_cpu] == pytest.approx([50 / 35, 5 / 6])
    assert (two.dcp, two.num_tokens_cpu) == (2, None)
    assert (four.dcp, four.num_tokens, four.num_tokens_cpu) == (4, 0, 0)
    report = _report()
    report_steps(report, [*alone, *shared, *better])
    assert "\n4 (simulated) 2 1,000 1.43 at no length 0.83\n4 (simulated) 4 0 3.33 0 1.25\n" in _squeezed(report)
    assert crossovers([alone[0], shared[0]]) == ()
    with pytest.raises(PdmeshError, match="two lengths"):
        line_of([64], [1.0])


@pytest.mark.parametrize(("key_value_bytes", "status"), [(70, EXIT_GOOD), (71, EXIT_FAILED)])
def test_more_memory_than_a_share_fails(key_value_bytes: int, status: int) -> None:
    """A block for each of the two requests is allowed on top of a half."""
    report = _report()
    alone = CacheBytes(num_blocks=10, key_value_bytes=100, state_bytes=5)
    shared = CacheBytes(num_blocks=7, key_value_bytes=key_value_bytes, state_bytes=5)
    report_memory(report, (8, 9), {1: alone, 2: shared})
    assert report.status == status


def _mesh(decode: str, num_tokens: int, moved: float, answers: Sequence[tuple[int, ...]]) -> MeshFigures:
    spread = Spread(count=1, p50=moved, p99=moved, low=moved, high=moved)
    return MeshFigures(
        decode=decode,
        dcp=1,
        num_tokens=num_tokens,
        region_bytes=10,
        bytes_of={17: ByteFigures(moved=spread, ideal=100, ratio=moved / 100, num_parts=8)},
        longest_served=True,
        one_more_refused=False,
        answers=tuple(answers),
    )


def test_bytes_answers_and_room_of_meshes_are_told() -> None:
    """One byte too many misses the aim, one other answer too; room is told by the first mesh's."""
    report = _report()
    report_meshes(report, [_mesh("tp=8", 320, 100.0, [(1,), (2,)]), _mesh("tp=8,dcp=2", 640, 101.0, [(1,), (3,)])])
    text = _squeezed(report)
    assert "bytes of a handoff over ideal, decode tp=8 all 1.0000 met\n" in text
    assert "bytes of a handoff over ideal, decode tp=8,dcp=2 not 1.0000 missed\n" in text
    assert "answers as those of decode tp=8, decode tp=8,dcp=2 1 of 2 missed\n" in text
    assert "\ntp=8,dcp=2 10 640 2.00 served not refused\n" in text


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        ("the server answered 400: max_tokens: 4 is too many; the rule is: at most 320 together", True),
        ("the server answered 400: something else", False),
        ("the stream broke off: 320", False),
        ("", False),
    ],
)
def test_a_request_is_refused_for_its_length_alone(error: str, *, refused: bool) -> None:
    """By the status, and by the number that it should have kept to."""
    sample = Sample(
        mode="m", round=0, place=0, num_prompt_tokens=1, sent_ns=0, done_ns=1, token_ids=(), token_ns=(), error=error
    )
    assert is_refusal(sample, 320) is refused


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (["--contexts", "0"], "contexts"),
        (["--contexts", "64,32"], "contexts"),
        (["--contexts", "64,64"], "contexts"),
        (["--ranks", "3"], "ranks"),
        (["--ranks", "2,2"], "ranks"),
        (["--steps", "0"], "steps"),
        (["--rounds", "0"], "rounds"),
        (["--blocks", "0"], "blocks"),
        (["--requests", "-1"], "requests"),
        (["--decode", "tp=4", "--decode", "tp=4"], "decode"),
        (["--model", "/nowhere"], "model"),
        (["--time-limit", "0"], "time_limit_s"),
    ],
)
def test_bad_values_are_named(argv: list[str], field: str) -> None:
    """Before anything starts."""
    with pytest.raises(InvalidValueError, match=rf"^{field}: "):
        _settings(*argv)


def test_what_is_measured_without_flags() -> None:
    """Two and four ranks up to 64K tokens, and meshes of dcp 1, 2 and 4."""
    settings = _settings()
    assert (settings.contexts, settings.ranks) == ((1024, 4096, 16384, 65536), (2, 4))
    assert settings.decode == ("tp=8", "tp=8,dcp=2", "tp=8,dcp=4")
    assert [group_sizes(each) for each in (2, 4, 8)] == [(1, 2), (1, 2, 4), (1, 2, 4, 8)]
