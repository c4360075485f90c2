"""Jobs for the writer thread, and delivery of their results to the callers."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self


@dataclass(slots=True, eq=False)
class WriteJob:
    """One operation, the caller that awaits it, and its result."""

    op: Callable[[Any], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    after_erasure: bool
    attempts: int = 0
    value: Any = None
    error: BaseException | None = None


class BatchOperation(ABC):
    """An operation that runs more cheaply together with others of its type."""

    __slots__ = ()

    @classmethod
    @abstractmethod
    def run_all(cls, tx: Any, operations: Sequence[Self]) -> list[Any]:
        """Run the operations with the same effect as running them sequentially. An exception fails all of them.

        Returns:
            The results in the order of `operations`.
        """

    def __call__(self, tx: Any) -> Any:
        """Run only this operation."""
        return self.run_all(tx, [self])[0]


def split_batch(batch: Iterable[WriteJob]) -> Iterator[list[WriteJob]]:
    """Split a batch, preserving order, into runs of batch operations of the same type and single other jobs."""
    for _, run in groupby(batch, lambda job: type(job.op) if isinstance(job.op, BatchOperation) else job):
        yield list(run)


def run_part(tx: Any, part: Sequence[WriteJob]) -> None:
    """Run a part of a batch and store the results in its jobs."""
    op: Any = part[0].op
    if isinstance(op, BatchOperation):
        operations: list[Any] = [job.op for job in part]
        for job, value in zip(part, op.run_all(tx, operations), strict=True):
            job.value = value
    else:
        part[0].value = op(tx)


def deliver_results(jobs: Iterable[WriteJob]) -> None:
    """Deliver results to the callers, with one wake-up per event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[WriteJob]] = {}
    for job in jobs:
        by_loop.setdefault(job.loop, []).append(job)
    for loop, loop_jobs in by_loop.items():
        call_on_loop(loop, resolve_futures, loop_jobs)


def resolve_futures(jobs: list[WriteJob]) -> None:
    """Resolve the futures that were not cancelled. Runs on the event loop."""
    for job in jobs:
        resolve_future(job.future, job.error, job.value)


def resolve_future(future: asyncio.Future[Any], error: BaseException | None, value: Any = None) -> None:
    """Resolve a future, unless it was cancelled. Runs on the event loop."""
    if not future.done():
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


def call_on_loop(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: Any) -> None:
    """Schedule a callback on an event loop, from any thread."""
    with suppress(RuntimeError):  # the loop is closed, so no caller waits
        loop.call_soon_threadsafe(callback, *args)
