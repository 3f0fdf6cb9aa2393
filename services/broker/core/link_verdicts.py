"""What prefill workers say of their links, as far as it forbids a handoff."""

from __future__ import annotations

from typing import Final

from contracts.errors import ErrorCode, PdmeshError
from contracts.links import LinkRecord, LinkState
from contracts.requests import WorkerRef

MAX_VERDICTS: Final = 65536
"""Beyond these the oldest is forgotten: the bucket may hold what no worker of ours has written."""


class LinkVerdicts:
    """The pairs that `PD_LINKS` calls refused or about to end, each for two starts of two workers.

    A pair without a verdict may be tried: the table may be behind, and both workers check for themselves.
    """

    def __init__(self) -> None:
        self._records: dict[str, LinkRecord] = {}

    def __len__(self) -> int:
        return len(self._records)

    def heard(self, key: str, record: LinkRecord) -> None:
        """Note what a key holds."""
        if record.state in {LinkState.REFUSED, LinkState.UNLINKING}:
            self._records[key] = record
            if len(self._records) > MAX_VERDICTS:
                del self._records[next(iter(self._records))]
        else:
            self._records.pop(key, None)

    def left(self, key: str) -> None:
        """Note that a key was deleted. An unknown one is fine."""
        self._records.pop(key, None)

    def drop(self, worker: WorkerRef) -> None:
        """Forget what was said of one start of a worker."""
        self._records = {
            key: record for key, record in self._records.items() if worker not in {record.prefill, record.decode}
        }

    def check(self, prefill: WorkerRef, decode: WorkerRef, key: str) -> None:
        """Raise INCOMPATIBLE_WORKERS with the reason of a refused pair, DRAINING for one that is being unlinked."""
        record = self._records.get(key)
        if record is None or (record.prefill, record.decode) != (prefill, decode):
            return
        pair = f"{prefill.worker_id} and {decode.worker_id}"
        if record.state is LinkState.REFUSED:
            raise PdmeshError(f"{pair} are not linked: {record.reason}", code=ErrorCode.INCOMPATIBLE_WORKERS)
        raise PdmeshError(f"{pair} are being unlinked", code=ErrorCode.DRAINING)
