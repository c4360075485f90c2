"""An operator's command as a process of its own, timed."""

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

PATIENCE = 120.0


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command came to.

    Attributes:
        code: its exit status.
        out: what it wrote to stdout.
        err: and to stderr.
        seconds: how long it took, by the wall.
    """

    code: int
    out: str
    err: str
    seconds: float

    def json(self) -> Any:
        """The machine's line of a command that went well."""
        assert self.code == 0, f"exit status {self.code}: {self.err}"
        return json.loads(self.out)


_TELL_LOADED = (
    "import sys\n"
    "from helper.cli.main import main\n"
    "try:\n"
    "    main(['serve', '--config', sys.argv[1]])\n"
    "finally:\n"
    "    print([name for name in sys.argv[2:] if name in sys.modules])"
)


def refused_serve(config: Path, *modules: str) -> tuple[str, str]:
    """Start a service that has to end with 1: which of these modules it had loaded by then, and what it said."""
    words = [sys.executable, "-c", _TELL_LOADED, str(config), *modules]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 1, done.stderr
    return done.stdout.strip(), done.stderr


STOPWATCH = ("bash", "-c", 'TIMEFORMAT=%R; time "$@"', "bash")
"""Starts what follows, and writes its seconds as the last line of stderr."""


async def command(*arguments: str, env: Mapping[str, str] | None = None, apart: bool = False) -> Ran:
    """Run `svote-helper` with these arguments to its end.

    Args:
        arguments: the command's.
        env: added to the environment.
        apart: have another process take the time: this one may be too busy to see a quick command's end.
    """
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SVOTE_HELPER_")}
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *(*(STOPWATCH if apart else ()), sys.executable, "-m", "helper", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**clean, **(env or {})},
    )
    try:
        async with asyncio.timeout(PATIENCE):
            out, err = await process.communicate()
    except BaseException:
        if process.returncode is None:
            process.kill()
            await process.wait()
        raise
    seconds, told = time.monotonic() - began, err.decode()
    if apart:
        told, _, taken = told.rstrip("\n").rpartition("\n")
        seconds = float(taken)
    return Ran(process.returncode or 0, out.decode(), told, seconds)
