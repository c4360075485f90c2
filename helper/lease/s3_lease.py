"""The sender lease as one object in an object store, replaced with conditional writes.

The object is created with `If-None-Match: *` and replaced with `If-Match: <ETag>`, so one of two concurrent writers is
refused. If the response to a write is lost, the object is read: the write succeeded if it contains the bytes that were
sent.

Clocks of different hosts are never compared. A holder writes a new version long before its lease expires. If a version
does not change for its entire validity, measured by the observer's monotonic clock from its first *observation*, its
holder has already stopped. The clocks must run at the same rate but may show different times.

A host that finds no object creates one without a holder and waits as it does for a crashed host, because the object may
have been deleted while a host held the lease.

A process that is restarted after a crash is a new holder even if the host name is the same, because a clone of the
machine has the same name. It waits until the lease expires. A process that stops properly releases the lease.

Requests per hour with `LeaseKeeper` and a lease of 10 s: 1,080 writes of the holder (three per lease), at most 3,600
reads of each waiting host (ten per lease), and 42 at start, of which 40 test the store.
docs/decisions/0013-object-store.md has the cost.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from secrets import token_hex
from typing import Annotated, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from helper.clock import Clock
from helper.config.sections import LEASE_SECONDS_RANGE, S3Section
from helper.config.value_types import BucketLocation
from helper.core.json_records import first_error
from helper.errors import BucketError, BucketRefused, BucketThrottled, LeaseError
from helper.lease import Lease, Moment, Term
from helper.object_store import Bucket, StoredObject, open_bucket

_MAX_BYTES: Final = 4096


class LeaseRecord(BaseModel):
    """One version of the lease object.

    Attributes:
        holder: random identifier of the holding process, drawn at its start (hex).
        fence: fencing token of this acquisition; a version without a holder has one below all later tokens.
        beat: number of versions this process has written.
        mark: random for each version (hex), so that all versions differ, even if the machine was cloned.
        seconds: validity from when this version was written; limited, so that an incorrect object cannot block all
            hosts indefinitely.
        written: wall clock of the holder at the write (Unix seconds), for display only.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    format: Literal["svote-helper sender lease 1"] = "svote-helper sender lease 1"
    holder: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    host: Annotated[str, Field(max_length=256)]
    fence: Annotated[int, Field(ge=0, le=2**62)]
    beat: Annotated[int, Field(ge=0, le=2**62)]
    mark: Annotated[str, Field(pattern="^[0-9a-f]{16}$")] = Field(default_factory=lambda: token_hex(8))
    seconds: Annotated[float, Field(gt=0, le=LEASE_SECONDS_RANGE[1], allow_inf_nan=False)]
    released: bool = False
    written: Annotated[float, Field(allow_inf_nan=False)]

    def to_bytes(self) -> bytes:
        """Return the content of the object."""
        return self.model_dump_json(indent=2).encode() + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes) -> LeaseRecord:
        """Parse the content of an object.

        Raises:
            ValueError: it is not a lease.
        """
        if len(content) > _MAX_BYTES:
            raise ValueError(f"has {len(content)} bytes")
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            field, reason = first_error(error)
            raise ValueError(f"{field or 'it'}: {reason}") from None


T = TypeVar("T")

MARGIN_FRACTION: Final = 0.2
"""Fraction of a lease by which its holder considers it expired early, as clocks run at slightly different rates."""
CHECK_SUFFIX: Final = ".check"
"""Suffix of a second object, on which conditional writes are tested."""
_CHECK_ROUNDS: Final = 4
_CHECK_WRITES: Final = 8
"""Concurrent writes with one condition in each of `_CHECK_ROUNDS` rounds, of which a store may accept at most one."""
_CHECK_BYTES: Final = 256 << 10
"""Length of these writes. The longer a write takes, the more often a store that is not atomic accepts two of
them: versitygw 1.7 did in a quarter of the rounds with 64 KiB, and in half of them with this length."""
_CHECK_ATTEMPTS: Final = 5
CHECK_PAUSE_SECONDS: Final = 1.2
"""Pause before a test of a store that limits the rate of writes is repeated; some accept one per second and object."""
_WRONG_TAG: Final = f'"{"0" * 32}"'
NO_HOLDER: Final = "0" * 32
"""Holder of an object that was created without one."""
_WRITE_ATTEMPTS: Final = 2
"""Attempts of a conditional write that is refused although its condition was met."""
_MAX_UNCONFIRMED: Final = 50
"""Maximum number of own versions remembered while no response to a write arrives."""
_REFUSED_WRITES: Final = "the object store refused valid writes: another write was in progress each time"


