"""Parses and validates posted shares in batches, off the event loop.

Bodies that arrive while a batch is being validated form the next batch. One native call parses, decodes and hashes a
whole batch without the GIL. A single body is validated on the event loop, because a switch to a thread and back takes
longer. A body that the native call does not accept is parsed again by the rules of `helper.ingest.payload`, which find
the invalid field for the error message.

A large body is first reduced to the fields of a share by native code in a worker thread, because parsing 1 MiB of JSON
in Python can block the event loop for 80 ms.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Protocol

import anyio
import anyio.to_thread
import structlog

from helper.core.share import Share
from helper.errors import ShareRefused
from helper.ingest import payload
from helper.ingest.schema import WireError
from proofs import EncodingError, ProofsError, ReadShare, ShareCheck, ShareRuleError, json_members

log = structlog.get_logger("helper.ingest")

CHECK_THREADS: Final = 4
"""Threads for shares that are validated one by one (0.3 ms each, without the GIL)."""
MAX_BATCH: Final = 32
"""Maximum number of bodies of one native call, to limit the latency of the first."""
LARGE_THREADS: Final = 1
"""Threads for large bodies (up to 6 ms each); one, to leave other cores free."""
BATCHES: Final = max(1, min(2, os.cpu_count() or 1))
"""Concurrent native calls: one hashes while the results of the other are processed."""

_REASONS: Final = {
    "length": "has the wrong length",
    "non-canonical": "is not a canonical field element",
    "off-curve": "is not a point on the curve",
    "identity": "must not be the identity",
    "range": "is out of range",
}


class ShareChecks(Protocol):
    """The native validation of one share; implemented by the module `proofs`."""

    def check_share(
        self,
        *,
        round_id: bytes,
        shares_hash: bytes,
        share_comms: bytes,
        share_index: int,
        proposal_id: int,
        vote_decision: int,
        primary_blind: bytes,
        c1: bytes,
        c2: bytes,
    ) -> ShareCheck:
        """Validate the fields; return vote commitment and nullifier, or raise ProofsError."""
        ...


class Checks(ShareChecks, Protocol):
    """The native validation; implemented by the module `proofs`."""

    def read_shares(self, bodies: Sequence[bytes]) -> Sequence[ReadShare | None]:
        """Parse and validate bodies; None for each that is not clearly valid."""
        ...


@dataclass(frozen=True, slots=True)
class CheckedShare:
    """A share whose encodings and hashes are valid.

    Attributes:
        share: the share as posted.
        vote_commitment: the expected leaf at its tree position, 32 bytes.
        nullifier: the nullifier that its reveal publishes, 32 bytes.
    """

    share: Share
    vote_commitment: bytes = field(repr=False)
    nullifier: bytes = field(repr=False)


_Waiting = tuple[bytes, "asyncio.Future[ReadShare | None]"]


class ShareValidator:
    """Parses and validates posted shares.

    Args:
        checks: the native validation; `proofs`.
    """

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._threads = anyio.CapacityLimiter(CHECK_THREADS)
        self._large_threads = anyio.CapacityLimiter(LARGE_THREADS)
        self._pool = ThreadPoolExecutor(BATCHES, thread_name_prefix="checks")
        self._waiting: list[_Waiting] = []
        self._running = 0  # native calls

    async def read(self, body: bytes) -> CheckedShare:
        """Parse and validate a request's body.

        Raises:
            WireError: the body does not match the payload schema.
            ShareRefused: 400, an encoding or a hash is not valid.
        """
        if len(body) > payload.SMALL_BODY:
            return await self.check(await anyio.to_thread.run_sync(_parse_large, body, limiter=self._large_threads))
        result = await self._in_batch(body)
        if result is None:
            return await self.check(payload.parse_share(body))
        share = Share(
            round_id=result.round_id,
            share_index=result.share_index,
            proposal_id=result.proposal_id,
            vote_decision=result.vote_decision,
            tree_position=result.tree_position,
            submit_at=result.submit_at,
            shares_hash=result.shares_hash,
            share_comms=result.share_comms,
            primary_blind=result.primary_blind,
            c1=result.c1,
            c2=result.c2,
        )
        return CheckedShare(share, result.vote_commitment, result.nullifier)

    async def check(self, share: Share) -> CheckedShare:
        """Validate a parsed share.

        Raises:
            ShareRefused: 400, an encoding or a hash is not valid.
        """
        result = await anyio.to_thread.run_sync(self._check, share, limiter=self._threads)
        return CheckedShare(share, result.vote_commitment, result.nullifier)

    # ------------------------------------------------------------------ batches

    def _in_batch(self, body: bytes) -> asyncio.Future[ReadShare | None]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ReadShare | None] = loop.create_future()
        self._waiting.append((body, future))
        if len(self._waiting) == 1 and self._running < BATCHES:
            # Deferred, so that other bodies of this iteration of the event loop join the batch.
            loop.call_soon(self._begin, loop)
        return future

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._waiting or self._running >= BATCHES:
            return
        batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
        if len(batch) == 1 and not self._running:
            _set_results(batch, self._read(batch))
            return
        self._running += 1
        done = loop.run_in_executor(self._pool, self._read, batch)
        done.add_done_callback(lambda read: self._end(loop, batch, read))
        if self._waiting:
            self._begin(loop)

    def _end(
        self,
        loop: asyncio.AbstractEventLoop,
        batch: Sequence[_Waiting],
        read: asyncio.Future[Sequence[ReadShare | None]],
    ) -> None:
        self._running -= 1
        self._begin(loop)
        _set_results(batch, [None] * len(batch) if read.cancelled() else read.result())

    def _read(self, batch: Sequence[_Waiting]) -> Sequence[ReadShare | None]:
        """Validate a batch in one native call. If the call fails, each body is validated alone."""
        try:
            return self._checks.read_shares([body for body, _ in batch])
        except Exception as error:
            log.error("batch_validation_failed", error=type(error).__name__)
            return [None] * len(batch)

    # ------------------------------------------------------------------ single shares

    def _check(self, share: Share) -> ShareCheck:
        """Validate encodings, points and hashes; runs in a thread."""
        try:
            return check_share(self._checks, share)
        except EncodingError as error:
            message = _REASONS.get(error.reason, "is not valid")
            raise ShareRefused(400, message, field=error.field) from None
        except ShareRuleError as error:
            if error.rule == "shares_hash":
                raise ShareRefused(400, "is not the hash of share_comms", field="shares_hash") from None
            message = "is not the commitment to primary_blind and enc_share"
            raise ShareRefused(400, message, field=f"share_comms[{share.share_index}]") from None
        except ProofsError as error:
            log.error("share_validation_failed", error=type(error).__name__)
            raise ShareRefused(400, "the share could not be validated") from None


def check_share(checks: ShareChecks, share: Share) -> ShareCheck:
    """Validate a share; takes 0.3 ms and releases the GIL.

    Raises:
        ProofsError: an encoding or a hash is not valid.
    """
    return checks.check_share(
        round_id=share.round_id,
        shares_hash=share.shares_hash,
        share_comms=share.share_comms,
        share_index=share.share_index,
        proposal_id=share.proposal_id,
        vote_decision=share.vote_decision,
        primary_blind=share.primary_blind,
        c1=share.c1,
        c2=share.c2,
    )


def _parse_large(body: bytes) -> Share:
    """Parse a large body; runs in a thread.

    Raises:
        WireError: as `payload.parse_share`; also if the share's fields are larger than `SMALL_BODY`.
    """
    fields = json_members(body, payload.SHARE.fields)
    if isinstance(fields, int):
        before = body[:fields].decode(errors="replace")
        raise WireError(*payload.where_broken(body, len(before)))
    if len(fields) > payload.SMALL_BODY:
        raise WireError(payload.BODY, f"the fields of the share are larger than {payload.SMALL_BODY} bytes together")
    return payload.parse_share(fields)


def _set_results(batch: Sequence[_Waiting], results: Sequence[ReadShare | None]) -> None:
    for (_, future), result in zip(batch, results, strict=True):
        if not future.done():
            future.set_result(result)
