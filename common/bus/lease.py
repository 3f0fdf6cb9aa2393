"""A lease in a bucket: of all who want it one holds it, and knows by itself when it does not any more.

The bucket's ttl is the lease's, and the value is renewed by `update`: a ttl of a single message would be lost with the
first renewal. No watch tells of expiry, so whoever waits polls. A write whose outcome is unknown never begins or prolongs
a term: what it left behind is read, and only a write that was acknowledged counts, from the moment it was sent.

If the server loses its store, a second holder can begin before the first one notices, at its next renewal: then the larger
fence decides.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from common.bus.errors import BusError, BusTimeout, BusUnavailable, RevisionConflict
from common.bus.lease_term import REVISION_BITS, Term, fence_of
from common.bus.port import Bucket
from common.runtime.clock import Clock, Deadline
from common.runtime.lifecycle import Log
from contracts.codec import decode, encode
from contracts.errors import CodecError
from contracts.leases import LeaseValue

_POLL_SHARE: Final = 0.1
_RETRY_SHARE: Final = 0.05
_TRY_SHARE: Final = 0.15


class Lease:
    """One candidate for the lease `key`. `ttl_s` is the bucket's. Not for use by two tasks at once."""

    def __init__(self, bucket: Bucket, clock: Clock, log: Log, *, key: str, value: LeaseValue, ttl_s: float) -> None:
        self._bucket = bucket
        self._clock = clock
        self._log = log
        self._key = key
        self._value = value
        self._ttl_s = ttl_s
        self._term: Term | None = None
        self._holder = ""

    @property
    def term(self) -> Term | None:
        """The term that is held now, by this process's own clock."""
        term = self._term
        return term if term is not None and term.is_held(self._clock.monotonic()) else None

    @property
    def is_overdue(self) -> bool:
        """Whether nothing tells that the bucket still answers: no term is held, or its renewal is late."""
        term = self.term
        return term is None or term.is_overdue(self._clock.monotonic())

    async def try_acquire(self) -> Term | None:
        """Take the lease if nobody has it, and return the term. None if somebody has, or got it first.

        Raises BusUnavailable or BusTimeout if the bucket cannot be asked, StorageRefused if it will not be written.
        """
        self._term = None
        self._holder = ""
        entry = await self._bucket.get(self._key)
        if entry is not None and not self._is_mine(entry.value):
            self._holder = _holder_of(entry.value)
            return None
        epoch = await self._bucket.epoch()
        sent_at = self._clock.monotonic()
        try:
            if entry is None:
                revision = await self._bucket.create(self._key, encode(self._value))
            else:  # an earlier try of ours got through unheard
                revision = await self._bucket.update(self._key, encode(self._value), last=entry.revision)
        except RevisionConflict:
            return None
        if await self._bucket.epoch() != epoch:
            return None  # the store was lost in between: the number of the term would be of the wrong life
        self._term = Term(ttl_s=self._ttl_s, fence=fence_of(epoch, revision), revision=revision, renewed_at=sent_at)
        return self.term

    async def acquire(self, stands_by: Callable[[str], None] = lambda _holder: None) -> Term:
        """Wait until the lease is free and taken, however long that is. Raises StorageRefused.

        `stands_by` is called whenever it was found to be somebody else's, with the holder's name; "" if that is unknown.
        """
        while True:
            try:
                term = await self.try_acquire()
            except (BusUnavailable, BusTimeout) as error:
                self._log.info("lease_not_asked", key=self._key, error_code=error.code, reason=error.message)
            else:
                if term is not None:
                    return term
                stands_by(self._holder)
            await self._clock.sleep(_POLL_SHARE * self._ttl_s)

    async def keep(self) -> str:
        """Renew for as long as that works, and return why the term is over: at its end by the own clock at the latest."""
        reason = "it was not held"
        while (term := self.term) is not None:
            deadline = Deadline(self._clock, term.ends_at)
            try:
                async with deadline.timeout():
                    await self._clock.sleep(max(0.0, term.renew_at - self._clock.monotonic()))
                    lost = await self._renew(term)
            except TimeoutError:
                lost = "it could not be renewed in time"
            if lost:
                reason = lost
                self._term = None
        return reason

    async def _renew(self, term: Term) -> str:
        """Write until it is acknowledged; or say why the lease is lost. The caller's timeout bounds it."""
        last = term.revision
        data = encode(msgspec.structs.replace(self._value, fence=term.fence))
        while True:
            sent_at = self._clock.monotonic()
            try:
                async with Deadline.after(self._clock, _TRY_SHARE * self._ttl_s).timeout():
                    revision = await self._bucket.update(self._key, data, last=last)
            except RevisionConflict:
                entry = await self._read()
                if entry is None:
                    return "it has expired"
                value, last = entry
                if not self._is_mine(value):
                    return "somebody else holds it"
            except (BusError, TimeoutError) as error:
                self._log.info("lease_not_renewed", key=self._key, error=repr(error))
                await self._clock.sleep(_RETRY_SHARE * self._ttl_s)
            else:
                if await self._is_of_another_life(term):
                    return "the store was lost, and the term with it"
                self._term = term.renewed(revision=revision, sent_at=sent_at)
                return ""

    async def _is_of_another_life(self, term: Term) -> bool:
        """Whether the store was lost since the term began: revisions have begun anew then, and a write over one of them says nothing.

        The caller's timeout bounds it.
        """
        while True:
            try:
                return fence_of(await self._bucket.epoch(), term.fence & (1 << REVISION_BITS) - 1) != term.fence
            except BusError:
                await self._clock.sleep(_RETRY_SHARE * self._ttl_s)

    async def _read(self) -> tuple[bytes, int] | None:
        while True:
            try:
                entry = await self._bucket.get(self._key)
            except BusError:
                await self._clock.sleep(_RETRY_SHARE * self._ttl_s)
            else:
                return None if entry is None else (entry.value, entry.revision)

    async def release(self) -> None:
        """Give the lease back, so that the next one need not wait for it to expire. Without a term this does nothing.

        Raises `BusError`: then it expires by itself.
        """
        term, self._term = self._term, None
        if term is None:
            return
        try:
            await self._bucket.delete(self._key, last=term.revision)
        except RevisionConflict:
            return  # it is somebody else's already

    def _is_mine(self, value: bytes) -> bool:
        """Whether this very start wrote it, in whichever of its terms."""
        try:
            found = decode(value, LeaseValue)
        except CodecError:
            return False
        return (found.holder, found.start) == (self._value.holder, self._value.start)


async def fence_of_holder(bucket: Bucket, key: str) -> int | None:
    """The fence of the term in which the lease is held now; None if nobody holds it. Raises `BusError` and `CodecError`."""
    entry = await bucket.get(key)
    if entry is None:
        return None
    return decode(entry.value, LeaseValue).fence or fence_of(await bucket.epoch(), entry.revision)


def _holder_of(value: bytes) -> str:
    """Who wrote it, as it names itself; "" for what this build cannot read."""
    try:
        return decode(value, LeaseValue).holder
    except CodecError:
        return ""
