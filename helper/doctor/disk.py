"""Checks the database's disk: free space, fsync latency, file system type."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from helper.clock import Clock
from helper.doctor.result import CheckResult, fail, ok, warn
from helper.store.sqlite.file_system import UNSUITABLE_ADVICE, is_unsuitable

MIN_FREE_BYTES: Final = 64 << 20
"""Bytes; with less, the first burst of shares in a round may fill the disk."""
LOW_FREE_BYTES: Final = 512 << 20
SLOW_FSYNC_SECONDS: Final = 0.1
"""Seconds; each share waits for at least one fsync, and some wallets give up after five seconds."""
UNUSABLE_FSYNC_SECONDS: Final = 2.0
FSYNC_SAMPLES: Final = 5
_PAGE_BYTES: Final = bytes(4096)


@dataclass(frozen=True, slots=True)
class DiskMeasurement:
    """Measured values of a disk.

    Attributes:
        free_bytes: bytes available to this user.
        free_inodes: number of files that can be created; None if the file system does not count them.
        fsync_seconds: median duration of an fsync of one page, None if none was possible.
        problem: why writing failed, None if it succeeded.
    """

    free_bytes: int
    free_inodes: int | None
    fsync_seconds: float | None = None
    problem: str | None = None


def measure_disk(directory: Path, clock: Clock) -> DiskMeasurement:
    """Measure a directory's disk with five fsyncs of an unnamed temporary file. Raises OSError."""
    stats = os.statvfs(directory)
    free, inodes = stats.f_bavail * stats.f_frsize, stats.f_favail if stats.f_files else None
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            seconds = []
            for _ in range(FSYNC_SAMPLES):
                file.write(_PAGE_BYTES)
                began = clock.monotonic()
                os.fsync(file.fileno())
                seconds.append(clock.monotonic() - began)
    except OSError as error:
        return DiskMeasurement(free, inodes, problem=error.strerror or str(error))
    return DiskMeasurement(free, inodes, median(seconds))


def evaluate_disk(directory: Path, disk: DiskMeasurement, kind: str) -> list[CheckResult]:
    """Evaluate free space and fsync latency, and report a file system that is not suitable.

    Args:
        directory: directory of the database.
        disk: the measured values.
        kind: the file system's type, "" if unknown.
    """
    results = [_evaluate_space(directory, disk), _evaluate_fsync(directory, disk)]
    if is_unsuitable(kind):
        results.append(fail("file system", f"{directory} is on {kind}", UNSUITABLE_ADVICE, kind=kind))
    return results


def _evaluate_space(directory: Path, disk: DiskMeasurement) -> CheckResult:
    text = f"{disk.free_bytes >> 20} MB free in {directory}"
    facts = {"free_bytes": disk.free_bytes, "free_inodes": disk.free_inodes}
    if disk.free_bytes < MIN_FREE_BYTES or disk.free_inodes == 0:
        advice = (
            "Free some space: shares are refused with 503 while the disk is full. The helper recovers automatically."
        )
        return fail(
            "disk space", text if disk.free_inodes != 0 else f"no inodes are free in {directory}", advice, **facts
        )
    if disk.free_bytes < LOW_FREE_BYTES:
        return warn("disk space", text, "Free some space before the next round starts.", **facts)
    return ok("disk space", text, **facts)


def _evaluate_fsync(directory: Path, disk: DiskMeasurement) -> CheckResult:
    if disk.fsync_seconds is None:
        advice = f"Give this user write access to {directory}, or run doctor as the helper's user."
        return fail("fsync", f"cannot write to {directory}: {disk.problem}", advice)
    milliseconds = round(disk.fsync_seconds * 1000, 2)
    text, facts = f"{milliseconds:g} ms", {"milliseconds": milliseconds}
    advice = "Reduce other load on this disk, or use a faster one: each share is acknowledged after an fsync."
    if disk.fsync_seconds > UNUSABLE_FSYNC_SECONDS:
        return fail("fsync", f"fsync takes {text}: wallets time out before they get a response", advice, **facts)
    if disk.fsync_seconds > SLOW_FSYNC_SECONDS:
        return warn("fsync", text, advice, **facts)
    return ok("fsync", text, **facts)