class S3Lease(Lease):
    """A `Lease` in a bucket.

    Args:
        bucket: stores the lease; each of its calls must finish within a quarter of `seconds`, because a method of the
            lease makes up to four.
        name: name of the object, the same for all hosts that share the queue or have a copy of it.
    """

    def __init__(self, bucket: Bucket, name: str, *, host: str, clock: Clock, seconds: float) -> None:
        self.seconds = self.holder_seconds = seconds
        self._bucket = bucket
        self._name = name
        self._host = host[:256]
        self._clock = clock
        self._term = Term(clock, seconds=seconds - seconds * MARGIN_FRACTION)
        self._observed_tag = ""  # ETag of the version observed last
        self._observed_since = 0.0  # monotonic time after the response that showed it first
        self._process_id = secrets.token_hex(16)
        self._tag = ""  # ETag of this process's version, "" without a lease
        self._unconfirmed: list[bytes] = []  # own versions since the last response to a write; any may be stored
        self._beat = 0
        self._check_rounds_left = _CHECK_ROUNDS  # of the test of the store
        self._fault = ""  # why the store cannot hold a lease, as far as the checks have shown

    @property
    def is_held(self) -> bool:
        """See `Lease`."""
        return self._term.is_running

    async def acquire(self) -> bool:
        """Acquire the lease if no host holds it.

        Call it repeatedly while another host holds the lease: expiry is detected from a version that does not change.

        Returns:
            False if another host holds it or was faster; `holder` is its name, "" if the object has no holder yet.

        Raises:
            LeaseError: the outcome is unknown, or the store ignores write conditions.
        """
        await self._check_conditional_writes()
        for _ in range(_WRITE_ATTEMPTS):
            stored = await self._fetch()
            if stored is None:
                await self._create_without_holder()
                return False
            record = self._parse_record(stored)
            if not self._is_free(stored, record):
                self.holder, self.holder_seconds = record.host, record.seconds
                return False
            fence = max(self.fence, record.fence) + 1
            requested_at = self._term.read_clocks()
            if tag := await self._write(stored.etag, self._create_record(fence)):
                self._start_term(fence, tag, requested_at)
                return True
        raise LeaseError(_REFUSED_WRITES)

    async def renew(self) -> bool:
        """See `Lease`."""
        written = await self._replace_own()
        if written is not None:
            self._start_term(self.fence, *written)
        return written is not None

    async def release(self) -> None:
        """See `Lease`."""
        self._term.end()
        if await self._replace_own(released=True) is not None:
            self._tag = ""
            self._unconfirmed.clear()

    async def _replace_own(self, *, released: bool = False) -> tuple[str, Moment] | None:
        """Replace the version of this process. Returns its ETag and the moment of the request; None if it is lost."""
        for _ in range(_WRITE_ATTEMPTS):
            if not self._tag:
                return None
            requested_at = self._term.read_clocks()
            if tag := await self._write(self._tag, self._create_record(self.fence, released=released)):
                return tag, requested_at
            await self._check_ownership()
        if self._tag:
            raise LeaseError(_REFUSED_WRITES)
        return None

    def _start_term(self, fence: int, tag: str, requested_at: Moment) -> None:
        self._tag, self.fence, self.holder = tag, fence, ""
        self._unconfirmed.clear()
        self._term.start(requested_at)

    def _is_free(self, stored: StoredObject, record: LeaseRecord) -> bool:
        """Return whether the lease has expired, was released, or is this process's own."""
        # Compare the bytes, not the process identifier: a clone of a running machine has the same identifier.
        is_own = stored.etag == self._tag or stored.body in self._unconfirmed
        observed_seconds = self._clock.monotonic() - self._observed_since
        return is_own or record.released or observed_seconds >= max(record.seconds, self.seconds)

    def _observe(self, tag: str) -> None:
        if tag != self._observed_tag:
            self._observed_tag, self._observed_since = tag, self._clock.monotonic()

    async def _create_without_holder(self) -> None:
        """Create the missing object without a holder. It expires like the lease of a host that has just crashed.

        Its fencing token is the Unix time, which is greater than any token of a deleted object: tokens grow by far
        less than one per second.
        """
        fence = max(self.fence, int(self._clock.now()), 1)
        record = LeaseRecord(
            holder=NO_HOLDER, host="", fence=fence, beat=0, seconds=self.seconds, written=self._clock.now()
        )
        if tag := await self._write("", record):
            self._observe(tag)
        self._tag, self.holder = "", ""
        self._term.end()

    async def _check_ownership(self) -> None:
        """After a refused write, check whether the stored version is still this process's; if not, end the lease."""
        before, stored = self._tag, await self._fetch()
        self._tag = ""
        if stored is not None:
            record = self._parse_record(stored)
            if stored.etag == before or (stored.body in self._unconfirmed and record.fence == self.fence):
                self._tag = stored.etag
                return
        self._term.end()
        self.holder = "" if stored is None else record.host

    async def _fetch(self) -> StoredObject | None:
        try:
            stored = await self._bucket.get(self._name)
        except BucketError as error:
            raise _to_lease_error(error) from None
        if stored is not None:
            self._observe(stored.etag)
        return stored

    async def _write(self, tag: str, record: LeaseRecord) -> str | None:
        """Replace the version with this tag, or create the object if the tag is "". Returns None if it was refused."""
        try:
            if not tag:
                return await self._bucket.create(self._name, record.to_bytes())
            self._unconfirmed = [*self._unconfirmed[-_MAX_UNCONFIRMED:], record.to_bytes()]
            return await self._bucket.replace(self._name, record.to_bytes(), tag)
        except BucketError as error:
            raise _to_lease_error(error) from None

    def _create_record(self, fence: int, *, released: bool = False) -> LeaseRecord:
        self._beat += 1
        return LeaseRecord(
            holder=self._process_id,
            host=self._host,
            fence=fence,
            beat=self._beat,
            seconds=self.seconds,
            released=released,
            written=self._clock.now(),
        )

    def _parse_record(self, stored: StoredObject) -> LeaseRecord:
        try:
            return LeaseRecord.from_bytes(stored.body)
        except ValueError as error:
            raise LeaseError(
                f"the object {self._name} is not a lease ({error})",
                advice="Configure another object name for the lease, or stop all helpers and delete the object.",
            ) from None

    async def _check_conditional_writes(self) -> None:
        """Check once that the store enforces write conditions. Without them, two hosts could send at the same time."""
        if self._check_rounds_left and not self._fault:
            try:
                self._fault = await self._find_fault(self._name + CHECK_SUFFIX)
            except BucketError as error:
                raise _to_lease_error(error) from None
        if self._fault:  # also in later attempts: another check may not detect it
            raise LeaseError(
                f"this object store {self._fault}",
                advice="Use an object store with atomic conditional writes, or a newer version; then restart.",
            )

    async def _find_fault(self, name: str) -> str:
        """Return why the store cannot hold a lease, "" if no test shows a reason."""
        repeat, unwanted = self._repeat_throttled, b"must not be written\n"
        await repeat(lambda: self._bucket.create(name, b"there\n"))
        if (
            await repeat(lambda: self._bucket.create(name, unwanted)) is not None
            or await repeat(lambda: self._bucket.replace(name, unwanted, _WRONG_TAG)) is not None
        ):
            return "ignores If-None-Match or If-Match and cannot hold a lease"
        absent = f"{name}.{secrets.token_hex(8)}"  # random: the store may have created that of another test
        if await repeat(lambda: self._bucket.replace(absent, unwanted, _WRONG_TAG)) is not None:
            return (
                "creates a missing object despite If-Match and cannot hold a lease: a host could renew a lease that "
                "was deleted"
            )
        while self._check_rounds_left:
            if not await repeat(lambda: self._is_one_write_done(name)):
                return "accepts several concurrent writes with the same If-Match and cannot hold a lease"
            self._check_rounds_left -= 1
        return ""

    async def _repeat_throttled(self, request: Callable[[], Awaitable[T]]) -> T:
        """Make requests of a test, and repeat them if the store limits their rate."""
        for attempts_left in reversed(range(_CHECK_ATTEMPTS)):
            try:
                return await request()
            except BucketThrottled:
                if not attempts_left:
                    raise
            await self._clock.sleep(CHECK_PAUSE_SECONDS)
        raise AssertionError

    async def _is_one_write_done(self, name: str) -> bool:
        """Return whether the store accepts at most one of several concurrent writes that replace the same version.

        A store that checks the condition and writes in two steps accepts more. Another host that checks the store at
        the same time only reduces the number. A store that limits the rate of writes to an object refuses the others.
        All bodies differ, because an ETag may be a hash of the content.

        Raises:
            BucketError: the outcome of all writes but one is unknown, so this shows nothing.
        """
        stored = await self._bucket.get(name)
        if stored is None:
            return True  # deleted by another program; the lease object is created again in such a case
        bodies = [secrets.token_bytes(_CHECK_BYTES) for _ in range(_CHECK_WRITES)]
        writes = (self._bucket.replace(name, body, stored.etag) for body in bodies)
        results = await asyncio.gather(*writes, return_exceptions=True)
        has_answer = any(not isinstance(result, BaseException) for result in results)
        ignored = BucketThrottled if has_answer else ()
        errors = [result for result in results if isinstance(result, BaseException) and not isinstance(result, ignored)]
        for error in errors:
            if len(errors) > len(results) - 2 or not isinstance(error, BucketError):
                raise error
        return sum(isinstance(result, str) for result in results) <= 1


def create_s3_lease(
    settings: S3Section,
    location: BucketLocation,
    *,
    host: str,
    clock: Clock,
    seconds: float,
) -> S3Lease:
    """Create the configured lease.

    Raises:
        ConfigError: the library is not installed, or the credentials file is invalid.
    """
    folder, _, name = location.path.rpartition("/")
    timeout = min(settings.timeout_seconds, seconds / 4)
    bucket = open_bucket(settings, BucketLocation(location.bucket, folder), clock=clock, seconds=timeout)
    return S3Lease(bucket, name, host=host, clock=clock, seconds=seconds)


def _to_lease_error(error: BucketError) -> LeaseError:
    if isinstance(error, BucketRefused | BucketThrottled):
        return LeaseError(str(error), advice=error.advice)
    return LeaseError(str(error))
