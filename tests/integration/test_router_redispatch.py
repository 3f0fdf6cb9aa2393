"""An answer whose worker is lost goes on elsewhere: nothing comes twice, nothing is left out, and everything counts once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.bus.storage import WORKERS_CONFIG
from contracts.codec import decode, encode
from contracts.errors import ErrorCode, ErrorInfo
from contracts.links import LinkRecord
from contracts.requests import FinishReason, MixedRoute, ReplayTokens, SubmitRequest, TokenFrame
from contracts.workers import WorkerRecord
from services.router.core import patience
from services.router.core.prompt_frames import pack_ids, prompt_hash
from tests.integration.router_world import (
    ANSWER,
    PATIENCE_S,
    Mesh,
    Script,
    World,
    encode_text,
    linked_pair,
    record,
    router_world,
    tokenizer,
    whole_answer,
)

PROMPT = "hello, this is there"
PLAIN: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "return_token_ids": True}
TOKENS = encode_text(ANSWER)
NUM_PROMPT_TOKENS = len(encode_text(PROMPT))


def failing(num_tokens: int, code: ErrorCode = ErrorCode.WORKER_LOST) -> Script:
    """Send tokens up to that many of the whole answer, then fail."""

    async def script(mesh: Mesh, submit: SubmitRequest) -> None:
        first = submit.num_delivered_tokens
        for index in range(first, num_tokens):
            await mesh.send(submit, index, mesh.answer[index : index + 1])
        error = ErrorInfo(code=code, message="planted")
        await mesh.send(submit, num_tokens, [], final=True, num_tokens=num_tokens, error=error)

    return script


async def served(world: World, *, stream: bool, **fields: Any) -> tuple[str, list[int], str, dict[str, Any]]:
    """The text, tokens, finish reason and usage of one request."""
    if not stream:
        status, answer, _ = await world.post("/v1/completions", PLAIN | fields)
        assert status == 200, answer
        (choice,) = answer["choices"]
        return choice["text"], choice["token_ids"], choice["finish_reason"], answer["usage"]
    options = {"stream_options": {"include_usage": True}}
    *chunks, last, done = await world.events("/v1/completions", PLAIN | options | fields)
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    text = "".join(choice["text"] for choice in choices)
    tokens = [token for choice in choices for token in choice["token_ids"]]
    return text, tokens, choices[-1]["finish_reason"], last["usage"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cut", [1, 5, len(TOKENS) - 1])
async def test_an_answer_goes_on_behind_what_was_delivered(tmp_path: Path, cut: int, stream: bool) -> None:
    """The next attempt has the tokens as the end of its prompt, what is left of the lengths, and the same seed."""
    async with router_world(tmp_path) as world:
        world.mesh.scripts = [failing(cut), whole_answer]
        text, tokens, reason, usage = await served(
            world, stream=stream, temperature=0.7, top_p=0.9, max_tokens=100, min_tokens=7
        )
        assert (text, tokens, reason) == (ANSWER, TOKENS, "stop")
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (NUM_PROMPT_TOKENS, len(TOKENS))
        first, second = world.mesh.submits
        whole = encode_text(PROMPT) + TOKENS[:cut]
        assert world.mesh.prompt_of(second.handoff_id) == whole
        assert second.prompt_hash == prompt_hash(pack_ids(whole))
        assert (second.num_prompt_tokens, second.num_delivered_tokens) == (len(whole), cut)
        assert (second.attempt, second.handoff_id) == (1, f"{first.request_id}-1")
        left = {"max_tokens": 100 - cut, "min_tokens": max(0, 7 - cut)}
        assert second.sampling == msgspec.structs.replace(first.sampling, **left)
        assert first.previous_error is None
        assert second.previous_error is not None
        assert second.previous_error.code is ErrorCode.WORKER_LOST


async def test_tokens_that_the_prompts_cache_had_are_those_of_the_clients_prompt(tmp_path: Path) -> None:
    """A later attempt finds in the cache what the first one computed: that is no news to the client."""

    async def cached(mesh: Mesh, submit: SubmitRequest) -> None:
        mesh.num_cached_tokens = NUM_PROMPT_TOKENS + 3
        await whole_answer(mesh, submit)

    async with router_world(tmp_path) as world:
        world.mesh.num_cached_tokens = 2
        world.mesh.scripts = [failing(3), cached]
        _, _, _, usage = await served(world, stream=True)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 2


@pytest.mark.parametrize(
    ("tokens", "fields", "expected"),
    [
        (TOKENS[:1], {"max_tokens": 1}, "length"),
        (TOKENS[:2], {"max_tokens": 2}, "length"),
        ([*TOKENS[:3], tokenizer().token_to_id("<|im_end|>")], {}, "stop"),
    ],
    ids=["max_tokens 1", "max_tokens 2", "end of sequence"],
)
async def test_an_answer_of_which_only_the_end_was_lost_is_complete(
    tmp_path: Path, tokens: Sequence[int], fields: dict[str, Any], expected: str
) -> None:
    """Nothing can follow: no other attempt is made, and the client is not told of a failure."""
    async with router_world(tmp_path) as world:
        world.mesh.answer = tokens
        world.mesh.scripts = [failing(len(tokens))]
        _, got, reason, _ = await served(world, stream=True, **fields)
        assert (got, reason, len(world.mesh.submits)) == (list(tokens), expected, 1)


async def test_one_token_of_two_goes_on_for_one(tmp_path: Path) -> None:
    """At the shortest lengths, too."""
    async with router_world(tmp_path) as world:
        world.mesh.scripts = [failing(1), whole_answer]
        _, got, reason, _ = await served(world, stream=True, max_tokens=2)
        assert (got, reason) == (TOKENS[:2], "length")
        assert world.mesh.submits[1].sampling.max_tokens == 1


async def test_a_stop_string_is_found_across_the_cut(tmp_path: Path) -> None:
    """Text that is held back for it, and characters of which some bytes are missing, outlive the attempt."""
    async with router_world(tmp_path) as world:
        for cut in range(1, len(TOKENS)):
            world.mesh.scripts = [failing(cut), whole_answer]
            text, _, reason, _ = await served(world, stream=True, stop=["is 😀 h"])
            assert (text, reason) == ("Hello, wörld! It ", "stop")


async def test_preemption_is_no_failure(tmp_path: Path) -> None:
    """It takes nothing from the budget of retries, nor from the attempts; each time the stream gets a little further."""
    preempted = [failing(count, ErrorCode.PREEMPTED) for count in (2, 2, 4)]
    spent: dict[str, Any] = {"max_attempts": 1, "max_failures": 1, "retry_budget": 1}
    async with router_world(tmp_path, **spent) as world:
        world.mesh.scripts = [*preempted, whole_answer]
        text, tokens, _, _ = await served(world, stream=True)
        assert (text, tokens) == (ANSWER, TOKENS)
        assert [each.num_delivered_tokens for each in world.mesh.submits] == [0, 2, 2, 4]


async def test_preemption_is_bounded(tmp_path: Path) -> None:
    """An answer that never gets its memory ends by name."""
    async with router_world(tmp_path, max_preemptions=3) as world:
        world.mesh.scripts = [failing(2, ErrorCode.PREEMPTED)]
        *_, error, _ = await world.events("/v1/completions", PLAIN)
        assert error["error"]["code"] == "preempted"
        assert len(world.mesh.submits) == 4


async def test_what_a_superseded_attempt_still_sends_is_ignored(tmp_path: Path) -> None:
    """Wrong tokens, and an end that would cut the answer off: neither is looked at."""

    async def haunted(mesh: Mesh, submit: SubmitRequest) -> None:
        old = mesh.submits[0]
        await mesh.send(old, 3, [1, 1, 1])
        await mesh.send(old, 6, [], final=True, num_tokens=6, finish_reason=FinishReason.STOP)
        await whole_answer(mesh, submit)

    async with router_world(tmp_path) as world:
        world.mesh.scripts = [failing(3), haunted]
        text, tokens, _, _ = await served(world, stream=True)
        assert (text, tokens) == (ANSWER, TOKENS)


async def test_a_lost_frame_of_a_later_attempt_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its place in the whole answer, and under the later attempt's handoff."""
    monkeypatch.setattr(patience, "SILENCE_S", 0.01)
    monkeypatch.setattr(patience, "GAP_S", 0.01)

    async def lose_one(mesh: Mesh, submit: SubmitRequest) -> None:
        def replay(_: str, asked: ReplayTokens) -> TokenFrame:
            return TokenFrame(
                handoff_id=submit.handoff_id,
                request_id=submit.request_id,
                attempt=submit.attempt,
                index=asked.index,
                token_ids=tuple(TOKENS[asked.index :]),
                final=True,
                num_tokens=len(TOKENS),
                finish_reason=FinishReason.STOP,
            )

        mesh.replay = replay
        await mesh.send(submit, 5, TOKENS[5:6])

    async with router_world(tmp_path) as world:
        world.mesh.scripts = [failing(4), lose_one]
        assert (await served(world, stream=True))[1] == TOKENS
        questions = [decode(data, ReplayTokens) for _, data in world.mesh.replays]
        asked = next(each for each in questions if not each.ended)
        assert (asked.handoff_id, asked.index) == (world.mesh.submits[1].handoff_id, 4)


