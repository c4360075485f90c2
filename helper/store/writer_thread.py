"""The thread that all writing of a store is done by: how it begins and ends, and what is handed to it.

What a batch of operations becomes on the disk is the engine's own: SQLite's `writer.py`, PostgreSQL's
`postgres/writer.py`.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from helper.errors import StoreError
from helper.store.rows import DamagedShare
from helper.store.transaction import Keys
from helper.store.write_jobs import WriteJob, do, settle, tell

T = TypeVar("T")
TransactionT = TypeVar("TransactionT")

MAX_BATCH: Final = 512
"""Operations of a transaction to which no more are added, so that the first of them does not wait long."""


@dataclass(slots=True)
class WriterStats:
    """What the thread has done since it was opened: transactions, operations in them, failed transactions."""

    commits: int = 0
    operations: int = 0
    failures: int = 0


class WritingThread(ABC, Generic[TransactionT]):
    """One thread, and the queue of operations before it.

    Args:
        on_damaged: called on the event loop with each row that was set aside.

    Attributes:
        stats: what it has done.
    """

    def __init__(self, on_damaged: Callable[[DamagedShare], None]) -> None:
        self._on_damaged = on_damaged
        self._handed_in: list[WriteJob] = []
        self._jobs: queue.SimpleQueue[list[WriteJob] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopped: asyncio.Future[None] | None = None
        self.stats = WriterStats()

    @property
    def keys(self) -> Keys:
        """The database's own keys, while it is open."""
        keys = self._known_keys()
        if keys is None:
            raise _not_open()
        return keys

    async def start(self) -> None:
        """Open the database on a new thread; raises what that raises."""
        loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = loop.create_future()
        self._stopped = loop.create_future()
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._main, args=(loop, started, self._stopped), name="store-writer", daemon=True
        )
        self._thread.start()
        try:
            await started
        except BaseException:
            self._thread = None
            self._jobs.put(None)  # if the caller was cancelled, the thread is to end as well
            raise

    async def stop(self) -> None:
        """Finish what was handed in, and close the database."""
        if self._thread is None or self._stopped is None:
            return
        self._thread = None
        self._hand_over()
        self._jobs.put(None)
        await self._stopped

    async def run(self, op: Callable[[TransactionT], T], *, after_erasure: bool = False) -> T:
        """Run an operation; returns when it is on disk. It goes on to its end when the caller is cancelled.

        Args:
            op: the operation.
            after_erasure: return only when all that was deleted is erased too, where the engine has to erase.

        Raises:
            StoreError: nothing of it was kept, as far as is known.
        """
        if self._thread is None:
            raise _not_open()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._handed_in.append(WriteJob(op, loop, future, after_erasure))
        if len(self._handed_in) == 1:
            # not at once: to wake the thread costs more than most operations, and what else this turn of the loop hands
            # in goes with it
            loop.call_soon(self._hand_over)
        return await future

    def _hand_over(self) -> None:
        """Give the thread all that was handed in."""
        jobs, self._handed_in = self._handed_in, []
        for start in range(0, len(jobs), MAX_BATCH):
            self._jobs.put(jobs[start : start + MAX_BATCH])

    # ------------------------------------------------------------------ the thread

    def _main(
        self, loop: asyncio.AbstractEventLoop, started: asyncio.Future[None], stopped: asyncio.Future[None]
    ) -> None:
        try:
            self._open()
        except Exception as error:
            tell(loop, settle, started, error)
            return
        tell(loop, settle, started, None)
        failure: Exception | None = None
        try:
            self._serve()
        finally:
            try:
                self._close()
            except StoreError as error:
                failure = error
            tell(loop, settle, stopped, failure)

    def _collect(self, patience: float | None = None) -> tuple[list[WriteJob], bool]:
        """All that waits now (at least one job, unless `patience` runs out), and whether to go on after it."""
        batch: list[WriteJob] = []
        with suppress(queue.Empty):
            jobs = self._jobs.get(timeout=patience)
            while jobs is not None:
                batch += jobs
                if len(batch) >= MAX_BATCH:
                    return batch, True
                jobs = self._jobs.get_nowait()
            return batch, False
        return batch, True

    def _do(self, tx: TransactionT, part: Sequence[WriteJob]) -> None:
        """Do a part of a batch. If that fails before anything was changed, its jobs are done one by one, and those that
        fail then fail alone.

        Raises:
            Exception: the transaction can not go on.
        """
        before = self._changes(tx)
        try:
            do(tx, part)
        except Exception as error:
            if self._spoils(tx, error) or self._changes(tx) != before:
                raise
            if len(part) > 1:
                for job in part:
                    self._do(tx, [job])
            else:
                part[0].error = self._translate(error)

    def _report(self, found: list[DamagedShare]) -> None:
        for share in found:
            self._on_damaged(share)

    # ------------------------------------------------------------------ the engine's own

    @abstractmethod
    def _known_keys(self) -> Keys | None:
        """The database's own keys, None before it was opened."""

    @abstractmethod
    def _open(self) -> None:
        """Open the database; what it raises is what `start` raises."""

    @abstractmethod
    def _serve(self) -> None:
        """Work on what is collected until nothing more comes. Answers every job, and raises nothing."""

    @abstractmethod
    def _changes(self, tx: TransactionT) -> int:
        """A number that is another one after a statement has changed something."""

    @abstractmethod
    def _spoils(self, tx: TransactionT, error: Exception) -> bool:
        """Whether the transaction can not go on after this error of one operation."""

    @abstractmethod
    def _translate(self, error: BaseException) -> BaseException:
        """The error of the house that stands for one of the database; any other error as it is."""

    @abstractmethod
    def _close(self) -> None:
        """Close the database.

        Raises:
            StoreError: it could not be closed.
        """


def _not_open() -> StoreError:
    return StoreError("the database is not open", advice="Start the helper again.")
