"""The lease as one object in an object store, each version written on condition that the one before it was still there.

It is created with If-None-Match: * and replaced with If-Match: the version's ETag, so that of two who write one is
refused. That somebody's time is over is judged by `LeaseObservation`, from one's own monotonic clock alone. A write
whose answer was lost is found out about by reading: are there the very bytes that were sent, it was done.

Who finds no object makes one that is nobody's, and waits as for a holder that died: it may have been deleted while
somebody held it.

A process that was killed and is started again is another holder, whatever its host is called: a clone of the machine
has the same name. It waits for the time to run out; one that was stopped properly has released it.

Requests an hour, as `keeper.py` goes about it with 10 s: 1,080 writes for who holds it (three in its time), at most
3,600 reads for each that waits (ten in its time), and five at a start. docs/decisions/0013-object-store.md: the cost.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import anyio

from helper.clock import Clock
from helper.errors import BucketError, BucketRefused, ConfigError, LeaseError
from helper.lease.record import LONGEST, LeaseObservation, LeaseRecord
from helper.lease.term import Moment, Term
from helper.object_store.bucket import Bucket, BucketLocation, S3Settings, StoredObject
from helper.object_store.s3 import open_bucket

SECONDS: Final = 10.0
MARGIN: Final = 0.2
"""The part of its time before whose end a holder trusts it no more: for the pace of two clocks to differ in."""
CHECK: Final = ".check"
"""Behind the object's name: another one, on which it is tried whether the store keeps to conditions."""
_WRONG_TAG: Final = f'"{"0" * 32}"'
NOBODY: Final = "0" * 32
"""The holder of an object that was made to be waited for."""
_ROUNDS: Final = 2
"""Times that a refused write is looked into, and tried again where what it asked for stood all the same."""
_KEPT: Final = 50
"""Versions of ours that are remembered while none is answered."""
_UNSAID: Final = "the object store refuses what it must not: another write was under way each time"


