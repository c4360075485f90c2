"""The part of a store that follows the chain."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from helper.core.share import ShareState
from helper.store.block_ranges import BlockRange, parse_ranges
from helper.store.engine import StorePart
from helper.store.operations import chain_facts
from helper.store.operations.chain_facts import LEAF_BYTES
from helper.store.records import RoundRow
from helper.store.rows import RoundLike, Spent, StoredRound
from helper.store.transaction import read_fact

CLOSED_AT_ONCE: Final = 200
"""Shares that one operation fails or erases, so that others need not wait long."""


class ChainPart(StorePart):
    """`ChainStore`; what each method means is told there."""

    async def save_rounds(self, rounds: Sequence[RoundLike], now: float) -> None:
        """Keep the rounds as the chain tells them."""
        await self._writer.run(partial(chain_facts.save_rounds, rounds=tuple(rounds), at_ms=int(now * 1000)))

    async def rounds(self) -> list[StoredRound]:
        """All rounds kept, by age on the chain; a damaged one is left out until the chain tells it again."""
        found = [(row[0], RoundRow(*row[1:])) for row in await self._reader.fetch("rounds")]
        return [row.stored(round_id) for round_id, row in found if row.is_sound(self._writer.keys.rows)]

    async def mark_closed(self, round_id: bytes, now: float) -> None:
        """Note that the chain has closed the round; the first time stands."""
        await self._writer.run(partial(chain_facts.mark_closed, round_id=round_id, at_ms=int(now * 1000)))

    async def mark_alerted(self, round_id: bytes, now: float) -> None:
        """Note that unsubmitted shares of the round were reported; the first time stands."""
        await self._writer.run(partial(chain_facts.mark_alerted, round_id=round_id, at_ms=int(now * 1000)))

    async def close_unspent(self, round_id: bytes, *, note: str) -> int:
        """Fail all shares of a closed round that are not confirmed."""
        total = 0
        while True:
            op = partial(
                chain_facts.close_some, round_id=round_id, note=note, at_ms=self._now_ms(), limit=CLOSED_AT_ONCE
            )
            closed = await self._writer.run(op)
            if not closed:
                return total
            total += closed

    async def unsubmitted(self, round_id: bytes) -> dict[ShareState, int]:
        """Shares of the round that are not confirmed, by state."""
        return {ShareState(state): n for state, n in await self._reader.fetch("round_counts", (round_id,))}

    async def purge(self, round_id: bytes) -> int:
        """Erase everything of a closed round."""
        total, gone = 0, False
        while not gone:
            op = partial(chain_facts.purge_some, round_id=round_id, at_ms=self._now_ms(), limit=CLOSED_AT_ONCE)
            erased, gone = await self._writer.run(op)
            total += erased
        return total

    async def apply_block(self, height: int, spent: Sequence[Spent], *, now: float) -> list[int]:
        """Take in a block: nullifiers become spent, our shares among them tombstones, the cursor moves."""
        op = partial(chain_facts.apply_block, height=height, spent=tuple(spent), at_ms=int(now * 1000))
        return await self._writer.run(op)

    async def add_spent(self, spent: Sequence[Spent]) -> list[int]:
        """The same without moving the cursor."""
        return await self._writer.run(partial(chain_facts.add_spent, spent=tuple(spent), at_ms=self._now_ms()))

    async def cursor(self) -> int | None:
        """Height of the last block taken in."""
        found = await self.get_meta(chain_facts.CURSOR)
        return None if found is None else int(found)

    async def skip_to(self, height: int, *, first: int) -> None:
        """Move the cursor without reading; the blocks passed over are recorded as unread."""
        await self._writer.run(partial(chain_facts.skip_to, height=height, first=first))

    async def apply_unread(self, first: int, last: int, spent: Sequence[Spent], *, now: float) -> list[int]:
        """Apply the nullifiers of unread blocks, and record these blocks as read."""
        op = partial(chain_facts.apply_unread, first=first, last=last, spent=tuple(spent), at_ms=int(now * 1000))
        return await self._writer.run(op)

    async def unread_blocks(self) -> list[BlockRange]:
        """The ranges of blocks below the cursor that are not read yet, ascending."""
        return parse_ranges(await self.get_meta(chain_facts.UNREAD))

    async def save_leaves(self, round_id: bytes, height: int, start_index: int, leaves: bytes) -> None:
        """Keep the leaves that one block appended to a round's tree."""
        op = partial(chain_facts.save_leaves, round_id=round_id, height=height, start=start_index, leaves=leaves)
        await self._writer.run(op)

    async def load_leaves(self, round_id: bytes) -> tuple[bytes, int]:
        """All leaves of a round's tree up to the first gap, and the height of the last block among them."""
        whole: list[bytes] = []
        size = last = 0
        for start, height, leaves in await self._reader.fetch("load_leaves", (round_id,)):
            if start != size:
                break
            whole.append(leaves)
            size += len(leaves) // LEAF_BYTES
            last = height
        return b"".join(whole), last

    async def save_subtrees(self, round_id: bytes, first_index: int, subtrees: bytes) -> None:
        """Keep inner nodes of complete subtrees, from one index on."""
        op = partial(chain_facts.save_subtrees, round_id=round_id, first_index=first_index, subtrees=subtrees)
        await self._writer.run(op)

    async def load_subtrees(self, round_id: bytes) -> bytes:
        """Inner nodes of the subtrees up to the first that is missing."""
        found = await self._reader.fetch("load_subtrees", (round_id,))
        return b"".join(nodes for n, (index, nodes) in enumerate(found) if n == index)

    async def drop_tree(self, round_id: bytes) -> None:
        """Forget the leaves and subtrees of a round."""
        await self._writer.run(partial(chain_facts.drop_tree, round_id=round_id))

    async def get_meta(self, key: str) -> str | None:
        """A remembered text."""
        return read_fact(await self._reader.fetch("get_meta", (key,)))

    async def set_meta(self, key: str, value: str) -> None:
        """Remember a text."""
        await self._writer.run(partial(chain_facts.set_meta, key=key, value=value))
