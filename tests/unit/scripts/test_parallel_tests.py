"""Failed tests are repeated alone, and fail if they fail again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range({failing}))
def test_fails_at_first(number):
    marker = Path(f"ran-{{number}}")
    try:
        assert marker.exists() and {is_fixed}
    finally:
        marker.touch()

def test_passes():
    with Path("passes").open("a") as file:
        file.write("x")
"""


@pytest.mark.parametrize(
    ("failing", "is_fixed", "code", "repeats"),
    [(0, True, 0, False), (3, True, 0, True), (1, False, 1, True), (4, True, 1, False)],
)
def test_failed_tests_are_repeated_alone(
    failing: int, is_fixed: bool, code: int, repeats: bool, tmp_path: Path
) -> None:
    (tmp_path / "test_sample.py").write_text(TESTS.format(failing=failing, is_fixed=is_fixed))
    completed = subprocess.run(
        [sys.executable, "-m", "scripts.parallel_tests", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == code, completed.stdout
    assert ("are repeated alone" in completed.stdout) == repeats
    assert (tmp_path / "passes").read_text() == "x", "passed tests are not repeated"