class S3Lease:
    """`helper.lease.Lease` in a bucket.

    Args:
        bucket: where; a call of it must end within a quarter of `seconds`.
        name: the object's name; all who share a queue, or have a copy of it, have the same.
        host: this host's name, for people.
        clock: the time.
        seconds: for how long a lease holds.
    """

    def __init__(self, bucket: Bucket, name: str, *, host: str, clock: Clock, seconds: float = SECONDS) -> None:
        if seconds > LONGEST:
            raise ValueError(f"a lease of {seconds} s is longer than {LONGEST} s")
        self._bucket = bucket
        self._name = name
        self._host = host[:256]
        self._clock = clock
        self._seconds = seconds
        self._term = Term(clock, seconds=seconds, margin=seconds * MARGIN)
        self._watch = LeaseObservation()
        self._me = secrets.token_hex(16)
        self._tag = ""  # of the version that is ours; "" while none is
        self._sent: list[bytes] = []  # versions of ours since the last that was answered: any may have been written
        self._fence = 0
        self._beat = 0
        self._holder = ""
        self._tried = False

    @property
    def seconds(self) -> float:
        """See `Lease`."""
        return self._seconds

    @property
    def held(self) -> bool:
        """See `Lease`."""
        return self._term.running

    @property
    def fence(self) -> int:
        """See `Lease`."""
        return self._fence

    @property
    def holder(self) -> str:
        """See `Lease`."""
        return self._holder

    async def acquire(self) -> bool:
        """Take it when nobody holds it.

        Call it again and again where it is held: that its holder is gone is seen from a version that stays.

        Returns:
            False when another holds it, or took it first: `holder` is its host's name, "" where it is nobody's yet.

        Raises:
            LeaseError: it is not known, or the store does not keep to conditions.
        """
        with self._in_time():
            await self._try_conditions()
            for _ in range(_ROUNDS):
                found = await self._look()
                if found is None:
                    await self._make()
                    return False
                record = self._read(found)
                if not self._free(found, record):
                    self._holder = record.host
                    return False
                fence = max(self._fence, record.fence) + 1
                asked = self._term.ask()
                if tag := await self._write(found.tag, self._record(fence)):
                    self._began(tag, fence, asked)
                    return True
        raise LeaseError(_UNSAID)

    async def renew(self) -> bool:
        """See `Lease`."""
        with self._in_time():
            for _ in range(_ROUNDS):
                if not self._tag:
                    return False
                asked = self._term.ask()
                if tag := await self._write(self._tag, self._record(self._fence)):
                    self._began(tag, self._fence, asked)
                    return True
                await self._find_ours()
        if self._tag:
            raise LeaseError(_UNSAID)
        return False

    async def release(self) -> None:
        """See `Lease`."""
        self._term.end()
        with self._in_time():
            for _ in range(_ROUNDS):
                if not self._tag:
                    return
                if await self._write(self._tag, self._record(self._fence, released=True)):
                    self._tag = ""
                    self._sent.clear()
                    return
                await self._find_ours()
        if self._tag:
            raise LeaseError(_UNSAID)

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        """Together all requests of a call take no longer than the lease would hold."""
        try:
            with anyio.fail_after(self._seconds):
                yield
        except TimeoutError:
            raise LeaseError(f"the object store did not answer within {self._seconds:g} s") from None

    def _began(self, tag: str, fence: int, asked: Moment) -> None:
        self._tag, self._fence, self._holder = tag, fence, ""
        self._sent.clear()
        self._term.begin(asked)

    def _free(self, found: StoredObject, record: LeaseRecord) -> bool:
        """Whether it may be taken from who wrote this, as far as that was seen."""
        # The bytes, and not the number of this process: a copy of a machine with its memory has the number too.
        ours = found.tag == self._tag or found.body in self._sent
        return ours or self._watch.lapsed(record, self._seconds, self._clock.monotonic())

    async def _make(self) -> None:
        """Where there is no object, one that is nobody's and lapses as if somebody had just died.

        Its number is the time, so that numbers go on where an object was deleted: they are far fewer than seconds.
        """
        fence = max(self._fence, int(self._clock.now()), 1)
        made = LeaseRecord(
            holder=NOBODY, host="", fence=fence, beat=0, seconds=self._seconds, written=self._clock.now()
        )
        if tag := await self._write("", made):
            self._watch.looked(tag, self._clock.monotonic())
        self._tag, self._holder = "", ""
        self._term.end()

    async def _find_ours(self) -> None:
        """After a refusal: the version that is there, if it is of this holding after all; else it is lost."""
        before, found = self._tag, await self._look()
        self._tag = ""
        if found is not None:
            record = self._read(found)
            if found.tag == before or (found.body in self._sent and record.fence == self._fence):
                self._tag = found.tag
                return
        self._term.end()
        self._holder = "" if found is None else record.host

    async def _look(self) -> StoredObject | None:
        try:
            found = await self._bucket.get(self._name)
        except BucketError as error:
            raise _unknown(error) from None
        if found is not None:
            self._watch.looked(found.tag, self._clock.monotonic())
        return found

    async def _write(self, tag: str, record: LeaseRecord) -> str | None:
        """The next version in the place of the one with this tag ("" for none at all); None when it was refused."""
        try:
            if not tag:
                return await self._bucket.create(self._name, record.to_bytes())
            self._sent = [*self._sent[-_KEPT:], record.to_bytes()]
            return await self._bucket.replace(self._name, record.to_bytes(), tag)
        except BucketError as error:
            raise _unknown(error) from None

    def _record(self, fence: int, *, released: bool = False) -> LeaseRecord:
        self._beat += 1
        return LeaseRecord(
            holder=self._me,
            host=self._host,
            fence=fence,
            beat=self._beat,
            seconds=self._seconds,
            released=released,
            written=self._clock.now(),
        )

    def _read(self, found: StoredObject) -> LeaseRecord:
        try:
            return LeaseRecord.from_bytes(found.body)
        except ValueError as error:
            raise LeaseError(
                f"the object {self._name} is no lease ({error})",
                advice="Give the lease a name of its own, or delete that object while no helper runs.",
            ) from None

    async def _try_conditions(self) -> None:
        """Once: whether the store refuses what it must; one that does not would let two senders run, silently."""
        if self._tried:
            return
        name = self._name + CHECK
        try:
            await self._bucket.create(name, b"there\n")
            kept = await self._bucket.create(name, b"must not be written\n") is None
            kept = kept and await self._bucket.replace(name, b"must not be written\n", _WRONG_TAG) is None
        except BucketError as error:
            raise _unknown(error) from None
        if not kept:
            raise LeaseError(
                "this object store does not keep to If-None-Match and If-Match: a lease in it would be none",
                advice="Use a store with conditional writes, or a newer version of this one.",
            )
        self._tried = True


def s3_lease(
    settings: S3Settings,
    place: BucketLocation,
    *,
    host: str,
    clock: Clock,
    env: Mapping[str, str],
    seconds: float = SECONDS,
) -> S3Lease:
    """A lease as the settings reach it.

    Args:
        settings: the section [s3].
        place: the object, in which bucket.
        host: this host's name, for people.
        clock: the time.
        env: the environment, for the credentials' file.
        seconds: for how long a lease holds.

    Raises:
        ConfigError: the place names no object, the library is not installed, or the credentials' file is none.
    """
    folder, _, name = place.path.rpartition("/")
    if not name:
        raise ConfigError(f"{place} names no object: the lease needs one, like {place}/sender.json")
    longest = min(settings.timeout_seconds, seconds / 4)
    bucket = open_bucket(settings, BucketLocation(place.bucket, folder), clock=clock, env=env, seconds=longest)
    return S3Lease(bucket, name, host=host, clock=clock, seconds=seconds)


def _unknown(error: BucketError) -> LeaseError:
    """The store's trouble as the lease's."""
    if isinstance(error, BucketRefused):
        return LeaseError(str(error), advice=error.advice)
    return LeaseError(str(error))
