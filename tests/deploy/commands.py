"""Runs commands of this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

COMMAND_SECONDS = 120.0


def run(
    command: Sequence[str | Path],
    environment: Mapping[str, str] = os.environ,
    *,
    stdin: str = "",
    timeout: float = COMMAND_SECONDS,
) -> str:
    """Run a command, which must succeed, and return its standard output."""
    words = [str(part) for part in command]
    completed = subprocess.run(
        words,
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
    )
    output = f"{completed.stdout[-3000:]}\n{completed.stderr[-3000:]}"
    assert completed.returncode == 0, f"{' '.join(words)}: exit {completed.returncode}\n{output}"
    return completed.stdout
