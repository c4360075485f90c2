"""What is handed to the writing thread, and how its callers are told of the end."""

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
    """One operation, the caller that waits for it, and what came of it."""

    op: Callable[[Any], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    after_erasure: bool
    tries: int = 0
    value: Any = None
    error: BaseException | None = None


class BatchOperation(ABC):
    """An operation that costs less when it is done together with others of its kind."""

    __slots__ = ()

    @classmethod
    @abstractmethod
    def do_all(cls, tx: Any, operations: Sequence[Self]) -> list[Any]:
        """Do them as if one came after the other; the result of each, in their order. What this raises is for all."""

    def __call__(self, tx: Any) -> Any:
        """Do this one alone."""
        return self.do_all(tx, [self])[0]


def parts(batch: Iterable[WriteJob]) -> Iterator[list[WriteJob]]:
    """A batch in its order, divided into what is done at once: bulk operations of one kind, and single others."""
    for _, run in groupby(batch, lambda job: type(job.op) if isinstance(job.op, BatchOperation) else job):
        yield list(run)


def do(tx: Any, part: Sequence[WriteJob]) -> None:
    """Do a part of a batch, and keep what came of it."""
    op: Any = part[0].op
    if isinstance(op, BatchOperation):
        operations: list[Any] = [job.op for job in part]
        for job, value in zip(part, op.do_all(tx, operations), strict=True):
            job.value = value
    else:
        part[0].value = op(tx)


class BatchFailedError(Exception):
    """The transaction was rolled back; nothing of it was kept."""

    def __init__(self, cause: Exception, *, shared: bool) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.shared = shared


def resolve(jobs: Iterable[WriteJob]) -> None:
    """Tell callers, with one wake-up a loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[WriteJob]] = {}
    for job in jobs:
        by_loop.setdefault(job.loop, []).append(job)
    for loop, mine in by_loop.items():
        tell(loop, settle_all, mine)


def settle_all(jobs: list[WriteJob]) -> None:
    """Give every caller that still waits its result or its error; on the event loop."""
    for job in jobs:
        if not job.future.done():
            if job.error is None:
                job.future.set_result(job.value)
            else:
                job.future.set_exception(job.error)


def settle(future: asyncio.Future[None], error: Exception | None) -> None:
    """End a wait; on the event loop."""
    if not future.done():
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: Any) -> None:
    """Have something called on an event loop, from any thread."""
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(callback, *args)
