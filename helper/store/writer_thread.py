"""The writer thread of a store: start, stop, and the queue of operations.

The engines commit the batches: `sqlite/store.py` and `postgres/writer.py`.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar

import structlog

from helper.errors import StoreError
from helper.store.models import DamagedShare
from helper.store.shares import EnqueueOperation, enqueue_all
from helper.store.transaction import DatabaseKeys, Transaction, is_exclusive

log = structlog.get_logger("helper.store")

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class WriteJob:
    """One operation with its arguments, the caller that awaits it, and its result."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    future: asyncio.Future[Any]
    attempts: int = 0
    value: Any = None
    error: BaseException | None = None


def split_batch(batch: Iterable[WriteJob]) -> Iterator[list[WriteJob]]:
    """Split a batch, preserving order, into runs of posted shares, which are stored together, and single other jobs."""
    for _, run in groupby(batch, lambda job: EnqueueOperation if isinstance(job.op, EnqueueOperation) else job):
        yield list(run)


def split_exclusive(batch: Iterable[WriteJob]) -> Iterator[list[WriteJob]]:
    """Split a batch, preserving order, into exclusive jobs and runs of other jobs, each for one transaction."""
    for _, run in groupby(batch, lambda job: job if is_exclusive(job.op) else None):
        yield list(run)


def deliver_results(jobs: Sequence[WriteJob]) -> None:
    """Deliver results to the callers, with one wake-up of their event loop."""
    if jobs:
        _call_on_loop(jobs[0].future, _resolve_futures, jobs)


def _resolve_futures(jobs: Sequence[WriteJob]) -> None:
    for job in jobs:
        _resolve_future(job.future, job.error, job.value)


def _resolve_future(future: asyncio.Future[Any], error: BaseException | None, value: Any = None) -> None:
    """Resolve a future, unless it was cancelled. Runs on the event loop."""
    if not future.done():
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


def _call_on_loop(future: asyncio.Future[Any], callback: Callable[..., None], *args: Any) -> None:
    """Schedule a callback on the event loop of a future."""
    with suppress(RuntimeError):  # the loop is closed, so no caller waits
        future.get_loop().call_soon_threadsafe(callback, *args)


def report_damaged(share: DamagedShare) -> None:
    """Log a row that was quarantined."""
    log.error(
        "damaged_share_quarantined",
        key=share.ref,
        reason="the row is damaged on disk",
        advice="If a wallet posts it again, it is replaced. Other helpers of the round may still reveal it; restore a "
        "backup to reveal it here.",
    )


TransactionT = TypeVar("TransactionT", bound=Transaction)

MAX_BATCH: Final = 512
"""Maximum number of operations per batch, so that the first one does not wait long for its commit."""


