"""Which replica takes new work."""

from __future__ import annotations

from typing import Any

import pytest

from common.worker.core.replica_choice import ReplicaLoad, choose_for_memory, choose_for_prompt


def load(dp_rank: int, **changes: Any) -> ReplicaLoad:
    """An empty replica of 100 blocks and 10 slots, but for the changes."""
    values: dict[str, Any] = {
        "dp_rank": dp_rank,
        "num_blocks": 100,
        "num_slots": 10,
        "num_free_blocks": 100,
        "num_free_slots": 10,
        "num_waiting": 0,
        "num_running": 0,
        "num_prompt_tokens_left": 0,
    }
    return ReplicaLoad(**(values | changes))


@pytest.mark.parametrize(
    ("loads", "num_blocks", "expected"),
    [
        pytest.param([load(0), load(1)], 1, 0, id="equal ones: the lowest"),
        pytest.param([load(1), load(0)], 1, 0, id="whatever their order"),
        pytest.param([load(0, num_free_blocks=50), load(1, num_free_blocks=51)], 1, 1, id="more blocks"),
        pytest.param([load(0, num_free_slots=5), load(1, num_free_slots=6)], 1, 1, id="more slots"),
        pytest.param(
            [load(0, num_free_blocks=90, num_free_slots=2), load(1, num_free_blocks=30, num_free_slots=9)],
            1,
            1,
            id="what it is shortest of counts: 2 of 10 slots are less than 30 of 100 blocks",
        ),
        pytest.param(
            [load(0, num_free_blocks=20, num_free_slots=9), load(1, num_free_blocks=90, num_free_slots=3)],
            1,
            1,
            id="and the other way round",
        ),
        pytest.param(
            [load(0, num_free_blocks=4), load(1, num_free_slots=1)], 5, 1, id="a fuller one, if only it has room"
        ),
        pytest.param(
            [load(0, num_free_slots=0), load(1, num_free_blocks=1)], 1, 1, id="blocks without a slot are no room"
        ),
        pytest.param([load(0, num_free_slots=0), load(1, num_free_blocks=0)], 1, None, id="none has room"),
        pytest.param([load(0, num_free_blocks=60), load(1, num_free_blocks=60)], 61, None, id="room is not added up"),
        pytest.param([load(0)], 100, 0, id="all of an empty one"),
        pytest.param(
            [load(0, num_free_blocks=5, num_kept_blocks=1), load(1, num_free_blocks=4)],
            5,
            None,
            id="what is kept for those that grow is no room",
        ),
    ],
)
def test_memory_is_set_aside_where_most_is_left(
    loads: list[ReplicaLoad], num_blocks: int, expected: int | None
) -> None:
    """The emptiest replica with room, by blocks or slots, whichever it is shorter of; none only if no replica has room."""
    assert choose_for_memory(loads, num_blocks) == expected


@pytest.mark.parametrize(
    ("loads", "num_blocks", "expected"),
    [
        pytest.param([load(1), load(0)], 1, 0, id="equal ones: the lowest"),
        pytest.param(
            [load(0, num_prompt_tokens_left=500, num_running=1), load(1, num_prompt_tokens_left=400, num_running=3)],
            1,
            1,
            id="fewer tokens before it, though more prompts",
        ),
        pytest.param([load(0, num_running=2), load(1, num_running=1)], 1, 1, id="fewer sequences that decode"),
        pytest.param(
            [load(0, num_free_blocks=4), load(1, num_prompt_tokens_left=4000)],
            5,
            1,
            id="a full one is left alone, however idle",
        ),
        pytest.param(
            [load(0, num_free_slots=0), load(1, num_prompt_tokens_left=9)], 1, 1, id="nor where no slot is left"
        ),
        pytest.param(
            [load(0, num_waiting=1), load(1, num_prompt_tokens_left=9)], 1, 1, id="nor behind one that waits for memory"
        ),
        pytest.param(
            [
                load(0, num_waiting=1, num_prompt_tokens_left=80),
                load(1, num_waiting=2, num_free_slots=0, num_prompt_tokens_left=70),
            ],
            1,
            1,
            id="all wait: fewer tokens",
        ),
    ],
)
def test_a_prompt_goes_where_it_is_computed_soonest(loads: list[ReplicaLoad], num_blocks: int, expected: int) -> None:
    """Room first, then waiting tokens, then sequences; some replica always takes it."""
    assert choose_for_prompt(loads, num_blocks) == expected
