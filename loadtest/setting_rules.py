"""Rules that several commands' settings share."""

from __future__ import annotations

from pathlib import Path

from contracts.errors import InvalidValueError


def check_lengths(lengths: tuple[int, ...]) -> None:
    """Raise `InvalidValueError` unless there is a prompt length, each is 1 or more, and none is there twice."""
    if not lengths:
        raise InvalidValueError(field="prompt_tokens", value=lengths, rule="at least one length")
    for length in lengths:
        check_least("prompt_tokens", length, 1)
    if len(set(lengths)) != len(lengths):
        raise InvalidValueError(field="prompt_tokens", value=lengths, rule="each length once")


def check_model(model: Path) -> None:
    """Raise `InvalidValueError` unless there is a checkpoint."""
    if not (model / "config.json").is_file():
        raise InvalidValueError(field="model", value=str(model), rule="a folder with a checkpoint's config.json")


def check_least(field: str, value: int, least: int) -> None:
    """Raise `InvalidValueError` for a number that is too small."""
    if value < least:
        raise InvalidValueError(field=field, value=value, rule=f"{least} or more")


def check_above_zero(field: str, value: float) -> None:
    """Raise `InvalidValueError` for zero and below, and for what is no number."""
    if not 0 < value < float("inf"):
        raise InvalidValueError(field=field, value=value, rule="above 0 and finite")
