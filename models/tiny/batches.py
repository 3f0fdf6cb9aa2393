"""What one training step sees: rows of text, and rows of recall tasks whose lists grow as they are mastered."""

import random
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor

from loadtest import recall
from models.tiny.tokenizer import TURN_END, TURN_START

IGNORED = -100
_ROW_TOKENS = 256
_LONG_ROW_TOKENS = 1024
_LONGEST_FILLER = 640
_MOST_QUESTIONS = 16


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Inputs and the token that follows each, both `[b, t]`; targets are IGNORED where no loss is wanted."""

    inputs: Tensor
    targets: Tensor

    @property
    def is_recall(self) -> Tensor:
        """Where a recall key or value is the target, `[b, t]`."""
        return self.targets >= recall.FIRST_KEY_TOKEN


class TextSource:
    """The training text as tokens: one long stream, and single paragraphs for chat turns."""

    def __init__(self, chapters: list[str], tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._paragraphs = [
            [encoded.ids for encoded in tokenizer.encode_batch(chapter.split("\n"))] for chapter in chapters
        ]
        stream: list[int] = []
        for encoded in tokenizer.encode_batch(chapters):
            stream += [*encoded.ids, recall.END_TOKEN]
        self.stream = torch.tensor(stream)
        self._turn_ends = self.encode(f"{TURN_END}\n")
        self._turn_starts = {role: self.encode(f"{TURN_START}{role}\n") for role in ("system", "user", "assistant")}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of text; added tokens written out in it are recognised."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def turn(self, role: str, content: list[int]) -> list[int]:
        """Return a ChatML turn."""
        return [*self._turn_starts[role], *content, *self._turn_ends]

    def window(self, rng: random.Random, length: int) -> list[int]:
        """Return consecutive tokens from anywhere in the stream."""
        start = rng.randrange(len(self.stream) - length)
        window: list[int] = self.stream[start : start + length].tolist()
        return window

    def chat(self, rng: random.Random, length: int) -> list[int]:
        """Return conversations in which each turn continues the text of the one before, cut at length."""
        row: list[int] = []
        while len(row) < length:
            chapter = rng.choice(self._paragraphs)
            place = rng.randrange(len(chapter))
            if rng.random() < 0.3:
                row += self.turn(
                    "system", self.encode(rng.choice(("Continue the text.", "You are a helpful assistant.")))
                )
            for number, paragraph in enumerate(chapter[place : place + 2 * rng.randint(1, 3)]):
                row += self.turn("assistant" if number % 2 else "user", paragraph)
            row.append(recall.END_TOKEN)
        return row[:length]

    def batch(self, rng: random.Random, num_tokens: int) -> Batch:
        """Return num_tokens of text; an eighth of the batches have long rows, an eighth of the short rows are chats."""
        length = _LONG_ROW_TOKENS if rng.random() < 0.125 else _ROW_TOKENS
        rows = [
            self.chat(rng, length + 1)
            if length == _ROW_TOKENS and rng.random() < 0.125
            else self.window(rng, length + 1)
            for _ in range(max(1, num_tokens // length))
        ]
        tokens = torch.tensor(rows)
        return Batch(inputs=tokens[:, :-1], targets=tokens[:, 1:])


@dataclass(kw_only=True)
class Curriculum:
    """How long the lists are: half as long again whenever nine of ten keys and values are right at the current length."""

    num_pairs: int = 4
    longest: int = 96
    recent: list[float] = field(default_factory=list)

    def record(self, accuracy: float) -> None:
        """Note the share of right keys and values of one batch at the current length."""
        self.recent = [*self.recent[-3:], accuracy]
        if len(self.recent) == 4 and sum(self.recent) / 4 > 0.9 and self.num_pairs < self.longest:
            self.num_pairs = min(self.longest, self.num_pairs + (self.num_pairs + 1) // 2)
            self.recent = []


def recall_batch(rng: random.Random, text: TextSource, num_pairs: int, num_tokens: int, *, asked_share: float) -> Batch:
    """Return recall tasks of this length, about num_tokens in all.

    `asked_share` of the rows have the form of `loadtest.recall`, three in ten of them as a chat; the others ask every key one after
    another without announcing them, with loss on the values only (most lessons a token). Text may stand before the lists of a batch.
    """
    # Text in front leaves room for few tasks, which is worth it only once they are hard.
    filler_length = rng.randrange(_LONGEST_FILLER) if num_pairs >= 16 and rng.random() < 0.15 else 0
    rows: list[tuple[list[int], list[bool]]] = []
    size = filler_length + 4 * num_pairs + 4
    for _ in range(max(2, num_tokens // size)):
        announced = rng.random() < asked_share
        asked = rng.randint(1, min(num_pairs, _MOST_QUESTIONS)) if announced else num_pairs
        filler = text.window(rng, filler_length)
        task = recall.make_task(
            rng.getrandbits(62), num_pairs=num_pairs, num_questions=asked, filler=filler, split="train"
        )
        if not announced:
            rows.append(_unannounced_row(task))
        elif rng.random() < 0.3:
            rows.append(_chat_row(task, text))
        else:
            prompt, answer = list(task.prompt), list(task.answer)
            rows.append(([*prompt, *answer, recall.END_TOKEN], [False] * len(prompt) + [True] * (len(answer) + 1)))
    return _pad(rows)


def _unannounced_row(task: recall.RecallTask) -> tuple[list[int], list[bool]]:
    """Return the tokens, and which of them are to be learned: nothing says which key comes next, so values alone."""
    prompt, answer = list(task.prompt), list(task.answer)
    asked_from = prompt.index(recall.ASK_TOKEN)
    row = [*prompt[:asked_from], recall.ANSWER_TOKEN, *answer]
    return row, [False] * (asked_from + 1) + [False, True] * (len(answer) // 2)


def _chat_row(task: recall.RecallTask, text: TextSource) -> tuple[list[int], list[bool]]:
    """Return the tokens of a question and a reply in ChatML, and which of them are to be learned: the reply."""
    prompt, answer = list(task.prompt), list(task.answer)
    filler = len(task.filler)
    question = [*prompt[:filler], *text.turn("user", prompt[filler:-1])]
    reply = text.turn("assistant", [recall.ANSWER_TOKEN, *answer])
    return [*question, *reply], [False] * len(question) + [True] * len(reply)


def _pad(rows: list[tuple[list[int], list[bool]]]) -> Batch:
    longest = max(len(row) for row, _ in rows)
    tokens = torch.full((len(rows), longest), recall.END_TOKEN)
    wanted = torch.zeros(len(rows), longest, dtype=torch.bool)
    for place, (row, learned) in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row)
        wanted[place, : len(row)] = torch.tensor(learned)
    return Batch(inputs=tokens[:, :-1], targets=tokens.masked_fill(~wanted, IGNORED)[:, 1:])
