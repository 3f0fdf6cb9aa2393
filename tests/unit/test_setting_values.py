"""One setting's value: what a wrong choice is told, and which choices a type has."""

from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
import pytest

from common.runtime.setting_values import choices, read_json, read_text
from common.runtime.settings import SettingsError, load
from common.worker.settings import WorkerSettings


class Shade(StrEnum):
    """Two choices, in an order that is not the alphabet's."""

    LIGHT = "light"
    DARK = "dark"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Shade, "one of light, dark"),
        (Literal["b", "a"], "one of a, b"),
        (Shade | None, "one of light, dark"),
        (Annotated[Shade, msgspec.Meta(description="how bright")], "one of light, dark"),
        (tuple[Shade, ...], "one of light, dark"),
    ],
)
def test_a_wrong_choice_is_told_the_choices(kind: Any, expected: str) -> None:
    """The rule names every value that is allowed, whether the value came as text or from a JSON file."""
    with pytest.raises(ValueError, match=f"^{expected}$"):
        read_text("loud", kind)
    with pytest.raises(ValueError, match=f"^{expected}$"):
        read_json(["loud"] if kind == tuple[Shade, ...] else "loud", kind)


def test_what_is_no_choice_keeps_its_own_rule() -> None:
    """A type is told with all of its bounds, whichever is broken, and has no choices."""
    for bounds, rule in (
        (msgspec.Meta(ge=1), "a whole number >= 1"),
        (msgspec.Meta(ge=1, le=8), "a whole number 1 to 8"),
        (msgspec.Meta(gt=0, le=8), "a whole number > 0 and <= 8"),
        (msgspec.Meta(ge=1, description="how many"), "a whole number >= 1"),
    ):
        for text in ("0", "many"):
            with pytest.raises(ValueError, match=rf"^{rule}$"):
                read_text(text, Annotated[int, bounds])
    with pytest.raises(ValueError, match=r"^a whole number 1 to 8$"):
        read_json(9, Annotated[int, msgspec.Meta(ge=1, le=8)])
    with pytest.raises(ValueError, match=r"^a number 0 to 1$"):
        read_text("2", Annotated[float, msgspec.Meta(ge=0, le=1)])
    for kind, rule in ((bool, "0, 1, true or false"), (int, "a whole number"), (float, "a number")):
        with pytest.raises(ValueError, match=rf"^{rule}$"):
            read_text("maybe", kind)
    with pytest.raises(ValueError, match=r"^text$"):
        read_json(1, Shade)
    assert choices(int) == choices(str | None) == ()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("transport=udp", "one of shm, tcp"),
        ("engine=gpu", "one of ranks, fake"),
        ("collectives=nccl", "one of shared_memory, gloo"),
        ("log_level=loud", "one of debug, error, info, warning"),
    ],
)
def test_every_choice_of_a_worker_names_its_values(spec: str, expected: str) -> None:
    """A SPEC with a wrong choice is refused with field, value and what there is to choose from."""
    with pytest.raises(SettingsError) as error:
        load(WorkerSettings, role="decode", spec=f"worker_id=decode-0,model=tiny,{spec}", environ={})
    key, _, value = spec.partition("=")
    assert [(each.key, each.value, each.rule) for each in error.value.problems] == [(key, value, expected)]