class WriterThread(ABC, Generic[TransactionT]):
    """A thread that runs operations in batches, each batch in one transaction.

    Attributes:
        has_met_damage: whether an operation failed because the database is damaged, since this was last reset.
    """

    def __init__(self) -> None:
        self._submitted: list[WriteJob] = []
        self._jobs: queue.SimpleQueue[list[WriteJob] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopped: asyncio.Future[None] | None = None
        self._keys: DatabaseKeys | None = None
        self.has_met_damage = False

    @property
    def keys(self) -> DatabaseKeys:
        """The database's own keys, while it is open."""
        if self._keys is None:
            raise _not_open_error()
        return self._keys

    @property
    @abstractmethod
    def write_error(self) -> str | None:
        """Reason why the last changes could not be stored, None if they were stored."""

    async def start(self) -> None:
        """Start the thread and open the database on it. Raises the errors of opening."""
        loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = loop.create_future()
        self._stopped = loop.create_future()
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run_thread, args=(started, self._stopped), name="store-writer", daemon=True
        )
        self._thread.start()
        try:
            await started
        except BaseException:
            self._thread = None
            self._jobs.put(None)  # the caller may have been cancelled, so stop the thread too
            raise

    async def stop(self) -> None:
        """Complete the submitted operations, and close the database."""
        if self._thread is None or self._stopped is None:
            return
        self._thread = None
        self._flush()
        self._jobs.put(None)
        await self._stopped

    async def run(self, op: Callable[Concatenate[TransactionT, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an operation and return its result once it is on disk. It completes even if the caller is cancelled.

        Raises:
            StoreError: none of its changes were stored, as far as known.
        """
        if self._thread is None:
            raise _not_open_error()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._submitted.append(WriteJob(op, args, kwargs, future))
        if len(self._submitted) == 1:
            # Deferred: waking the thread costs more than most operations, so all operations that are submitted in this
            # iteration of the loop share one wake-up.
            loop.call_soon(self._flush)
        return await future

    def _flush(self) -> None:
        jobs, self._submitted = self._submitted, []
        for start in range(0, len(jobs), MAX_BATCH):
            self._jobs.put(jobs[start : start + MAX_BATCH])

    # ------------------------------------------------------------------ the thread

    def _run_thread(self, started: asyncio.Future[None], stopped: asyncio.Future[None]) -> None:
        try:
            self._open()
        except Exception as error:
            _call_on_loop(started, _resolve_future, started, error)
            return
        _call_on_loop(started, _resolve_future, started, None)
        failure: Exception | None = None
        try:
            self._run_batches()
        finally:
            try:
                self._close()
            except StoreError as error:
                failure = error
            _call_on_loop(stopped, _resolve_future, stopped, failure)

    def _collect_batch(self, timeout: float | None = None) -> tuple[list[WriteJob], bool]:
        """Wait for the next batch: all waiting jobs, none if `timeout` expires.

        Returns:
            The batch, and whether the thread continues after it.
        """
        batch: list[WriteJob] = []
        with suppress(queue.Empty):
            jobs = self._jobs.get(timeout=timeout)
            while jobs is not None:
                batch += jobs
                if len(batch) >= MAX_BATCH:
                    return batch, True
                jobs = self._jobs.get_nowait()
            return batch, False
        return batch, True

    def _run_part(self, tx: TransactionT, part: Sequence[WriteJob]) -> None:
        """Run a part of a batch. If it fails before its first change, its jobs run one by one and fail alone.

        Raises:
            Exception: the transaction cannot continue.
        """
        before = self._count_changes(tx)
        try:
            posted = [job.op for job in part if isinstance(job.op, EnqueueOperation)]
            results = enqueue_all(tx, posted) if posted else [part[0].op(tx, *part[0].args, **part[0].kwargs)]
            for job, result in zip(part, results, strict=True):
                job.value = result
        except Exception as error:
            if self._is_fatal(tx, error) or self._count_changes(tx) != before:
                raise
            if len(part) > 1:
                for job in part:
                    self._run_part(tx, [job])
            else:
                part[0].error = self._translate(error)

    def _report_damaged(self, tx: TransactionT) -> None:
        """Report the rows that a committed transaction has quarantined."""
        damaged, tx.damaged_shares = tx.damaged_shares, []
        for share in damaged:
            report_damaged(share)

    # ------------------------------------------------------------------ implemented by each engine

    @abstractmethod
    def _open(self) -> None:
        """Open the database and set `_keys`. `start` propagates its exceptions."""

    @abstractmethod
    def _run_batches(self) -> None:
        """Run batches until the queue is closed. Resolves every job and never raises."""

    @abstractmethod
    def _count_changes(self, tx: TransactionT) -> int:
        """Return a number that differs after each statement that made changes."""

    @abstractmethod
    def _is_fatal(self, tx: TransactionT, error: Exception) -> bool:
        """Return whether the transaction cannot continue after this error of one operation."""

    @abstractmethod
    def _translate(self, error: BaseException) -> BaseException:
        """Return the `StoreError` for a database error; any other error unchanged."""

    @abstractmethod
    def _close(self) -> None:
        """Close the database.

        Raises:
            StoreError: it could not be closed.
        """


def _not_open_error() -> StoreError:
    return StoreError("the database is not open", advice="Start the helper again.")
