"""Which settings of a worker only some roles look at. Pure.

Set for everybody, such a setting reaches those whom it concerns. Given to one worker or one role that never looks at it, it would do
nothing, and whoever gave it believes that it does: it is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from common.runtime.settings import SettingsProblem
from contracts.workers import WorkerRole

_DECODE: Final = (WorkerRole.DECODE,)
_MIXED: Final = (WorkerRole.MIXED,)
_GENERATING: Final = (WorkerRole.DECODE, WorkerRole.MIXED)
_COMPUTING_PROMPTS: Final = (WorkerRole.PREFILL, WorkerRole.MIXED)

ROLES_OF: Final[Mapping[str, tuple[WorkerRole, ...]]] = MappingProxyType(
    {
        "mix_batch": _MIXED,
        "experimental_dcp_chunked_prefill": _MIXED,
        "prefill_chunk_tokens": _COMPUTING_PROMPTS,
        "prompt_buffer_tokens": _COMPUTING_PROMPTS,
        "reserve_output_tokens": _GENERATING,
        "reserve_wait_s": _DECODE,
        "transfer": _DECODE,
        "pull": _DECODE,
        "parallel_shard_pull": _DECODE,
        "num_staging_rows": _DECODE,
        "verify_cache": _DECODE,
    }
)
"""The roles that look at a setting; all of them at one that is not here. What `dcp` may be in a role is a rule of its own."""

RULE_NAME: Final = "setting_of_another_role"


def concerns(key: str, role: WorkerRole) -> bool:
    """Whether a worker of this role looks at a setting."""
    return role in ROLES_OF.get(key, tuple(WorkerRole))


def misplaced(role: WorkerRole) -> Callable[[str, str, str], SettingsProblem | None]:
    """What `common.runtime.settings.load` is to say of a key addressed to a worker of `role` alone: takes its key, label and value."""

    def problem(key: str, label: str, value: str) -> SettingsProblem | None:
        if concerns(key, role):
            return None
        owners = ROLES_OF[key]
        return SettingsProblem(
            key=label,
            value=value,
            rule=f"only {' and '.join(owners)} workers look at it; this is a {role} worker",
            name=RULE_NAME,
            remedy=f"give it to {' or '.join(f'--{owner}' for owner in owners)}, or leave it out",
        )

    return problem
