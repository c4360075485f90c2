"""Runs docs/operations.md word for word in a system that systemd has booted: with pip, systemctl and its real paths."""

from __future__ import annotations

import pytest

from tests.acceptance.document_commands import run_page
from tests.deploy.installation import STATE, Installation

pytestmark = pytest.mark.timeout(2400)


def test_operations_page_works_in_booted_system(blank: Installation) -> None:
    # The page asks for this before the first start, to practice fault 8.
    blank.machine.sh(f"mkdir -p {STATE} && mount -t tmpfs -o size=1g,mode=700 tmpfs {STATE}")
    run_page(blank.page, blank.blocks)
