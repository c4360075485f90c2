"""Division of a batch into parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from helper.store.shares import EnqueueOperation
from helper.store.transaction import Transaction
from helper.store.writer_thread import WriteJob, split_batch
from tests.unit.store.fixtures import make_posted_share


async def test_consecutive_posted_shares_are_one_part_and_each_other_operation_is_another() -> None:
    loop = asyncio.get_running_loop()

    def other(_tx: Transaction) -> None:
        return

    def post(number: int) -> EnqueueOperation:
        posted = make_posted_share(number)
        return EnqueueOperation(posted.share, posted.nullifier, 0.0)

    ops: list[Callable[[Any], Any]] = [other, other, post(1), post(2), other, post(3), post(4), post(5)]
    batch = [WriteJob(op, (), {}, loop.create_future()) for op in ops]

    parts = list(split_batch(batch))

    assert [len(part) for part in parts] == [1, 1, 2, 1, 3]
    assert [job for part in parts for job in part] == batch
