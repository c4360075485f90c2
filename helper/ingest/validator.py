"""From a posted body to a share whose encodings and hashes are right: off the event loop, many at a time.

Whatever came while a batch was under way makes the next one: reading, decoding and hashing are one native call for
all of them, without the interpreter's lock. One that comes alone is read on the event loop: to change threads and back
takes longer than reading it. What that call does not find plainly right is read again here, by the rules of
`helper.ingest.payload`, and refused with the field that breaks one.

A large body is first reduced to the fields of a share, by native code in one worker thread: to parse 1 MiB of JSON in
Python can block the event loop for 80 ms.
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
from helper.ingest.share_checks import ShareChecks, check_share
from proofs import EncodingError, ProofsError, ReadShare, ShareCheck, ShareRuleError, json_members

log = structlog.get_logger("helper.intake")

CHECK_THREADS: Final = 4
"""Threads for shares that are checked one by one (0.3 ms each, outside the interpreter's lock)."""
MAX_BATCH: Final = 32
"""Bodies of one native call, so that the first of them does not wait long."""
LARGE_THREADS: Final = 1
"""Threads for large bodies (up to 6 ms each): the other core is left to everything else."""
BATCHES: Final = max(1, min(2, os.cpu_count() or 1))
"""Native calls at once: enough that one can hash while the results of the other are worked on."""

_REASONS: Final = {
    "length": "has the wrong length",
    "non-canonical": "is not a canonical field element",
    "off-curve": "is not a point on the curve",
    "identity": "must not be the identity",
    "range": "is out of range",
}


class Checks(ShareChecks, Protocol):
    """The native checks; the module `proofs` is one."""

    def read_shares(self, bodies: Sequence[bytes]) -> Sequence[ReadShare | None]:
        """Each body's share with what follows from it, None for one that is not plainly right."""
        ...


@dataclass(frozen=True, slots=True)
class CheckedShare:
    """A share whose own fields belong together.

    Attributes:
        share: what was posted.
        vote_commitment: the leaf that must stand at its position, 32 bytes.
        nullifier: what its reveal will publish, 32 bytes.
    """

    share: Share
    vote_commitment: bytes = field(repr=False)
    nullifier: bytes = field(repr=False)


_Waiting = tuple[bytes, "asyncio.Future[ReadShare | None]"]


class ShareValidator:
    """Reads and checks posted bodies.

    Args:
        checks: the hashes; `proofs`.
    """

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._threads = anyio.CapacityLimiter(CHECK_THREADS)
        self._large_threads = anyio.CapacityLimiter(LARGE_THREADS)
        self._pool = ThreadPoolExecutor(BATCHES, thread_name_prefix="checks")
        self._waiting: list[_Waiting] = []
        self._under_way = 0

    async def read(self, body: bytes) -> CheckedShare:
        """The share in a request's body.

        Raises:
            WireError: the body is not what a wallet sends.
            ShareRefused: 400, an encoding or a hash is wrong.
        """
        if len(body) > payload.SMALL_BODY:
            return await self.check(await anyio.to_thread.run_sync(_parse_large, body, limiter=self._large_threads))
        found = await self._in_batch(body)
        if found is None:
            return await self.check(payload.parse_share(body))
        share = Share(
            round_id=found.round_id,
            share_index=found.share_index,
            proposal_id=found.proposal_id,
            vote_decision=found.vote_decision,
            tree_position=found.tree_position,
            submit_at=found.submit_at,
            shares_hash=found.shares_hash,
            share_comms=found.share_comms,
            primary_blind=found.primary_blind,
            c1=found.c1,
            c2=found.c2,
        )
        return CheckedShare(share, found.vote_commitment, found.nullifier)

    async def check(self, share: Share) -> CheckedShare:
        """A share that was read already.

        Raises:
            ShareRefused: 400, an encoding or a hash is wrong.
        """
        check = await anyio.to_thread.run_sync(self._check, share, limiter=self._threads)
        return CheckedShare(share, check.vote_commitment, check.nullifier)

    # ------------------------------------------------------------------ many at once

    def _in_batch(self, body: bytes) -> asyncio.Future[ReadShare | None]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ReadShare | None] = loop.create_future()
        self._waiting.append((body, future))
        if len(self._waiting) == 1 and self._under_way < BATCHES:
            # not at once: what else came in this turn of the loop joins in
            loop.call_soon(self._begin, loop)
        return future

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._waiting or self._under_way >= BATCHES:
            return
        batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
        if len(batch) == 1 and not self._under_way:
            _tell(batch, self._read(batch))
            return
        self._under_way += 1
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
        self._under_way -= 1
        self._begin(loop)
        _tell(batch, [None] * len(batch) if read.cancelled() else read.result())

    def _read(self, batch: Sequence[_Waiting]) -> Sequence[ReadShare | None]:
        """What the native call says of each; a batch that fails as a whole is read one by one."""
        try:
            return self._checks.read_shares([body for body, _ in batch])
        except Exception as error:
            log.error("shares could not be read together", error=type(error).__name__)
            return [None] * len(batch)

    # ------------------------------------------------------------------ one by one

    def _check(self, share: Share) -> ShareCheck:
        """Encodings, points and hashes (in a thread)."""
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
            log.error("a share could not be checked", error=type(error).__name__)
            raise ShareRefused(400, "the share could not be checked") from None


def _parse_large(body: bytes) -> Share:
    """The share in a large body (in a thread).

    Raises:
        WireError: as `payload.parse_share`; also where the share's own fields are large.
    """
    fields = json_members(body, payload.SHARE.fields)
    if isinstance(fields, int):
        before = body[:fields].decode(errors="replace")
        raise WireError(*payload.where_broken(body, len(before)))
    if len(fields) > payload.SMALL_BODY:
        raise WireError(payload.BODY, f"has fields of a share that are larger than {payload.SMALL_BODY} bytes together")
    return payload.parse_share(fields)


def _tell(batch: Sequence[_Waiting], found: Sequence[ReadShare | None]) -> None:
    for (_, future), one in zip(batch, found, strict=True):
        if not future.done():
            future.set_result(one)
