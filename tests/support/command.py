"""Runs an operator's command, in this process or as a separate one whose time is measured."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import structlog

from helper.cli.main import main

TIMEOUT_SECONDS = 120.0
HARDENED_MODULES = [
    "app.startup",
    "cli.db",
    "cli.queue",
    "cli.queue_transfer",
    "doctor.run",
]
LOW_WORK_FACTOR = 5
"""Work factor of encryption with a passphrase: milliseconds instead of a second each time."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Result of a command."""

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


@contextmanager
def isolate_commands() -> Iterator[None]:
    """Keep commands from changing this process: no hardening, no lower priority, and the logging is restored.

    Encryption with a passphrase has a low work factor.
    """
    loggers = [logging.getLogger(), logging.getLogger("helper")]
    before = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    configuration = structlog.get_config() if structlog.is_configured() else None
    with ExitStack() as patches:
        for module in HARDENED_MODULES:
            patches.enter_context(patch(f"helper.{module}.harden_process", list))
        patches.enter_context(patch("os.nice", lambda increment: increment))
        patches.enter_context(patch("helper.store.backup.WORK_FACTOR", LOW_WORK_FACTOR))
        yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers
    if configuration is None:
        structlog.reset_defaults()
    else:
        structlog.configure(**configuration)


async def run_in_process(directory: Path, *arguments: str) -> CommandResult:
    """Run a command in this directory, in a thread of this process, which saves starting Python."""
    out, err = io.StringIO(), io.StringIO()

    def run() -> int:
        try:
            main(arguments)
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else 0

    with isolate_commands(), chdir(directory), redirect_stdout(out), redirect_stderr(err):
        # Not `to_thread`: with this task's context, `anyio.run` would refuse to run in the thread.
        exit_code = await asyncio.get_running_loop().run_in_executor(None, run)
    return CommandResult(exit_code, out.getvalue(), err.getvalue(), seconds=0.0)
