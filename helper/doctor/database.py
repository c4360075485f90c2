"""The database's file and SQLite itself; the file is only looked at, and looked through where no daemon runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from helper.clock import Clock
from helper.core.share import ShareState
from helper.doctor.backlog import Waiting
from helper.doctor.result import CheckResult, fail, ok, warn
from helper.errors import HelperError, StoreCorrupt, StoreForeign
from helper.store.rows import DamagedShare, RoundOutlook
from helper.store.sqlite.file_check import look_through
from helper.store.sqlite.reader import open_queue_file

SECONDS: Final = 4.0
"""How long SQLite's own check may take here."""
_BUG_SINCE: Final = (3, 7, 0)
_BUG_MENDED: Final = (3, 51, 3)


def judge_sqlite(version: str) -> CheckResult:
    """SQLite's version, and whether it has the bug that can damage a database with a write-ahead log."""
    parts = tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())
    if _BUG_SINCE <= parts < _BUG_MENDED:
        text = (
            f"{version} has the WAL-reset bug (mended in 3.51.3), which takes two connections that write: the helper"
            " has one, so let no other program write to its database"
        )
        return ok("sqlite", text, version=version, wal_reset_bug=True)
    return ok("sqlite", version, version=version, wal_reset_bug=False)


@dataclass(frozen=True, slots=True)
class DatabaseReport:
    """What the file tells where no daemon does.

    Attributes:
        finding: how it is.
        outlook: its rounds in sums.
        damaged: the rows that were set aside.
    """

    finding: CheckResult
    outlook: Sequence[RoundOutlook] = ()
    damaged: Sequence[DamagedShare] = ()


async def read_file(path: Path, *, now: float) -> DatabaseReport:
    """The rounds and shares in a database; never raises for what is wrong with the file."""
    try:
        size = path.stat().st_size
        if not size:
            return DatabaseReport(ok("database", f"{path} is empty: the first start fills it"))
        async with open_queue_file(path) as queue:
            outlook, damaged = await queue.outlook(now=now), await queue.damaged()
    except (HelperError, OSError) as error:
        return DatabaseReport(_unreadable(path, error))
    shares = sum(sum(one.counts.values()) for one in outlook)
    text = f"{path}: {shares} shares in {len(outlook)} rounds, {size >> 10} kB"
    return DatabaseReport(ok("database", text, bytes=size, shares=shares, rounds=len(outlook)), outlook, damaged)


def look_at_whole(path: Path, clock: Clock) -> CheckResult:
    """SQLite's own check of the whole file; blocks for seconds."""
    try:
        whole = look_through(path, clock, seconds=SECONDS)
    except (HelperError, OSError) as error:
        return _unreadable(path, error)
    if not whole:
        text = f"{path} is too large to be looked through in {SECONDS:g} s: what was looked at is sound"
        return ok("integrity", f"{text}; `svote-helper db check` looks at all of it", complete=False)
    return ok("integrity", "SQLite finds no damage", complete=True)


def judge_absent(path: Path, *, running: bool) -> CheckResult:
    """There is no such file."""
    if running:
        advice = (
            f"Move the file back to {path}: the helper then continues by itself. Do not stop the helper if it was"
            " deleted: root can still copy it from /proc/PID/fd, as docs/operations.md explains."
        )
        return fail("database", f"a helper runs, and {path} is gone", advice, path=str(path))
    if not path.parent.is_dir():
        advice = f"Make it (`mkdir -m 700 {path.parent}`), or set [helper] db_path."
        return fail("database", f"there is no directory {path.parent}", advice, path=str(path))
    advice = (
        "If there was one, look where it is (a relative [helper] db_path goes by the working directory) or restore the"
        " newest backup; else nothing: the first start makes it."
    )
    return warn("database", f"there is no {path} yet", advice, path=str(path))


def judge_shared(*, running: bool) -> CheckResult:
    """The queue is in a database that hosts share: the helper of this host has it open, or nobody here."""
    text = "the queue is in a database that hosts share ([store] url)"
    if running:
        return ok("database", f"{text}, and this host's helper has it open")
    return warn("database", text, "Start the helper: it says what it finds wrong with the database.")


def waiting_of(outlook: Sequence[RoundOutlook]) -> list[Waiting]:
    """What waits, by the file; a round whose end is not kept is left out."""
    return [
        Waiting(
            round_id=one.round_id.hex(),
            end=float(one.vote_end_time),
            left=one.counts.get(ShareState.RECEIVED, 0) + one.counts.get(ShareState.WITNESSED, 0),
            unconfirmed=one.counts.get(ShareState.BROADCAST, 0),
            minutes=one.ahead.minutes,
            later=one.ahead.later,
        )
        for one in outlook
        if one.vote_end_time is not None
    ]


def totals_of(outlook: Sequence[RoundOutlook]) -> Mapping[str, int]:
    """Shares by state's name, of all rounds."""
    return {state.name.lower(): sum(one.counts.get(state, 0) for one in outlook) for state in ShareState}


def _unreadable(path: Path, error: HelperError | OSError) -> CheckResult:
    if isinstance(error, PermissionError):
        return warn("database", f"{path} may not be read by this user", "Run the doctor as the helper's user.")
    if isinstance(error, OSError):
        return fail("database", f"{path} cannot be read: {error.strerror}", "See whether its disk is well.")
    if isinstance(error, StoreCorrupt):
        advice = (
            "Stop the helper, keep the file, and restore the newest backup: `svote-helper db restore FILE --force`."
        )
        return fail("database", str(error), advice)
    if isinstance(error, StoreForeign):
        return fail("database", str(error), error.advice)
    return fail("database", str(error), error.advice)
