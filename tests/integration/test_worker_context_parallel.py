"""Workers whose ranks share the blocks of a sequence (dcp), with fake engines: memory, reports, records, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from common.bus.storage import WORKERS_CONFIG
from common.worker.core.effective import effective_of
from common.worker.settings import PulledRoles
from contracts.codec import decode
from contracts.errors import ErrorCode
from contracts.handoff import PartDone, PrefillFinished, RequestEnded, Reserved
from contracts.links import LinkState
from contracts.manifest import Role
from contracts.pull import PullEnded, Transfer
from contracts.requests import Accepted, Refused, SamplingParams
from contracts.subjects import WorkerVerb
from contracts.workers import WorkerRecord, WorkerRole
from services.broker.core.ledger import Ledger
from services.mixed.service import MixedService
from services.prefill.service import PrefillService
from tests.integration.worker_world import (
    EXPECTED,
    HANDOFF,
    PROMPT,
    SAMPLING,
    Mesh,
    in_mesh,
    mixed_run,
    pair,
)

PAGED = {Role.KEY, Role.VALUE}
BLOCK = 16


def shares(num_tokens: int) -> dict[int, tuple[tuple[int, int], ...]]:
    """What each of four ranks in groups of two holds of a prompt: every second block, counted by its own tokens."""
    sizes = [min(BLOCK, num_tokens - start) for start in range(0, num_tokens, BLOCK)]
    return {rank: ((0, sum(sizes[rank % 2 :: 2])),) if sizes[rank % 2 :: 2] else () for rank in range(4)}


def ledger_of(mesh: Mesh, reserved: Reserved, num_prompt_tokens: int) -> Ledger:
    """The broker's ledger of a handoff, with all that was reported."""
    prefill = mesh.services["prefill-0"]
    assert isinstance(prefill, PrefillService)
    met = prefill.links.met("decode-0", "i-decode-0")
    assert met is not None
    ledger = Ledger.open(
        met.plan.parts,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=0,
        block_size=BLOCK,
        pulled=reserved.pulled,
    )
    for report in mesh.reports:
        ledger = ledger.take(report)
    return ledger


def paged_parts(mesh: Mesh) -> list[PartDone]:
    """Every KEY and VALUE part of the last reports."""
    last = {(report.transfer, report.source_rank): report for report in mesh.reports}
    return [part for report in last.values() for part in report.parts if part.role in PAGED]


