"""What has been shown to work where ranks share the blocks of a sequence (dcp above 1).

Fail-closed: a setting that does not stand here, such as one that is new, may only have its default there.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

import msgspec

from common.worker.settings import WorkerSettings

_ANY: Final = None
_ON_CPU: Final[frozenset[object]] = frozenset({"cpu"})

WITH_DCP: Final[Mapping[str, frozenset[object] | None]] = {
    **dict.fromkeys(
        (
            # Names, places, times and bounds: no rank computes anything else for them.
            *(
                "worker_id",
                "model",
                "served_model_name",
                "nats_url",
                "nats_replicas",
                "log_level",
                "admin_host",
                "admin_port",
            ),
            *("max_waiting", "reserve_wait_s", "prompt_buffer_tokens", "collective_timeout_ms", "release_timeout_ms"),
            *("deadline_grace_s", "drain_timeout_s", "failpoints", "engine"),
            # Sizes, and how the caches are cut: the layout is the same arithmetic for all of them.
            *("tp", "dp", "dcp", "dcp_interleave", "block_size", "num_blocks", "num_slots", "max_step_tokens"),
            *("prefill_chunk_tokens", "reserve_output_tokens", "num_staging_rows", "dtype"),
            # What other rules decide.
            *("chunked_prefill", "experimental_dcp_chunked_prefill", "mix_batch"),
            # How bytes and partial results travel.
            *("collectives", "transport", "transport_dir", "transport_host", "transport_advertise_host"),
            *("transfer", "pull", "parallel_shard_pull", "verify_cache"),
            # Guesses: the draft head's cache is cut like the model's (that it is not whole, says a rule of its own); look-ups need none.
            *("num_speculative_tokens", "drafter", "mtp_draft_body_tp1"),
        ),
        _ANY,
    ),
    "device": _ON_CPU,
}


def not_validated(settings: WorkerSettings) -> tuple[str, ...]:
    """The settings whose values have not been shown to work with dcp above 1."""
    defaults = _defaults(type(settings))
    return tuple(key for key in defaults if not _is_validated(key, getattr(settings, key), defaults[key]))


@lru_cache(maxsize=8)
def _defaults(struct: type[WorkerSettings]) -> Mapping[str, object]:
    return {field.name: field.default for field in msgspec.structs.fields(struct)}


def _is_validated(key: str, value: object, default: object) -> bool:
    if key not in WITH_DCP:
        return value == default
    allowed = WITH_DCP[key]
    return allowed is None or value in allowed