async def test_one_of_two_choices_goes_on_alone(tmp_path: Path) -> None:
    """The other one is not disturbed, and both are whole."""
    async with router_world(tmp_path) as world:
        world.mesh.scripts = [failing(3), whole_answer]
        status, answer, _ = await world.post("/v1/completions", PLAIN | {"n": 2})
        assert status == 200
        assert [choice["token_ids"] for choice in answer["choices"]] == [TOKENS, TOKENS]
        assert sorted(each.attempt for each in world.mesh.submits) == [0, 0, 1]


async def test_what_the_mesh_takes_back_unasked_goes_on(tmp_path: Path) -> None:
    """A router that stood still was taken for dead, and its requests were cancelled: its clients still wait."""
    async with router_world(tmp_path) as world:
        world.mesh.scripts = [failing(3, ErrorCode.CANCELLED), whole_answer]
        assert (await served(world, stream=True))[1] == TOKENS


async def test_an_answer_that_fits_nowhere_else_says_what_was_lost(tmp_path: Path) -> None:
    """Prefill cannot hold the prompt with the delivered tokens: the error names both, and is the first one's."""
    prefill, decode_record, link = linked_pair()
    assert isinstance(prefill, WorkerRecord)
    small = msgspec.structs.replace(prefill, max_sequence_tokens=NUM_PROMPT_TOKENS + 2)
    async with router_world(tmp_path, records=[small, decode_record, link]) as world:
        world.mesh.scripts = [failing(3)]
        *_, error, _ = await world.events("/v1/completions", PLAIN)
        assert error["error"]["code"] == "worker_lost"
        assert "planted; it cannot go on elsewhere: prompt:" in error["error"]["message"]
        assert len(world.mesh.submits) == 1


