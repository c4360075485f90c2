"""The part of a store that takes shares in and works on them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

from helper.core.share import Share, ShareKey
from helper.errors import StoreCorrupt
from helper.store.engine import StorePart
from helper.store.operations import messages, shares
from helper.store.rows import Enqueued, PreparedReveal, QueuedShare, SentReveal
from helper.store.share_listing import Row
from helper.store.transaction import read_round_key


class WorkPart(StorePart):
    """`WalletStore` and `WorkStore`; what each method means is told there."""

    async def enqueue(self, share: Share, nullifier: bytes, *, now: float) -> Enqueued:
        """Keep a share; DUPLICATE when its key is known or its nullifier spent."""
        return await self._writer.run(shares.EnqueueOperation(share, nullifier, now))

    async def is_known(self, key: ShareKey) -> bool:
        """Whether a share with this key was ever taken."""
        found = await self._reader.fetch("round_key", (key.round_id,))
        if not found:
            return False
        round_key = read_round_key(found[0], self._writer.keys)
        mac = round_key.mac(key)
        return bool(
            await self._reader.fetch("live_id", (mac,)) or await self._reader.fetch("is_buried", (round_key.no, mac))
        )

    async def is_spent(self, round_id: bytes, nullifier: bytes) -> bool:
        """Whether the chain has counted this nullifier."""
        found = await self._reader.fetch("round_key", (round_id,))
        return bool(found and await self._reader.fetch("is_spent", (found[0][0], nullifier)))

    async def claim_due(self, *, now: float, limit: int, rounds: Collection[bytes]) -> list[QueuedShare]:
        """Take up due shares, in order of time and rank; damaged ones are set aside."""
        return await self._writer.run(partial(shares.claim_due, now=now, limit=limit, rounds=tuple(rounds)))

    async def next_due_ms(self, rounds: Collection[bytes]) -> int | None:
        """The earliest due time among the waiting shares of these rounds."""
        found = [row[0] for round_id in rounds for row in await self._reader.fetch("next_due", (round_id,))]
        return min((due_ms for due_ms in found if isinstance(due_ms, int)), default=None)

    async def put_back(self, share_id: int, *, due_ms: int | None = None, stage: str, note: str) -> bool:
        """WITNESSED or BROADCAST -> RECEIVED without an attempt."""
        return await self._writer.run(shares.back(share_id, self._now_ms(), due_ms, stage, note))

    async def release(self, share_id: int) -> bool:
        """WITNESSED -> RECEIVED at its own time; a share that stands elsewhere stays there."""
        return await self._writer.run(partial(shares.release, share_id=share_id, at_ms=self._now_ms()))

    async def record_crash(self, share_id: int, *, due_ms: int, note: str) -> int:
        """A prover worker died over it; the crashes so far."""
        return await self._writer.run(shares.crash(share_id, self._now_ms(), due_ms, note))

    async def retry(self, share_id: int, *, due_ms: int, stage: str, note: str) -> int:
        """-> RECEIVED with an attempt spent; the attempts so far."""
        return await self._writer.run(shares.again(share_id, self._now_ms(), due_ms, stage, note))

    async def fail(self, share_id: int, *, stage: str, note: str, spend_attempt: bool) -> bool:
        """Give a share up; its witness stays until the purge."""
        op = shares.give_up(share_id, self._now_ms(), stage, note, spend_attempt=spend_attempt)
        return await self._writer.run(op)

    async def requeue(self, share_id: int, *, due_ms: int | None = None, note: str) -> bool:
        """An operator's retry: FAILED -> RECEIVED with all attempts back."""
        return await self._writer.run(shares.revive(share_id, self._now_ms(), due_ms, note))

    async def prepare(self, share_id: int, prepared: PreparedReveal) -> bool:
        """WITNESSED -> BROADCAST with its message, on disk before it is sent."""
        op = partial(messages.prepare, share_id=share_id, prepared=prepared, at_ms=self._now_ms())
        return await self._writer.run(op)

    async def mark_sending(self, share_id: int, *, height: int, endpoint: str) -> bool:
        """Note that sending begins, before the first byte leaves."""
        op = partial(messages.mark_sending, share_id=share_id, at_ms=self._now_ms(), height=height, endpoint=endpoint)
        return await self._writer.run(op)

    async def record_outcome(self, share_id: int, *, outcome: str) -> None:
        """Note what the latest send came to."""
        op = partial(messages.record_outcome, share_id=share_id, at_ms=self._now_ms(), outcome=outcome)
        await self._writer.run(op)

    async def sent_reveal(self, share_id: int) -> SentReveal | None:
        """The kept message of one share in BROADCAST."""
        found = await self._reader.fetch("sent_reveal", (share_id,))
        sound, damaged = messages.read_sent(found, self._writer.keys.rows)
        await self._set_aside(damaged)
        return sound[0] if sound else None

    async def follow_ups(self, *, height: int, limit: int) -> list[int]:
        """The shares in BROADCAST whose message something is to be done about, the longest overdue first.

        Among equals in the order in which they were claimed: their numbers would tell in which they came.
        """
        found = await self._read_in_broadcast("follow_ups", {"height": height, "limit": limit})
        return [row[0] for row in sorted(found, key=_turn)]

    async def unconfirmed(self, *, limit: int = 1000, after_id: int = 0) -> list[SentReveal]:
        """The shares in BROADCAST beyond an id, by id; empty only when there are no more."""
        while found := await self._read_in_broadcast("unconfirmed", {"limit": limit, "after": after_id}):
            sound, damaged = messages.read_sent(found, self._writer.keys.rows)
            await self._set_aside(damaged)
            if sound:
                return sound
            after_id = found[-1][1]
        return []

    async def _read_in_broadcast(self, name: str, params: Mapping[str, int]) -> list[Row]:
        try:
            return await self._reader.fetch(name, params)
        except StoreCorrupt:
            # One row among them can not be read: the writer finds it and sets it aside, so that the others can.
            await self._writer.run(partial(messages.look_through, at_ms=self._now_ms()))
            return await self._reader.fetch(name, params)

    async def _set_aside(self, share_ids: list[int]) -> None:
        """Have the writer look at rows that a reader found damaged: only it changes anything."""
        if share_ids:
            op = partial(messages.set_aside, share_ids=share_ids, at_ms=self._now_ms())
            await self._writer.run(op)


def _turn(row: Row) -> tuple[int, ...]:
    """Where a share stands among those to be seen to; what is damaged in it is found when it is read."""
    return tuple(value if isinstance(value, int) else 0 for value in row[1:4])
