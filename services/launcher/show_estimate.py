"""`pdmesh plan`: what a pair of workers would hold and move, from a model's configuration alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from common.engine.model.config import load_config
from common.runtime.settings import SettingsError, SettingsProblem, load
from common.worker.configuration import rules_of
from common.worker.settings import WorkerSettings
from contracts.errors import InvalidValueError
from contracts.manifest import Dtype
from contracts.rank import DrafterKind
from contracts.workers import WorkerRole
from services.launcher.console import Console
from services.launcher.core.byte_size import read_size
from services.launcher.core.estimate import Estimate, make_estimate
from services.launcher.core.estimate_table import render_estimate
from services.launcher.core.presets import Preset
from services.launcher.core.worker_estimate import WorkerSize
from services.launcher.settings import settings_structs

T = TypeVar("T")

EXIT_SHOWN: Final = 0
_USUAL_TOKENS: Final = 32768


class EstimateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a person asked for, as text. SPECs are those of `pdmesh up`, and so is what a preset says below them."""

    model: str
    prefill: str
    decode: str
    memory: str | None = None
    num_tokens: int | None = None
    overrides: tuple[str, ...] = ()
    preset: Preset | None = None


def show_estimate(request: EstimateRequest, environ: Mapping[str, str], console: Console, *, as_json: bool) -> int:
    """Print the estimate as tables, or as one JSON object. Raises as `estimate_of`."""
    estimate = estimate_of(request, environ)
    if as_json:
        console.show(msgspec.json.format(msgspec.json.encode(estimate), indent=2).decode())
    else:
        console.show(render_estimate(estimate))
    return EXIT_SHOWN


def estimate_of(request: EstimateRequest, environ: Mapping[str, str]) -> Estimate:
    """Check the whole request and work it out. Raises SettingsError that lists what is wrong, each by field, value and rule."""
    problems: list[SettingsProblem] = []
    config = _collect(problems, "--model", lambda: load_config(Path(request.model)))
    memory = request.memory
    memory_bytes = None if memory is None else _collect(problems, "", lambda: read_size("--memory", memory))
    prefill = _collect(problems, "--prefill", lambda: _size(WorkerRole.PREFILL, request.prefill, request, environ))
    decode = _collect(problems, "--decode", lambda: _size(WorkerRole.DECODE, request.decode, request, environ))
    if prefill is not None and decode is not None:
        problems += _differences(prefill, decode)
    if problems or config is None or prefill is None or decode is None:
        raise SettingsError(problems)
    num_tokens = request.num_tokens
    if num_tokens is None:
        num_tokens = min(_USUAL_TOKENS, config.max_position_embeddings)
    work = partial(make_estimate, config, prefill, decode, num_tokens=num_tokens, memory_bytes=memory_bytes)
    found = _collect(problems, "", work)
    if found is None:
        raise SettingsError(problems)
    return found


def _size(role: WorkerRole, spec: str, request: EstimateRequest, environ: Mapping[str, str]) -> WorkerSize:
    """The size that SPEC, `--set`, variables and a preset ask for. Raises SettingsError for what such a worker would not start with."""
    preset = request.preset
    settings = load(
        WorkerSettings,
        role=role,
        spec=spec,
        overrides=(f"worker_id={role}-0", f"model={request.model}", *request.overrides),
        environ=environ,
        also_known=settings_structs().all_keys,
        rules=rules_of(role),
        preset=None if preset is None else (preset.name, preset.settings),
    ).value
    return WorkerSize(
        role=role,
        tp=settings.tp,
        dp=settings.dp,
        dcp=settings.dcp,
        dtype=Dtype(settings.dtype),
        block_size=settings.block_size,
        num_staging_rows=(settings.num_staging_rows or None) if settings.staging_rows_of(role) else 0,
        num_speculative_tokens=settings.depth_of(role),
        keeps_draft=settings.drafter_of(role) is DrafterKind.MTP,
        draft_whole=settings.mtp_draft_body_tp1,
        max_step_tokens=settings.max_step_tokens,
    )


def _differences(prefill: WorkerSize, decode: WorkerSize) -> Iterator[SettingsProblem]:
    for key in ("block_size", "dtype"):
        ours, theirs = getattr(prefill, key), getattr(decode, key)
        if ours != theirs:
            shown = f"prefill {ours}, decode {theirs}"
            yield SettingsProblem(key=key, value=shown, rule="the same on both: a cache is copied, not converted")


def _collect(problems: list[SettingsProblem], place: str, call: Callable[[], T]) -> T | None:
    """What `call` returns, or None with its problems noted, each with the place that it was found in."""
    before = f"{place} " if place else ""
    try:
        return call()
    except SettingsError as error:
        problems += [msgspec.structs.replace(each, key=f"{before}{each.key}") for each in error.problems]
    except InvalidValueError as error:
        problems.append(SettingsProblem(key=f"{before}{error.field}", value=str(error.value), rule=error.rule_text))
    return None
