"""A change of a worker's setting, as people read it."""

from __future__ import annotations

from contracts.workers import SettingEvent


def render_setting_event(event: SettingEvent) -> str:
    """One event on one line, as `pdmesh events` prints it."""
    words = (event.at, event.instance, event.event.value, f"{event.key}={event.value}", f"before={event.before}")
    return "  ".join((*words, *([f"by={event.by}"] if event.by else [])))
