"""A worker whose caches do not fit is refused before it starts: which setting, how much, how much there is, what to change."""

from pathlib import Path
from typing import Any

import pytest

from common.dataplane.shm_memory import data_offset
from common.engine.model.config import load_config
from common.engine.ranks.cache_shape import cache_shape
from common.layout.region import lay_out
from common.runtime.host_memory import HostMemory
from common.runtime.lifecycle import EXIT_SETTINGS
from common.runtime.settings import SettingsError, SettingsProblem
from common.worker.app import run_worker
from common.worker.cache_need import cache_need, check_cache_fits
from common.worker.settings import EngineKind, WorkerSettings
from contracts.dataplane import Transport
from contracts.manifest import Coordinates, Dtype
from contracts.pull import Transfer
from contracts.workers import WorkerRole
from services.decode.service import DecodeService

MODEL = Path(__file__).parents[2] / "models" / "tiny"


def settings(**changes: Any) -> WorkerSettings:
    """A worker of the shipped checkpoint."""
    values: dict[str, Any] = {"worker_id": "decode-0", "model": MODEL, "num_blocks": 64, "num_slots": 8}
    return WorkerSettings(**(values | changes))


def memory(num_bytes: int) -> HostMemory:
    """A machine that has so much left."""
    return HostMemory(num_bytes=num_bytes, bound="MemAvailable of this machine")


def needed(worker: WorkerSettings) -> int:
    """What its caches take."""
    need = cache_need(worker, WorkerRole.DECODE)
    assert need is not None
    return need.num_bytes


def refusal(worker: WorkerSettings, available: int) -> SettingsProblem:
    """Why it is refused."""
    with pytest.raises(SettingsError) as error:
        check_cache_fits(worker, WorkerRole.DECODE, memory(available))
    (problem,) = error.value.problems
    return problem


def test_all_ranks_of_all_replicas_count() -> None:
    """Each rank allocates its own region, as the ranks themselves lay it out."""
    shape = cache_shape(load_config(MODEL), dtype=Dtype.FLOAT32, block_size=16, num_blocks=64, num_slots=8)
    region = lay_out(shape, Coordinates(tp_rank=0, tp_size=2))
    assert needed(settings(tp=2, dp=3)) == 6 * (data_offset(64 + 8) + region.nbytes)
    assert needed(settings(dtype="bfloat16")) < needed(settings())


def test_ranks_that_share_a_sequence_keep_as_many_blocks_each() -> None:
    """num_blocks is of one rank: with dcp the same bytes hold more tokens, they are not fewer."""
    assert needed(settings(tp=4, dcp=2)) == needed(settings(tp=4))


@pytest.mark.parametrize("transport", list(Transport))
def test_what_fits_to_the_byte_is_let_in_and_one_more_is_not(transport: Transport) -> None:
    """Alike for both transports: a region is memory of this host either way."""
    worker = settings(tp=2, dp=2, transport=transport)
    check_cache_fits(worker, WorkerRole.DECODE, memory(needed(worker)))
    assert refusal(worker, needed(worker) - 1).key == "num_blocks"


def test_the_refusal_says_field_value_needs_and_what_to_change() -> None:
    """A person can act on it without reading anything else."""
    worker = settings(num_blocks=50_000_000, tp=2, dp=2)
    problem = refusal(worker, 3 * 1024**3)
    assert (problem.key, problem.value) == ("num_blocks", "50000000")
    assert "with dp=2 and tp=2 the caches of all ranks take" in problem.rule
    assert f"({needed(worker)} bytes)" in problem.rule
    assert "3.0 GiB (3221225472 bytes) are available (MemAvailable of this machine)" in problem.rule
    assert "Lower it, num_slots or dp" in problem.rule


@pytest.mark.parametrize("key", ["num_blocks", "num_slots"])
def test_the_number_that_it_names_fits(key: str) -> None:
    """The setting to blame is the one that does not fit beside the other, and the most it may be is a good next try."""
    too_many = settings(**{key: 4_000_000, "max_step_tokens": 4_000_000}, tp=2)
    problem = refusal(too_many, 64 * 1024**2)
    assert problem.key == key
    most = int(problem.rule.removeprefix("at most about ").partition(":")[0])
    assert most > 64
    check_cache_fits(
        settings(**{key: most - 16, "max_step_tokens": 4_000_000}, tp=2), WorkerRole.DECODE, memory(64 * 1024**2)
    )


def test_nothing_is_refused_that_allocates_nothing_or_that_others_judge() -> None:
    """A fake engine, a checkpoint that is not there, an illegal cut, a machine that says nothing of its memory."""
    check_cache_fits(settings(engine=EngineKind.FAKE), WorkerRole.DECODE, memory(0))
    check_cache_fits(settings(model=Path("/nowhere")), WorkerRole.DECODE, memory(0))
    check_cache_fits(settings(tp=7), WorkerRole.DECODE, memory(0))
    check_cache_fits(settings(), WorkerRole.DECODE, None)


