"""Runs an operator's command as a separate process and measures its time."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Result of a command.

    Attributes:
        exit_code: exit status.
        stdout: standard output.
        stderr: standard error.
        seconds: elapsed wall time.
    """

    exit_code: int
    stdout: str
    stderr: str
    seconds: float

    def json(self) -> Any:
        """The JSON line of a successful command."""
        assert self.exit_code == 0, f"exit status {self.exit_code}: {self.stderr}"
        return json.loads(self.stdout)


_PRINT_LOADED_MODULES = (
    "import sys\n"
    "from helper.cli.main import main\n"
    "try:\n"
    "    main(['serve', '--config', sys.argv[1]])\n"
    "finally:\n"
    "    print([name for name in sys.argv[2:] if name in sys.modules])"
)


def run_refused_serve(config: Path, *modules: str) -> tuple[str, str]:
    """Start a service that must exit with 1. Returns the given modules that it had loaded, and its messages."""
    arguments = [sys.executable, "-c", _PRINT_LOADED_MODULES, str(config), *modules]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS)
    assert result.returncode == 1, result.stderr
    return result.stdout.strip(), result.stderr


STOPWATCH_COMMAND = ("bash", "-c", 'TIMEFORMAT=%R; time "$@"', "bash")
"""Runs the appended command and writes its seconds as the last line of stderr."""


async def run_command(
    *arguments: str, env: Mapping[str, str] | None = None, timed_externally: bool = False
) -> CommandResult:
    """Run `svote-helper` with these arguments to completion.

    Args:
        arguments: arguments of the command.
        env: added to the environment.
        timed_externally: measure in another process. This process may be too busy to notice the end of a
            short
            command.
    """
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SVOTE_HELPER_")}
    started_at = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *(*(STOPWATCH_COMMAND if timed_externally else ()), sys.executable, "-m", "helper", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**clean, **(env or {})},
    )
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            out, err = await process.communicate()
    except BaseException:
        if process.returncode is None:
            process.kill()
            await process.wait()
        raise
    seconds, stderr = time.monotonic() - started_at, err.decode()
    if timed_externally:
        stderr, _, seconds_text = stderr.rstrip("\n").rpartition("\n")
        seconds = float(seconds_text)
    return CommandResult(process.returncode or 0, out.decode(), stderr, seconds)
