"""Division of a batch into jobs, and their execution."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Self

from helper.store.writer_thread import BatchOperation, WriteJob, run_part, split_batch


class AddOperation(BatchOperation[Any]):
    """Adds a number to a list, and returns how many were added with it."""

    def __init__(self, number: int) -> None:
        self.number = number

    @classmethod
    def run_all(cls, tx: list[int], operations: Sequence[Self]) -> list[int]:
        tx += [operation.number for operation in operations]
        return [len(operations)] * len(operations)


class OtherAddOperation(AddOperation):
    """Another type of operation."""


async def test_consecutive_operations_of_one_kind_run_as_batch_in_order() -> None:
    loop = asyncio.get_running_loop()

    def single(tx: list[int]) -> int:
        tx.append(0)
        return 0

    def job(op: Callable[[Any], Any]) -> WriteJob:
        return WriteJob(op, loop, loop.create_future(), after_erasure=False)

    ops: list[Callable[[Any], Any]] = [single, single, AddOperation(1), AddOperation(2), OtherAddOperation(3), single]
    ops += [AddOperation(4), AddOperation(5), AddOperation(6)]
    batch = [job(op) for op in ops]

    divided = list(split_batch(batch))
    done: list[int] = []
    for part in divided:
        run_part(done, part)

    assert [len(part) for part in divided] == [1, 1, 2, 1, 1, 3]
    assert [job for part in divided for job in part] == batch
    assert done == [0, 0, 1, 2, 3, 0, 4, 5, 6]
    assert [job.value for job in batch] == [0, 0, 2, 2, 1, 0, 3, 3, 3]
    assert AddOperation(7)(done) == 1
