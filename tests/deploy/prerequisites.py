"""Skips tests that need root or programs that are not installed; before a release, they fail instead."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import NoReturn

import pytest

REQUIRE_VARIABLE = "SVOTE_REQUIRE_DEPLOY"
"""If it is set, no test of this directory may be skipped. `.ci/release` sets it."""


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test, or fail it if no test may be skipped."""
    if os.environ.get(REQUIRE_VARIABLE):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def require_root(purpose: str) -> None:
    """Skip the test without root."""
    if os.geteuid() != 0:
        skip_or_fail(f"needs root, to {purpose}")


def require_programs(programs: Mapping[str, str]) -> None:
    """Skip the test if a program is missing."""
    missing = [package for program, package in programs.items() if shutil.which(program) is None]
    if missing:
        skip_or_fail(f"needs a Debian with {', '.join(missing)} (apt install {' '.join(missing)})")
