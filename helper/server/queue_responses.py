"""Operators' queries of the queue, for the daemon and for the database file alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helper.core.share import ShareState
from helper.server import action_views, views
from helper.server.action_views import RoundState
from helper.store.queue_reader import QueueReader
from helper.store.rows import QueueFilter, StoredRound


async def list_answer(queue: QueueReader, query: QueueFilter, limit: int, *, source: views.Source) -> dict[str, Any]:
    """`queue list`, with failure groups if failed shares are selected."""
    failed = None
    if query.state is ShareState.FAILED:
        failed = await queue.failed_groups(query, limit=views.GROUPS_SHOWN)
    return views.list_json(await queue.list_shares(query, limit), source=source, failed=failed)


async def stats_answer(
    queue: QueueReader, *, source: views.Source, service: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """`queue stats`; `service` is the state of the running service."""
    return views.stats_json(
        await queue.counts(),
        await queue.damaged(),
        source=source,
        failed=await queue.failed_groups(QueueFilter(), limit=views.GROUPS_SHOWN),
        before=await queue.purged_failures(),
        service=service,
    )


async def spent_answer(queue: QueueReader, nullifier: str, *, source: views.Source) -> dict[str, Any]:
    """The rounds in which the chain has counted a nullifier, from the database alone.

    Raises:
        ValueError: it is not 64 hex characters.
    """
    rounds = await queue.rounds_of_spent(views.parse_hex32("nullifier", nullifier))
    return {"source": source, "rounds": [round_id.hex() for round_id in rounds]}


async def file_answer(queue: QueueReader, path: str, query: Mapping[str, str], *, now: float) -> dict[str, Any] | None:
    """Answer a request of the operator API from the database file; None if there is no such share.

    Args:
        queue: reads the file.
        path: path of the request.
        query: query parameters.
        now: unix seconds.

    Raises:
        ValueError: a parameter is not valid; the text names it.
    """
    if path == "/stats":
        return await stats_answer(queue, source="file")
    if path == "/queue":
        selected = views.parse_filter(
            query.get("round"), query.get("state"), query.get("due_before"), query.get("stage")
        )
        return await list_answer(queue, selected, views.parse_limit(query.get("limit")), source="file")
    if path == "/rounds":
        sizes = await queue.tree_sizes()
        states = [_state(stored, sizes) for stored in await queue.rounds()]
        return action_views.rounds_json(states, await queue.counts(), now=now, source="file")
    if path == "/actions":
        limit = views.parse_limit(query.get("limit"), action_views.ACTIONS_SHOWN)
        return action_views.actions_json(await queue.actions(limit=limit), source="file")
    if path.startswith("/spent/"):
        return await spent_answer(queue, path.rpartition("/")[2], source="file")
    story = await queue.show(path.rpartition("/")[2])
    return None if story is None else views.story_json(story, source="file")


def _state(stored: StoredRound, sizes: Mapping[bytes, int]) -> RoundState:
    return RoundState(
        round_id=stored.round_id,
        status=stored.status,
        vote_end_time=stored.vote_end_time,
        created_at_height=stored.created_at_height,
        tree_size=sizes.get(stored.round_id, 0),
        closed=stored.closed_at is not None,
    )
