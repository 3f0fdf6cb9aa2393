"""Recall tasks: prompts whose right answer depends on every cached block.

A prompt holds a list of key-value pairs, then the keys that are asked for, in random order; the answer repeats each asked key and gives its
value. A cache block that is lost or misplaced on the way from prefill to decode takes its pairs along, so the share of right values measures
the transfer. Prefill itself produces only the first key of the answer: every value is produced by decode.

    <list> k v k v ... <ask> q1 q2 ... <answer>        prompt
    q1 v1 q2 v2 ... <|endoftext|>                      answer

The checkpoint in `models/tiny` was trained on this task with the token ids below; each is also an added token of its tokenizer, so that
`prompt_text` can be sent to a server as plain text. This module needs the standard library alone.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

END_TOKEN: Final = 2042
"""`<|endoftext|>`: ends an answer."""
LIST_TOKEN: Final = 2045
"""`<list>`: a list of pairs follows."""
ASK_TOKEN: Final = 2046
"""`<ask>`: the keys asked for follow."""
ANSWER_TOKEN: Final = 2047
"""`<answer>`: the answer follows."""
FIRST_KEY_TOKEN: Final = 2048
"""`<k0>`; key i is this plus i."""
NUM_KEYS: Final = 128
FIRST_VALUE_TOKEN: Final = 2176
"""`<v0>`; value i is this plus i."""
NUM_VALUES: Final = 128

Split = Literal["train", "held-out"]
"""Tasks of different splits never share a random stream. Anything but the training script uses "held-out"."""


@dataclass(frozen=True, kw_only=True)
class RecallTask:
    """One list of pairs and the questions about it; all fields are token ids.

    `pairs` are (key, value) in list order, keys distinct. `questions` are positions in `pairs`, distinct, in the order asked.
    `filler` stands before the list and carries no information about it.
    """

    pairs: tuple[tuple[int, int], ...]
    questions: tuple[int, ...]
    filler: tuple[int, ...] = ()

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids to send; the last one is `<answer>`."""
        listed = [token for pair in self.pairs for token in pair]
        asked = [self.pairs[place][0] for place in self.questions]
        return (*self.filler, LIST_TOKEN, *listed, ASK_TOKEN, *asked, ANSWER_TOKEN)

    @property
    def answer(self) -> tuple[int, ...]:
        """Token ids that a right completion consists of: question i's key at 2i, its value at 2i + 1; `<|endoftext|>` is not included."""
        return tuple(token for place in self.questions for token in self.pairs[place])

    @property
    def values(self) -> tuple[int, ...]:
        """Right values, one a question, in the order asked."""
        return tuple(self.pairs[place][1] for place in self.questions)

    @property
    def prompt_text(self) -> str:
        """`prompt` as text for a server that tokenizes; only tasks without filler have one, a ValueError otherwise."""
        if self.filler:
            raise ValueError(
                "filler is known by token ids only: send prompt, or write the text before a prompt_text without filler"
            )
        return to_text(self.prompt)


def make_task(
    seed: int,
    *,
    num_pairs: int,
    num_questions: int,
    filler: Sequence[int] = (),
    split: Split = "held-out",
) -> RecallTask:
    """Return the task of this seed; the same arguments give the same task on every machine and Python version.

    Each value is drawn alone, so guessing is right once in NUM_VALUES times. ValueError unless
    1 <= num_questions <= num_pairs <= NUM_KEYS.
    """
    if not 1 <= num_pairs <= NUM_KEYS:
        raise ValueError(f"num_pairs is {num_pairs}, must be 1 to {NUM_KEYS}")
    if not 1 <= num_questions <= num_pairs:
        raise ValueError(f"num_questions is {num_questions}, must be 1 to num_pairs ({num_pairs})")
    # Seeding with text hashes it, so that neighbouring seeds and the two splits are unrelated.
    stream = random.Random(f"recall/{split}/{seed}/{num_pairs}/{num_questions}")
    keys = stream.sample(range(FIRST_KEY_TOKEN, FIRST_KEY_TOKEN + NUM_KEYS), num_pairs)
    pairs = tuple((key, FIRST_VALUE_TOKEN + stream.randrange(NUM_VALUES)) for key in keys)
    questions = tuple(stream.sample(range(num_pairs), num_questions))
    return RecallTask(pairs=pairs, questions=questions, filler=tuple(filler))


def count_right(task: RecallTask, produced: Sequence[int]) -> int:
    """Return how many questions `produced`, the token ids of a completion, answers rightly.

    A question counts if the first mention of its key is followed by its value. So a completion that skips or repeats a question pays for
    that question alone, not for all that come after it.
    """
    said: dict[int, int] = {}
    for key, value in pairwise(produced):
        said.setdefault(key, value)
    return sum(said.get(key) == value for key, value in (task.pairs[place] for place in task.questions))


def to_text(tokens: Sequence[int]) -> str:
    """Return recall tokens as text that the checkpoint's tokenizer reads back to the same ids; ValueError for any other token."""
    return "".join(_token_text(token) for token in tokens)


def _token_text(token: int) -> str:
    if FIRST_KEY_TOKEN <= token < FIRST_KEY_TOKEN + NUM_KEYS:
        return f"<k{token - FIRST_KEY_TOKEN}>"
    if FIRST_VALUE_TOKEN <= token < FIRST_VALUE_TOKEN + NUM_VALUES:
        return f"<v{token - FIRST_VALUE_TOKEN}>"
    match token:
        case 2042:
            return "<|endoftext|>"
        case 2045:
            return "<list>"
        case 2046:
            return "<ask>"
        case 2047:
            return "<answer>"
        case _:
            raise ValueError(f"token {token} is not a recall token")
