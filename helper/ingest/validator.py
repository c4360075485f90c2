"""Validates posted shares in batches, off the event loop.

Bodies that arrive while a batch is being validated form the next batch. One native call parses, decodes and hashes the
batch without the GIL and returns the share or the invalid field for each body. A single body is validated on the event
loop, because switching to a thread and back takes longer.

Large bodies have batches and a thread of their own, because parsing 1 MiB of JSON takes up to 6 ms. A limited number of
them waits, so that they take no place from small ones.

A body whose client has disconnected is dropped when its turn comes, so that a burst of them delays no other body.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog

from helper.core.refusals import Situation, TemporaryRefusal
from helper.core.share import SHARE_JSON, Share
from helper.core.share_fields import Field, error_message, wire_names
from helper.errors import ClientLeft, ShareRefused
from proofs import InvalidShare, ProofsError, ReadShare

log = structlog.get_logger("helper.ingest")

MAX_BATCH: Final = 32
"""Maximum number of bodies per native call, to limit the latency of the first."""
MAX_LARGE_BODIES: Final = 1_024
"""Maximum number of large bodies that wait. One waits for its turn even if its client has left."""
CONCURRENT_LARGE_BATCHES: Final = 1
"""Concurrent native calls for large bodies; one, to leave other cores free."""
CONCURRENT_BATCHES: Final = max(1, min(2, (os.cpu_count() or 1) // 2))
"""Concurrent native calls for the others: one for two cores, as the event loop and the store's writer thread need some.

More calls would also make the batches smaller, and each costs the event loop two thread switches.
"""

MAX_SHARE_BODY_BYTES: Final = 1 << 20
"""Maximum bytes of a body: 1 MiB."""
SMALL_BODY_BYTES: Final = 16 << 10
"""Maximum bytes of a share's fields, in any JSON formatting: three times a real payload with `all_enc_shares`.

Larger bodies are more expensive than real ones: their memory counts (`BodyReader`), and their number is limited.
"""
BODY_FIELD: Final = "body"
"""Field name in errors that concern the entire body."""
_FIELDS: Final[Mapping[str, Field]] = {BODY_FIELD: SHARE_JSON, **dict(wire_names(SHARE_JSON.fields))}
"""The fields by their name in errors."""


def invalid_share(invalid: InvalidShare) -> ShareRefused:
    """The error of an invalid body, with the text of its reason and without the field's value."""
    if invalid.reason == "too-large":
        message = f"the fields of the share are larger than {SMALL_BODY_BYTES} bytes together"
    else:
        message = error_message(_FIELDS.get(invalid.field), invalid.reason, invalid.actual)
    return ShareRefused(400, message, field=invalid.field)


class Checks(Protocol):
    """Validates bodies; implemented by `helper.circuits`, and by simulations with cheaper hashes."""

    def read_shares(self, bodies: Sequence[bytes]) -> Sequence[Result]:
        """Parse and validate bodies."""
        ...


@dataclass(frozen=True, slots=True)
class CheckedShare:
    """A share whose encodings and hashes are valid.

    Attributes:
        vote_commitment: the expected leaf at its tree position, 32 bytes.
        nullifier: the nullifier that its reveal publishes, 32 bytes.
    """

    share: Share
    vote_commitment: bytes = field(repr=False)
    nullifier: bytes = field(repr=False)


Result = ReadShare | InvalidShare | CheckedShare | Exception
"""Result of the validation of a body: of the native one (the first two), or of another generation's."""


def checked_share(result: Result) -> CheckedShare:
    """Convert the result of the validation.

    Raises:
        ShareRefused: 400, the body is invalid; names the first invalid field.
        Exception: the validation failed.
    """
    if isinstance(result, InvalidShare):
        raise invalid_share(result)
    if isinstance(result, Exception):
        raise result
    if isinstance(result, CheckedShare):
        return result
    return CheckedShare(Share(*result.posted), result.vote_commitment, result.nullifier)


@dataclass(frozen=True, slots=True)
class _PendingBody:
    body: bytes = field(repr=False)
    has_left: Callable[[], bool]
    result: asyncio.Future[Result]


