"""The demo as a command: real proofs of both circuits, one line of JSON, no remaining processes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from devnet.postgres import find_binaries
from tests.support.schemas import assert_conforms

SHARED_STORE = "postgres" if find_binaries() is not None else "sqlite"

RESULT_KEYS = {
    "shares",
    "confirmed",
    "failed",
    "early",
    "tally_ok",
    "lateness_ms_p99",
    "proofs_per_second",
    "circuit",
}


def processes_with_environment(mark: str) -> list[str]:
    """Return the command lines of all processes with this text in their environment."""
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                commands.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            continue
    return commands


@pytest.fixture
def demo_directory() -> Iterator[Path]:
    """A directory for the demo's files, accessible to the database's user like /tmp."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o711)
        yield Path(name)


@pytest.mark.parametrize(("circuit", "store"), [("k10", SHARED_STORE), ("k11", "sqlite")])
async def test_demo_ends_with_correct_tally_and_no_remains(demo_directory: Path, circuit: str, store: str) -> None:
    mark = f"demo-{uuid.uuid4()}"
    arguments = ("--voters", "1", "--spread", "2", "--json", "--circuit", circuit, "--store", store)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "helper", "demo", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "DEMO_MARK": mark, "TMPDIR": str(demo_directory)},
    )
    try:
        async with asyncio.timeout(300):
            printed, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    assert process.returncode == 0, stderr.decode()
    assert printed.count(b"\n") == 1
    assert printed.endswith(b"\n")
    outcome = json.loads(printed)
    assert outcome.keys() >= RESULT_KEYS
    assert_conforms("demo", outcome)
    assert outcome["tally_ok"] is True
    assert (outcome["shares"], outcome["confirmed"], outcome["failed"], outcome["early"]) == (32, 32, 0, 0)
    assert outcome["circuit"] == circuit
    assert outcome["proofs_per_second"] > 0
    assert outcome["lateness_ms_p99"] >= 0
    assert processes_with_environment(mark) == []
    assert list(demo_directory.iterdir()) == [], "no file remains"


async def test_demo_with_keep_serves_page_with_live_data(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "helper", "demo", "--voters", "1", "--spread", "0", "--keep", "--json"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    addresses: dict[str, str] = {}
    try:
        assert process.stderr is not None
        async with asyncio.timeout(300):
            async for line in process.stderr:
                name, _, value = line.decode().strip().partition(": ")
                addresses[name] = value
                if "Ctrl-C" in name:
                    break
        url, token = addresses["helper and its page"], addresses["operator token, for the page's queue"]
        async with asyncio.timeout(60), httpx.AsyncClient(base_url=url, timeout=30) as http:
            page = await http.get("/queue")
            assert page.headers["content-type"].startswith("text/html")
            (shown,) = (await http.get("/api/rounds")).json()["rounds"]
            assert len(shown["proposals"]) >= 2
            headers = {"Authorization": f"Bearer {token}"}
            async with http.stream("GET", "/shielded-vote/v1/events", headers=headers) as stream:
                state = ""
                async for next_state in stream.aiter_lines():
                    if next_state.startswith("data: "):
                        state = next_state.removeprefix("data: ")
                        break
            assert json.loads(state)["rounds"][0]["confirmed"] == 32
        process.terminate()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
