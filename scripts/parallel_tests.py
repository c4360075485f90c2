"""Run pytest in four processes, and repeat the failed tests alone: `python -m scripts.parallel_tests [ARGUMENT …]`.

Some tests depend on times, and can fail if the other processes use both cores for seconds. A test fails if it fails
again alone. More than `MAX_REPEATED` failures are not repeated. The output names every repeated test.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

MAX_REPEATED: Final = 3
FAILED_TESTS: Final = Path(".pytest_cache/v/cache/lastfailed")


def main(arguments: list[str]) -> int:
    """Run pytest with these arguments. Returns its exit code."""
    FAILED_TESTS.unlink(missing_ok=True)
    code = _run_pytest("-n", "4", "--dist", "worksteal", *arguments)
    if code != pytest.ExitCode.TESTS_FAILED:
        return code
    failed = sorted(json.loads(FAILED_TESTS.read_text()))
    if len(failed) > MAX_REPEATED:
        return code
    print(f"{len(failed)} failed in parallel with other tests, and are repeated alone:", *failed, sep="\n", flush=True)
    return _run_pytest(*failed)


def _run_pytest(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
