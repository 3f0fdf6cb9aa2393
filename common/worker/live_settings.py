"""The verb `set`: settings that may change while a worker runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, get_type_hints

import msgspec

from common.bus.port import Bus
from common.runtime.clock import Clock, wall_text
from common.runtime.lifecycle import Log
from common.runtime.setting_values import read_text
from common.runtime.settings import SettingsError, keys_of
from common.worker.core.compatibility import judge
from common.worker.settings import WorkerSettings
from contracts import subjects
from contracts.codec import decode, encode
from contracts.errors import ErrorCode, ErrorInfo
from contracts.workers import SetRefused, SettingChanged, SettingEvent, SettingEventName, SetWorker, WorkerRole

_LOG_LEVEL: Final = "log_level"
_EVERYWHERE: Final = (_LOG_LEVEL,)
_OF_ROLE: Final[dict[WorkerRole, tuple[str, ...]]] = {
    WorkerRole.PREFILL: _EVERYWHERE,
    WorkerRole.DECODE: (*_EVERYWHERE, "parallel_shard_pull"),
    WorkerRole.MIXED: _EVERYWHERE,
}
"""What may change. Everything else has been built into memory, ranks or connections by the time that somebody asks."""


class LiveSettings:
    """The settings as they are now. Whoever obeys a live one reads it here each time. A change is an event and a line in the log."""

    def __init__(
        self,
        settings: WorkerSettings,
        role: WorkerRole,
        incarnation: str,
        *,
        bus: Bus,
        clock: Clock,
        log: Log,
        set_log_level: Callable[[str], None],
    ) -> None:
        self._now = settings
        self._role = role
        self._incarnation = incarnation
        self._bus = bus
        self._clock = clock
        self._keys = _OF_ROLE[role]
        self._log = log
        self._set_log_level = set_log_level
        self._count = 0

    @property
    def now(self) -> WorkerSettings:
        """All settings, with what was changed."""
        return self._now

    async def answer(self, data: bytes) -> msgspec.Struct:
        """Change one setting, or refuse with its name, the value and the rule."""
        asked = decode(data, SetWorker)
        problem = self._problem(asked)
        if problem is not None:
            message = f"{asked.key}: {asked.value!r} is not allowed; the rule is: {problem}"
            self._log.info("setting_refused", key=asked.key, rule=problem)
            return SetRefused(error=ErrorInfo(code=ErrorCode.INVALID_REQUEST, message=message, param=asked.key))
        before, self._now = self._now, self._changed(asked)
        if asked.key == _LOG_LEVEL:
            self._set_log_level(self._now.log_level)
        told = [_shown(getattr(each, asked.key)) for each in (before, self._now)]
        self._log.info("setting_changed", key=asked.key, before=told[0], value=told[1], by=asked.by)
        self._publish(asked, before=told[0], value=told[1])
        return SettingChanged(worker_id=self._now.worker_id, key=asked.key, before=told[0], value=told[1])

    def _publish(self, asked: SetWorker, *, before: str, value: str) -> None:
        """Tell people. It never waits; an event that is dropped is counted by the bus."""
        event = SettingEvent(
            event=SettingEventName.SETTING_CHANGED,
            service=self._role,
            instance=self._now.worker_id,
            incarnation=self._incarnation,
            at=wall_text(self._clock),
            at_ns=self._clock.monotonic_ns(),
            key=asked.key,
            before=before,
            value=value,
            by=asked.by,
        )
        self._count += 1
        subject = subjects.setting_event(self._role, self._now.worker_id, event.event)
        # A repeat is dropped by its id: two starts of one worker must not share any.
        message_id = f"setting-{self._now.worker_id}-{self._incarnation}-{self._count}"
        self._bus.publish_event(subject, encode(event), message_id=message_id)

    def _problem(self, asked: SetWorker) -> str | None:
        if asked.key not in self._keys:
            known = asked.key in keys_of(WorkerSettings)
            why = "it is read at the start alone" if known else "there is no such setting"
            return f"one of {', '.join(self._keys)} may change while this worker runs; {why}"
        try:
            changed = self._changed(asked)
        except SettingsError as error:
            return error.problems[0].rule
        except ValueError as error:
            return str(error)
        allowed = judge(self._now, self._role, None).refusals
        return next((each.text for each in judge(changed, self._role, None).refusals if each not in allowed), None)

    def _changed(self, asked: SetWorker) -> WorkerSettings:
        kind = get_type_hints(WorkerSettings, include_extras=True)[asked.key]
        return msgspec.structs.replace(self._now, **{asked.key: read_text(asked.value, kind)})


def _shown(value: Any) -> str:
    """As it is written on a command line."""
    return str(int(value)) if isinstance(value, bool) else str(value)
