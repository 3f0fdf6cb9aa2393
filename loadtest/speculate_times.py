"""What a process that guesses and verifies tells of its work. No torch."""

from __future__ import annotations

import msgspec


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """How long something took: by the clock, and of its thread's processor time, both in ns."""

    wall_ns: int
    cpu_ns: int


class PassTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What passes cost by themselves: inputs laid out, the pass, and its tokens chosen; nothing else that a step has to do.

    `decode` is one token of each sequence, `verify` so many guesses beside it, `draft` one guess of each sequence; None without
    guesses.
    """

    decode: Spent
    verify: Spent | None = None
    draft: Spent | None = None


class Coupling(msgspec.Struct, frozen=True, kw_only=True):
    """How often guesses are right, by the way in which guess and choice are drawn: sums over `count` of them.

    `race` is how this engine draws, `rejection` what speculative sampling accepts, which is the most that is possible; with
    `one_number` both invert their distributions at the same number.
    """

    count: int
    race: float
    rejection: float
    one_number: float


class RunTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of decoding, of all sequences of a batch together.

    They gave `num_tokens` in `num_turns`, a turn being one sequence's share of one step. `num_offered[i]` turns had a guess number
    i + 1 to verify, in `num_right[i]` of them it was right, and all before it. `texts` are what each sequence got.
    """

    spent: Spent
    num_steps: int
    num_turns: int
    num_tokens: int
    num_offered: tuple[int, ...]
    num_right: tuple[int, ...]
    texts: tuple[tuple[int, ...], ...]