def test_a_worker_beyond_the_machine_exits_as_for_every_wrong_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2 and one line, before anything has started."""
    spec = f"worker_id=decode-0,model={MODEL},num_blocks=1000000000000"
    assert run_worker(DecodeService, [spec]) == EXIT_SETTINGS
    assert "num_blocks = 1000000000000: at most about" in capsys.readouterr().err


@pytest.mark.parametrize("rows", [0, 2])
def test_staging_rows_of_a_worker_that_pulls_count(rows: int) -> None:
    """One a slot, or as many as the settings say: to the byte, and what is named as too large would have fitted."""
    worker = settings(tp=2, transfer=Transfer.PULL, num_staging_rows=rows)
    num_rows = worker.staging_rows_of(WorkerRole.DECODE)
    assert num_rows == (rows or 8)
    need, without = cache_need(worker, WorkerRole.DECODE), cache_need(worker, WorkerRole.MIXED)
    assert need is not None
    assert without is not None
    assert need.num_bytes - without.num_bytes == num_rows * need.row_bytes > 0
    check_cache_fits(worker, WorkerRole.DECODE, memory(need.num_bytes))
    with pytest.raises(SettingsError) as caught:
        check_cache_fits(worker, WorkerRole.DECODE, memory(need.num_bytes - 1))
    (problem,) = caught.value.problems
    assert problem.key == "num_blocks"
    assert _most(problem) == 63
    small = need.num_bytes - 65 * need.block_bytes
    with pytest.raises(SettingsError) as caught:
        check_cache_fits(worker, WorkerRole.DECODE, memory(small))
    (problem,) = caught.value.problems
    assert problem.key == "num_slots"
    assert _most(problem) == 7


def _most(problem: SettingsProblem) -> int:
    """About how many would fit."""
    return int(problem.rule.removeprefix("at most about ").split(":")[0])


@pytest.mark.parametrize("whole", [False, True])
def test_guesses_take_rows_of_states_and_the_draft_heads_cache(*, whole: bool) -> None:
    """As the ranks lay them out: a decode worker has a row for each guess, a prefill worker the draft's cache alone, n-grams need none."""
    guessing = settings(tp=2, num_speculative_tokens=3, mtp_draft_body_tp1=whole)

    def laid_out(depth: int, *, keeps_draft: bool) -> int:
        shape = cache_shape(
            load_config(MODEL),
            dtype=Dtype.FLOAT32,
            block_size=16,
            num_blocks=64,
            num_slots=8,
            num_speculative_tokens=depth,
            keeps_draft=keeps_draft,
            draft_whole=whole,
        )
        return 2 * (data_offset(64 + 8) + lay_out(shape, Coordinates(tp_rank=0, tp_size=2)).nbytes)

    expected = {
        WorkerRole.PREFILL: laid_out(0, keeps_draft=True),
        WorkerRole.DECODE: laid_out(3, keeps_draft=True),
        WorkerRole.MIXED: laid_out(3, keeps_draft=True),
    }
    for role, num_bytes in expected.items():
        need = cache_need(guessing, role)
        assert need is not None
        assert need.num_bytes == num_bytes
        check_cache_fits(guessing, role, memory(num_bytes))
        with pytest.raises(SettingsError):
            check_cache_fits(guessing, role, memory(num_bytes - 1))
    looked_up = cache_need(settings(tp=2, num_speculative_tokens=3, drafter="ngram"), WorkerRole.DECODE)
    assert looked_up is not None
    assert looked_up.num_bytes == laid_out(3, keeps_draft=False)


def test_a_depth_for_which_there_is_no_memory_is_named() -> None:
    """Where slots are too many, guesses are one way to make them smaller."""
    worker = settings(num_speculative_tokens=8, num_slots=4000, max_step_tokens=4000)
    problem = refusal(worker, 64 * 1024**2)
    assert problem.key == "num_slots"
    assert "Lower num_speculative_tokens, it or dp" in problem.rule
    assert "num_speculative_tokens" not in refusal(settings(num_slots=4000, max_step_tokens=4000), 64 * 1024**2).rule


def test_a_depth_that_the_slots_cannot_hold_is_named_with_the_depth_that_they_can() -> None:
    """Where fewer guesses would fit they are the setting to blame; where none would, the slots are."""
    worker = settings(num_slots=64, num_speculative_tokens=8)
    fewer = settings(num_slots=64, num_speculative_tokens=3)
    problem = refusal(worker, needed(fewer))
    assert (problem.key, problem.value, _most(problem)) == ("num_speculative_tokens", "8", 3)
    assert "Lower it, num_slots or dp" in problem.rule
    problem = refusal(worker, needed(settings(num_slots=64)) // 2)
    assert problem.key == "num_slots"
    assert "Lower num_speculative_tokens, it or dp" in problem.rule
    problem = refusal(settings(num_speculative_tokens=8), needed(settings(num_speculative_tokens=8)) - 1)
    assert problem.key == "num_blocks"
    assert "Lower it, num_slots, num_speculative_tokens or dp" in problem.rule