@pytest.mark.parametrize("comes_back", [True, False])
async def test_an_answer_waits_for_a_worker_that_starts_again(tmp_path: Path, comes_back: bool) -> None:
    """There is no other: the new start goes on with it, or it ends with what was lost once that has taken too long."""
    records: list[WorkerRecord | LinkRecord] = [record("mixed-0")]

    async def die(mesh: Mesh, submit: SubmitRequest) -> None:
        bucket = await mesh.bus.ensure_bucket(WORKERS_CONFIG)
        records.clear()
        await bucket.delete("mixed-0")
        async with asyncio.timeout(PATIENCE_S):
            while (await world.get("/ready"))[0] == 200:
                pass
        await failing(3)(mesh, submit)
        if comes_back:
            records.append(record("mixed-0", incarnation="again"))
            await bucket.put("mixed-0", encode(record("mixed-0", incarnation="again")))

    async with router_world(tmp_path, records=records, reroute_wait_s=PATIENCE_S if comes_back else 0.01) as world:
        world.mesh.scripts = [die, whole_answer]
        if comes_back:
            assert (await served(world, stream=True))[1] == TOKENS
            route = world.mesh.submits[1].route
            assert isinstance(route, MixedRoute)
            assert route.mixed.incarnation == "again"
        else:
            *_, error, _ = await world.events("/v1/completions", PLAIN)
            assert error["error"]["message"].startswith("planted; it cannot go on elsewhere: no worker can take")


async def test_retries_of_all_requests_together_are_bounded(tmp_path: Path) -> None:
    """One was saved up, and nothing adds to it: the second failure is the client's to see, and is counted."""
    settings: dict[str, Any] = {"retry_budget": 1, "retry_share": 0.0, "retry_floor_per_s": 1e-9}
    async with router_world(tmp_path, **settings) as world:
        world.mesh.scripts = [failing(0, ErrorCode.OVERLOADED), whole_answer]
        assert (await world.post("/v1/completions", PLAIN))[0] == 200
        world.mesh.scripts = [failing(0, ErrorCode.OVERLOADED)]
        status, _, headers = await world.post("/v1/completions", PLAIN)
        assert (status, headers["Retry-After"]) == (429, "1")
        assert len(world.mesh.submits) == 3
        assert b"\npdmesh_router_retries_refused_total 1.0\n" in world.metrics.exposition()


async def test_requests_that_are_turned_away_do_not_cost_others_their_retries(tmp_path: Path) -> None:
    """However many a full mesh has refused: an answer whose worker is lost goes on, and finds a full mesh once more on its way."""
    settings: dict[str, Any] = {"retry_budget": 4, "retry_share": 0.0, "retry_floor_per_s": 1e-9}
    async with router_world(tmp_path, **settings) as world:
        world.mesh.scripts = [failing(0, ErrorCode.OVERLOADED)]
        for _ in range(4):
            assert (await world.post("/v1/completions", PLAIN))[0] == 429
        assert len(world.mesh.submits) == 4 + 2
        world.mesh.scripts = [failing(3), failing(3, ErrorCode.OVERLOADED), whole_answer]
        assert (await served(world, stream=True))[1] == TOKENS


async def test_a_burst_over_what_there_is_ends_served_or_refused_and_never_late(tmp_path: Path) -> None:
    """Eight times the slots of the decode worker: whoever finds no room in all attempts hears 429 with Retry-After."""
    slots, running = 2, 0

    async def narrow(mesh: Mesh, submit: SubmitRequest) -> None:
        nonlocal running
        if running == slots:
            await failing(0, ErrorCode.OVERLOADED)(mesh, submit)
            return
        running += 1
        await asyncio.sleep(0)
        await whole_answer(mesh, submit)
        running -= 1

    async with router_world(tmp_path) as world:
        world.mesh.scripts = [narrow]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(world.post("/v1/completions", PLAIN)) for _ in range(8 * slots)]
        for status, answer, headers in (task.result() for task in tasks):
            assert status in {200, 429}, answer
            assert (status == 200) or int(headers["Retry-After"]) >= 1
        assert len(world.mesh.submits) <= 8 * slots * 4
