"""Partial states of the running service and its queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import AsyncMock

from pydantic import TypeAdapter

from helper.chain.chain_data import Round
from helper.core.share import ShareState
from helper.observability.queue_snapshot import QueueSnapshot, read_snapshot
from helper.observability.service_state import ServiceState
from helper.store.models import DueForecast, FailedShares
from helper.store.queue_reader import QueueReader

_SERVICE_STATE = TypeAdapter(ServiceState)


def partial_state(**values: Any) -> ServiceState:
    """Create a state from JSON with only the keys that a test needs."""
    return _SERVICE_STATE.validate_python(values)


async def snapshot_of(
    rounds: Sequence[Round] = (),
    counts: Mapping[bytes, Mapping[ShareState, int]] | None = None,
    due_ahead: Mapping[bytes, DueForecast] | None = None,
    failures: Sequence[FailedShares] = (),
    *,
    now: float = 1000.0,
) -> QueueSnapshot:
    """Read a queue with these counts, due times and failures."""
    queue = AsyncMock(QueueReader)
    queue.count_shares.return_value = counts or {}
    queue.count_due_ahead.return_value = due_ahead or {}
    queue.list_matching_failures.return_value = failures
    queue.list_purged_failures.return_value = ()
    return await read_snapshot(queue, rounds, now=now, max_failures=9)