@pytest.mark.parametrize(("num_prompt", "dp"), [(len(PROMPT), 1), (10, 1), (len(PROMPT), 2)])
@pytest.mark.parametrize("transfer", Transfer)
def test_each_rank_of_a_group_gets_its_blocks(transfer: Transfer, num_prompt: int, dp: int) -> None:
    """Pushed or pulled, the parts are every second block, a prompt of one block is owed to half of the ranks; the ledger closes."""

    async def scenario(mesh: Mesh) -> None:
        pulls: dict[str, Any] = {"transfer": transfer, "pull": PulledRoles.ALL} if transfer is Transfer.PULL else {}
        await pair(mesh, tp=4, dcp=2, dp=dp, **pulls)
        mesh.prompts[HANDOFF] = tuple(PROMPT[:num_prompt])
        await mesh.send_prompt("prefill", "prefill-0")
        reserved = await mesh.reserve()
        assert isinstance(reserved, Reserved)
        assert len(reserved.grant.block_ids) == -(-(num_prompt + SAMPLING.max_tokens) // (2 * BLOCK))
        run = await mesh.run(reserved, pulled=reserved.pulled)
        assert run == Accepted(handoff_id=HANDOFF)
        finished = await mesh.heard.get()
        assert isinstance(finished, PrefillFinished)
        assert finished.first_token is not None
        if finished.source is not None:
            assert len(finished.source.block_ids) == -(-num_prompt // BLOCK)
            assert await mesh.pull(finished.source) == Accepted(handoff_id=HANDOFF)
            ended = await mesh.heard.get()
            assert isinstance(ended, PullEnded)
            assert ended.error is None
        await mesh.clock.sleep(0.1)
        found = paged_parts(mesh)
        assert {part.destination_rank for part in found} == {
            rank for rank, ranges in shares(num_prompt).items() if ranges
        }
        assert all(part.ranges == shares(num_prompt)[part.destination_rank] for part in found)
        ledger = ledger_of(mesh, reserved, num_prompt)
        assert ledger.missing(9) == ()
        assert not ledger.open_by(transfer)
        assert await mesh.commit(finished.first_token) == Accepted(handoff_id=HANDOFF)
        ids, _ = await mesh.text()
        assert ids[0] == finished.first_token
        if num_prompt == len(PROMPT):
            assert ids == EXPECTED
        for role in ("prefill", "decode"):
            await mesh.release(role, f"{role}-0")
        mesh.assert_empty()

    in_mesh(scenario)


def test_the_memory_of_a_worker_holds_dcp_times_the_tokens() -> None:
    """A sequence that is too long for four blocks on one rank fits into four on each of two; records and answers say so."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh, tp=4, dcp=2, num_blocks=4)
        bucket = await mesh.bus.ensure_bucket(WORKERS_CONFIG)
        entry = await bucket.get("decode-0")
        assert entry is not None
        record = decode(entry.value, WorkerRecord)
        assert (record.tp, record.dcp, record.block_size, record.num_blocks) == (4, 2, BLOCK, 4)
        assert (record.max_sequence_tokens, record.load.num_free_blocks) == (128, 4)
        assert record.load.has_room(128, block_tokens=record.block_size * record.dcp)
        link = await mesh.link()
        assert link is not None
        assert link.state is LinkState.LINKED
        assert link.topology == "tp2 -> tp4 dcp2"
        longest = SamplingParams(max_tokens=128 - len(PROMPT), seed=9, temperature=0.0)
        reserved = await mesh.reserve(longest)
        assert isinstance(reserved, Reserved)
        assert len(reserved.grant.block_ids) == 4
        refused = await mesh.reserve(longest, handoff="r2-0", timeout_ms=100)
        assert isinstance(refused, Refused)
        assert refused.error.code is ErrorCode.OVERLOADED
        assert "block ids of 32 tokens" in refused.error.message
        longer = SamplingParams(max_tokens=129 - len(PROMPT), seed=9, temperature=0.0)
        too_long = await mesh.reserve(longer, handoff="r3-0")
        assert isinstance(too_long, Refused)
        assert too_long.error.code is ErrorCode.PROMPT_TOO_LONG
        await mesh.release("decode", "decode-0")
        mesh.assert_empty()

    in_mesh(scenario)


def test_growth_takes_a_block_on_every_rank_of_a_group() -> None:
    """An answer that outgrows what was set aside ends whole, with half the ids that it would need on single ranks."""

    async def scenario(mesh: Mesh) -> None:
        await pair(mesh, tp=4, dcp=2, num_blocks=4, reserve_output_tokens=1)
        sampling = SamplingParams(max_tokens=80, seed=9, temperature=0.0)
        await mesh.send_prompt("prefill", "prefill-0")
        reserved = await mesh.reserve(sampling)
        assert isinstance(reserved, Reserved)
        assert len(reserved.grant.block_ids) == 2
        assert await mesh.run(reserved, sampling=sampling) == Accepted(handoff_id=HANDOFF)
        finished = await mesh.heard.get()
        assert isinstance(finished, PrefillFinished)
        assert finished.first_token is not None
        await mesh.commit(finished.first_token)
        ids, final = await mesh.text()
        assert (len(ids), final.error) == (80, None)
        assert ids[:12] == EXPECTED
        for role in ("prefill", "decode"):
            await mesh.release(role, f"{role}-0")
        mesh.assert_empty()

    in_mesh(scenario)


def test_a_mixed_worker_computes_whole_prompts_and_counts_them_so() -> None:
    """With dcp and without chunks prompts and decoding take turns, and what no step holds is refused with the rule."""

    async def scenario(mesh: Mesh) -> None:
        worker = await mesh.add(
            MixedService,
            "mixed-0",
            tp=4,
            dcp=2,
            chunked_prefill=False,
            max_step_tokens=len(PROMPT),
            prefill_chunk_tokens=8,
        )
        assert worker.record().max_prompt_tokens == len(PROMPT)
        assert not effective_of(worker.settings, WorkerRole.MIXED).mix_batch
        message = mixed_run()
        await mesh.send_prompt("mixed", "mixed-0")
        assert await mesh.ask("mixed", "mixed-0", WorkerVerb.RUN, message) == Accepted(handoff_id=HANDOFF)
        assert (await mesh.text())[0] == EXPECTED
        assert isinstance(await mesh.heard.get(), RequestEnded)
        text = worker.metrics.exposition().decode()
        assert 'pdmesh_worker_steps_total{mode="prefill"} 1.0' in text
        assert 'pdmesh_worker_steps_total{mode="decode"} 11.0' in text
        assert 'mode="chunk"' not in text
        assert 'mode="mixed"' not in text
        long = mixed_run(handoff_id="r2-0", request_id="r2", num_prompt_tokens=len(PROMPT) + 1)
        refused = await mesh.ask("mixed", "mixed-0", WorkerVerb.RUN, long)
        assert isinstance(refused, Refused)
        assert refused.error.code is ErrorCode.PROMPT_TOO_LONG
        assert "chunked_prefill is off" in refused.error.message
        mesh.assert_empty()

    in_mesh(scenario)
