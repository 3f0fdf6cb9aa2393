"""Answers that end with their first token, by an end of sequence or by a stop string: nothing follows, and both workers are free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from common.bus.faults import NoFaults
from common.engine.fake.engine import EOS_TOKEN_ID
from common.engine.fake.tokens import drawn_tokens
from contracts import subjects
from contracts.handoff import HandoffState
from contracts.rank import SampledToken, StepItem
from contracts.requests import FinishReason
from contracts.subjects import BrokerVerb, WorkerVerb
from tests.integration.routed_mesh import Router, all_back, handoff_of, prompt_of, run_routed, tokens_of
from tests.integration.test_broker_with_workers import ALL, GUESSING, PUSH
from tests.integration.whole_mesh import Mesh

SOON_S = 2.0
"""Far less than any deadline."""


class Heard(NoFaults):
    """Counts what is asked, by its verb."""

    def __init__(self) -> None:
        self.verbs: Counter[str] = Counter()

    def deliveries(self, subject: str) -> Sequence[float]:
        """See `Faults.deliveries`."""
        self.verbs[subjects.verb_of(subject)] += 1
        return super().deliveries(subject)


def end_at(monkeypatch: pytest.MonkeyPatch, index: int, *numbers: int) -> None:
    """Let every engine draw the end of sequence as that token of the answers to some requests."""
    places = {(number, len(prompt_of(number)) + index) for number in numbers}

    def drawn(item: StepItem, seed: int, num_drafts: int) -> list[SampledToken]:
        return [
            msgspec.structs.replace(token, token_id=EOS_TOKEN_ID) if (seed, token.position) in places else token
            for token in drawn_tokens(item, seed, num_drafts)
        ]

    monkeypatch.setattr("common.engine.fake.engine.drawn_tokens", drawn)


async def soon_back(mesh: Mesh, began: float) -> None:
    """All memory is back long before the deadline."""
    await all_back(mesh)
    assert mesh.clock.monotonic() - began < SOON_S


def outcome_of(mesh: Mesh, number: int) -> tuple[HandoffState, FinishReason | None, int]:
    """What the broker's record says of a request's only attempt."""
    handoff = mesh.broker.handoff(handoff_of(number))
    assert handoff is not None
    assert mesh.broker.handoff(handoff_of(number, 1)) is None
    return handoff.state, handoff.record.finish_reason, handoff.record.num_tokens


@pytest.mark.parametrize(
    ("decode", "everybody"),
    [(PUSH, {}), (ALL, {}), (PUSH, GUESSING), (ALL, GUESSING)],
    ids=["push", "pull", "push-guessing", "pull-guessing"],
)
def test_an_end_of_sequence_as_first_token_ends_on_prefill(
    decode: dict[str, Any], everybody: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client has it, and "stop"; decode is asked neither to commit nor to pull, and the memory that was set aside there is back."""
    end_at(monkeypatch, 0, 1)

    async def scenario(mesh: Mesh, router: Router) -> None:
        mesh.server.faults = heard = Heard()
        began = mesh.clock.monotonic()
        client = await router.serve(1)
        assert (client.token_ids, client.ended) == ([EOS_TOKEN_ID], FinishReason.STOP)
        await soon_back(mesh, began)
        assert outcome_of(mesh, 1) == (HandoffState.FINISHED, FinishReason.STOP, 1)
        assert heard.verbs[WorkerVerb.RESERVE] == 1
        assert heard.verbs[WorkerVerb.COMMIT] == heard.verbs[WorkerVerb.PULL] == 0
        assert (await router.serve(2)).token_ids == tokens_of(2, 6)
        assert heard.verbs[WorkerVerb.COMMIT] == 1
        await all_back(mesh)

    run_routed(scenario, decode, everybody=everybody)


@pytest.mark.parametrize("decode", [PUSH, ALL], ids=["push", "pull"])
def test_an_end_of_sequence_that_does_not_count_yet_goes_on(
    decode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the client ignores ends, or wants more tokens before one counts: the answer goes on at decode, to its length."""
    end_at(monkeypatch, 0, 1, 2)

    async def scenario(mesh: Mesh, router: Router) -> None:
        for number, wish in ((1, {"ignore_eos": True}), (2, {"min_tokens": 1})):
            client = await router.serve(number, **wish)
            assert client.token_ids == [EOS_TOKEN_ID, *tokens_of(number, 6)[1:]]
            assert client.ended == FinishReason.LENGTH
        await all_back(mesh)

    run_routed(scenario, decode)


@pytest.mark.parametrize("decode", [PUSH, ALL], ids=["push", "pull"])
def test_an_end_of_sequence_as_second_token_ends_on_decode(
    decode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token of prefill, one of decode: neither is left out, and neither comes twice."""
    end_at(monkeypatch, 1, 1)

    async def scenario(mesh: Mesh, router: Router) -> None:
        began = mesh.clock.monotonic()
        client = await router.serve(1)
        assert (client.token_ids, client.ended) == ([*tokens_of(1, 1), EOS_TOKEN_ID], FinishReason.STOP)
        await soon_back(mesh, began)
        assert outcome_of(mesh, 1) == (HandoffState.FINISHED, FinishReason.STOP, 2)

    run_routed(scenario, decode)


@pytest.mark.parametrize("decode", [PUSH, ALL], ids=["push", "pull"])
def test_a_stop_string_in_the_first_token_ends_the_request(decode: dict[str, Any]) -> None:
    """Only the router can see it: what decode was about to generate is not waited for, and counts for nobody."""

    async def scenario(mesh: Mesh, router: Router) -> None:
        mesh.server.faults = heard = Heard()
        (first,) = tokens_of(1, 1)
        router.spell({first: "so.no"})
        began = mesh.clock.monotonic()
        client = await router.serve(1, max_tokens=200, stops=(".",))
        assert (client.token_ids, client.text, client.ended) == ([first], "so", FinishReason.STOP)
        await soon_back(mesh, began)
        assert heard.verbs[BrokerVerb.CANCEL] == 1
        assert outcome_of(mesh, 1) == (HandoffState.FINISHED, FinishReason.STOP, 1)

    run_routed(scenario, decode)
