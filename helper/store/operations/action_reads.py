"""What operators' acts look at, and what is told of them; beside the writer, as all of `reading.py`."""

from __future__ import annotations

from helper.core.share import ShareState
from helper.errors import StoreCorrupt
from helper.store.action_rows import Action, FailedBefore
from helper.store.operations.actions import read_action
from helper.store.records import Column, RoundRow
from helper.store.rows import FailureGroup, QueueFilter, StoredRound
from helper.store.share_listing import Fetch, conditions, ref_bounds
from helper.store.transaction import read_fact


async def actions(fetch: Fetch, limit: int) -> list[Action]:
    """The latest acts, newest first."""
    return [read_action(row) for row in await fetch("actions", (limit,))]


async def failed_ids(fetch: Fetch, round_id: bytes | None, after_id: int, limit: int) -> list[int]:
    """Failed shares beyond an id, by id; only an index is read."""
    round_no: int | None = None
    if round_id is not None:
        found = await fetch("round_key", (round_id,))
        if not found:
            return []
        round_no = found[0][0]
    params: dict[str, Column] = {"round_no": round_no, "after": after_id, "limit": limit}
    return [row[0] for row in await fetch("failed_ids", params)]


async def ids_of(fetch: Fetch, ref: str) -> list[int]:
    """The live shares, at most two, whose name begins so; none for what is no name."""
    bounds = ref_bounds(ref)
    return [] if bounds is None else [row[0] for row in await fetch("ids_by_prefix", bounds)]


async def failed_groups(fetch: Fetch, query: QueueFilter, limit: int) -> list[FailureGroup]:
    """What failed for good, by stage and reason, the latest first."""
    if query.state not in {None, ShareState.FAILED}:
        return []
    params: dict[str, Column] = {**conditions(query), "round_id": query.round_id, "limit": limit}
    return [FailureGroup(*row) for row in await fetch("failed_groups", params)]


async def failed_before(fetch: Fetch) -> list[FailedBefore]:
    """What had failed in rounds that are purged, the latest day first."""
    return [FailedBefore(*row) for row in await fetch("failed_before", ())]


async def tree_sizes(fetch: Fetch) -> dict[bytes, int]:
    """How many leaves of each round's tree are kept."""
    return dict(await fetch("tree_sizes", ()))


async def rounds_of_spent(fetch: Fetch, nullifier: bytes) -> list[bytes]:
    """The rounds in which the chain has counted a nullifier."""
    return [row[0] for row in await fetch("rounds_of_spent", (nullifier,))]


async def rounds(fetch: Fetch) -> list[StoredRound]:
    """All rounds kept, by age on the chain; a damaged one is left out.

    Raises:
        StoreCorrupt: the key of the rows' checks is damaged.
    """
    key = read_fact(await fetch("get_meta", ("key.rows",)))
    if key is None:
        raise StoreCorrupt("the database is damaged: the key of its rows is not what it was")
    found = [(row[0], RoundRow(*row[1:])) for row in await fetch("rounds", ())]
    return [row.stored(round_id) for round_id, row in found if row.is_sound(bytes.fromhex(key))]
