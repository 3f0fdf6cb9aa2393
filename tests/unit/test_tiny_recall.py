"""Recall tasks are reproducible, honest about chance, and scored by place."""

import pytest

from loadtest.recall import (
    ANSWER_TOKEN,
    ASK_TOKEN,
    END_TOKEN,
    FIRST_KEY_TOKEN,
    FIRST_VALUE_TOKEN,
    LIST_TOKEN,
    NUM_KEYS,
    NUM_VALUES,
    RecallTask,
    count_right,
    make_task,
    to_text,
)


def test_prompt_lists_every_pair_and_then_asks() -> None:
    """A prompt is list, pairs, ask, questions, answer mark; the answer repeats each asked key and gives its value."""
    task = RecallTask(pairs=((2048, 2180), (2050, 2176)), questions=(1, 0), filler=(7, 8))
    assert task.prompt == (7, 8, LIST_TOKEN, 2048, 2180, 2050, 2176, ASK_TOKEN, 2050, 2048, ANSWER_TOKEN)
    assert task.answer == (2050, 2176, 2048, 2180)
    assert task.values == (2176, 2180)


def test_same_seed_same_task_on_every_machine() -> None:
    """The first pairs of seed 0 are fixed: figures measured on one machine can be measured again on another."""
    task = make_task(0, num_pairs=32, num_questions=4)
    assert task == make_task(0, num_pairs=32, num_questions=4)
    assert task.pairs[:2] == ((2161, 2274), (2052, 2225))
    assert task.questions == (0, 23, 16, 5)


def test_seeds_and_splits_differ() -> None:
    """Neither a neighbouring seed nor the training split repeats a task."""
    tasks = [
        make_task(seed, num_pairs=8, num_questions=2, split=split)
        for seed in range(50)
        for split in ("train", "held-out")
    ]
    assert len({task.pairs for task in tasks}) == 100


def test_keys_are_distinct_and_tokens_in_range() -> None:
    """The longest list uses every key once, and values stay in their own range, which makes chance less than one in a hundred."""
    task = make_task(3, num_pairs=NUM_KEYS, num_questions=NUM_KEYS)
    assert {key for key, _ in task.pairs} == set(range(FIRST_KEY_TOKEN, FIRST_KEY_TOKEN + NUM_KEYS))
    assert {value for _, value in task.pairs} <= set(range(FIRST_VALUE_TOKEN, FIRST_VALUE_TOKEN + NUM_VALUES))
    assert sorted(task.questions) == list(range(NUM_KEYS))
    assert NUM_VALUES >= 100


@pytest.mark.parametrize(("num_pairs", "num_questions"), [(0, 1), (NUM_KEYS + 1, 1), (4, 0), (4, 5)])
def test_impossible_sizes_are_refused(num_pairs: int, num_questions: int) -> None:
    """Sizes that no task can have are named in the error."""
    with pytest.raises(ValueError, match="num_"):
        make_task(0, num_pairs=num_pairs, num_questions=num_questions)


def test_score_counts_values_after_their_keys() -> None:
    """A right completion scores every question; a wrong value, a skipped question and a missing end cost what they touch, no more."""
    task = make_task(1, num_pairs=16, num_questions=4)
    answer = list(task.answer)
    assert count_right(task, answer) == 4
    assert count_right(task, [*answer, END_TOKEN]) == 4
    assert count_right(task, [*answer[:3], answer[3] + 1, *answer[4:]]) == 3
    assert count_right(task, answer[:5]) == 2
    assert count_right(task, [*answer[:2], *answer[4:]]) == 3
    assert count_right(task, []) == 0


def test_second_thoughts_do_not_count() -> None:
    """Only the first value said for a key counts, and values alone, without their keys, count for nothing."""
    task = make_task(1, num_pairs=16, num_questions=2)
    key, value = task.answer[:2]
    assert count_right(task, [key, value + 1, key, value]) == 0
    assert count_right(task, list(task.values)) == 0


def test_text_of_tasks() -> None:
    """Each recall token has a readable text; text tokens, and tasks with filler, have none here."""
    task = RecallTask(pairs=((2048, 2303),), questions=(0,))
    assert task.prompt_text == "<list><k0><v127><ask><k0><answer>"
    assert to_text([END_TOKEN]) == "<|endoftext|>"
    with pytest.raises(ValueError, match="token 5 "):
        to_text([5])
    with pytest.raises(ValueError, match="filler"):
        _ = RecallTask(pairs=((2048, 2303),), questions=(0,), filler=(5,)).prompt_text
