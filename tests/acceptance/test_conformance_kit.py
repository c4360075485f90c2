"""Runs the commands of docs/conformance-kit.md against a service with real proofs on a development chain.

Only the ports differ from the page.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.acceptance.document_commands import DocumentShell, parse_blocks
from tests.support.process import find_free_port

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "conformance-kit.md"


@pytest.fixture
def shell(tmp_path: Path) -> DocumentShell:
    """A shell with a configuration as the page describes it."""
    rest, rpc, port = find_free_port(), find_free_port(), find_free_port()
    (tmp_path / "helper.toml").write_text(
        f'[helper]\ndb_path = "{tmp_path}/queue.db"\nport = {port}\nmax_concurrent_proofs = 1\n'
        f'[chain]\nendpoints = ["http://127.0.0.1:{rest}"]\nrpc = ["http://127.0.0.1:{rpc}"]\npoll_seconds = 0.2\n'
    )
    replacements = {
        "svote-helper devnet": f"svote-helper devnet --rest-port {rest} --rpc-port {rpc}",
        "8090": str(port),
        "11317": str(rest),
    }
    program = tmp_path / "tools" / "svote-helper"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m helper "$@"\n')
    program.chmod(0o755)
    env = {"PATH": f"{program.parent}:{os.environ['PATH']}", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    return DocumentShell(tmp_path, env, replacements)


def test_conformance_kit_page_commands_work(shell: DocumentShell, tmp_path: Path) -> None:
    with ExitStack() as stack:
        for block in parse_blocks(PAGE):
            if block.kind == "background":
                stack.enter_context(shell.start_background(block.commands[0]))
            elif block.kind == "until":
                shell.repeat_until(block, succeeds=True)
            else:
                shell.run_block(block)
    suite = ElementTree.parse(tmp_path / "result.xml").find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("28", "0", "0")
