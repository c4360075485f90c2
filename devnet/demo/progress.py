"""Progress of the shares on standard error: bars on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

STAGES = ("accepted", "proven", "broadcast", "confirmed")
LINE_INTERVAL_SECONDS = 2.0
"""Minimum seconds between plain lines."""


class ProgressBars:
    """Progress bars of the four stages; a context manager."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._console = Console(stderr=True)
        self._bars: Progress | None = None
        self._last_line_at: tuple[float, dict[str, int]] = (0.0, {})

    def __enter__(self) -> ProgressBars:
        if self._console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description:>10}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._bars.start()
            for stage in STAGES:
                self._bars.add_task(stage, total=self._total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def update(self, counts: dict[str, int]) -> None:
        """Show the number of shares by stage."""
        if self._bars is not None:
            for number, stage in enumerate(STAGES):
                self._bars.update(self._bars.task_ids[number], completed=counts.get(stage, 0))
            return
        since, last = self._last_line_at
        complete = all(counts.get(stage, 0) >= self._total for stage in STAGES)
        if counts != last and (complete or time.monotonic() >= since + LINE_INTERVAL_SECONDS):
            self._last_line_at = (time.monotonic(), dict(counts))
            self._print_status_line(counts)

    def print_line(self, text: str) -> None:
        """Print a line above the bars."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def _print_status_line(self, counts: dict[str, int]) -> None:
        parts = (f"{stage} {counts.get(stage, 0)}/{self._total}" for stage in STAGES)
        print("  ".join(parts), file=sys.stderr, flush=True)