class _BatchQueue:
    """Bodies that wait for their validation, and the threads in which batches of them are validated.

    Args:
        read: validates a batch.
        concurrent: maximum number of batches that are validated at once.
        max_inline: maximum size of a batch that is validated on the event loop while no other one is.
    """

    def __init__(
        self, read: Callable[[Sequence[bytes]], Sequence[Result]], *, concurrent: int, max_inline: int
    ) -> None:
        self._read = read
        self._concurrent = concurrent
        self._max_inline = max_inline
        self._pool = ThreadPoolExecutor(concurrent, thread_name_prefix="checks")
        self._pending: deque[_PendingBody] = deque()
        self._running = 0  # batches

    def __len__(self) -> int:
        """Number of bodies that wait, also of clients that have left."""
        return len(self._pending)

    def add(self, body: bytes, has_left: Callable[[], bool]) -> asyncio.Future[Result]:
        """Validate a body in one of the next batches."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._pending.append(_PendingBody(body, has_left, future))
        if len(self._pending) == 1 and self._running < self._concurrent:
            # Deferred, so that other bodies of this iteration of the event loop join the batch.
            loop.call_soon(self._start_batch, loop)
        return future

    def _start_batch(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._running >= self._concurrent:
            return
        batch = self._take_batch()
        if not batch:
            return
        bodies = [pending.body for pending in batch]
        if len(batch) <= self._max_inline and not self._running:
            _set_results(batch, self._read(bodies))
            return
        self._running += 1
        done = loop.run_in_executor(self._pool, self._read, bodies)
        done.add_done_callback(lambda read: self._finish_batch(loop, batch, read))
        if self._pending:
            self._start_batch(loop)

    def _take_batch(self) -> list[_PendingBody]:
        """Take the next bodies, and drop those that nobody awaits any more."""
        batch: list[_PendingBody] = []
        while self._pending and len(batch) < MAX_BATCH:
            pending = self._pending.popleft()
            if not pending.has_left():
                batch.append(pending)
            elif not pending.result.done():
                pending.result.set_exception(ClientLeft("the client disconnected"))
        return batch

    def _finish_batch(
        self, loop: asyncio.AbstractEventLoop, batch: Sequence[_PendingBody], read: asyncio.Future[Sequence[Result]]
    ) -> None:
        self._running -= 1
        self._start_batch(loop)
        _set_results(batch, read.result())


def _set_results(batch: Sequence[_PendingBody], results: Sequence[Result]) -> None:
    for pending, result in zip(batch, results, strict=True):
        if not pending.result.done():
            pending.result.set_result(result)


class ShareValidator:
    """Parses and validates posted shares."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._small = _BatchQueue(self._read_batch, concurrent=CONCURRENT_BATCHES, max_inline=1)
        self._large = _BatchQueue(self._read_batch, concurrent=CONCURRENT_LARGE_BATCHES, max_inline=0)

    async def validate_body(self, body: bytes, has_left: Callable[[], bool] = lambda: False) -> CheckedShare:
        """Parse and validate a request's body.

        Raises:
            ShareRefused: 400, the body is not a valid share, or the validation failed.
            TemporaryRefusal: too many large bodies wait.
            ClientLeft: the client disconnected before the validation began.
        """
        queue = self._small if len(body) <= SMALL_BODY_BYTES else self._large
        if queue is self._large and len(queue) >= MAX_LARGE_BODIES:
            raise TemporaryRefusal(Situation.TOO_MANY_REQUESTS)
        return checked_share(await queue.add(body, has_left))

    def _read_batch(self, bodies: Sequence[bytes]) -> Sequence[Result]:
        """Validate a batch in one native call. If the call fails, each body is validated individually."""
        try:
            return self._checks.read_shares(bodies)
        except Exception as error:
            log.error("batch_validation_failed", error=type(error).__name__)
            return [self._read_alone(body) for body in bodies]

    def _read_alone(self, body: bytes) -> Result:
        try:
            return self._checks.read_shares([body])[0]
        except ProofsError as error:
            log.error("share_validation_failed", error=type(error).__name__)
            return ShareRefused(400, "the share could not be validated")
        except Exception as error:  # that of one body must not fail the others
            return error
