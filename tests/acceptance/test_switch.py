"""Runs the section of docs/operations.md about switching from svoted's helper and back.

The commands of the section run in its order against a running helper and chain. svoted and its unit are replaced by
`fake_svoted`, whose queue is a file as svoted writes it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import anyio
import anyio.to_thread

from tests.acceptance.document_commands import DocumentedCommand, DocumentShell, parse_blocks
from tests.acceptance.test_operations import BIN, PAGE, write_executable
from tests.support.devnet import NEW_ERA, era_flags
from tests.support.harness import STAND_IN_PROGRAM, HelperProcess, run_chain_and_helper, unix_time_in
from tests.support.svoted import ballot_shares, erased_row, svoted_file, svoted_row

FAKE_SVOTED = Path(__file__).with_name("fake_svoted.py")
APP_TOML = '[helper]\nexpose_queue_summary = true\ndisable = false\n\n[api]\ndisable = "kept"\n'


def create_shell(directory: Path, state: Path, config: Path) -> DocumentShell:
    """The machine that the section describes, in a directory."""
    tools = directory / "tools"
    for folder in (tools, state, directory / "svoted" / "config"):
        folder.mkdir(parents=True)
    for program in ("svoted", "systemctl"):
        write_executable(tools / program, f'exec {sys.executable} {FAKE_SVOTED} {state} {program} "$@"')
    (directory / "svoted" / "config" / "app.toml").write_text(APP_TOML)
    env = {"PATH": f"{tools}:{BIN}:{os.environ['PATH']}", "SVOTE_HELPER_CONFIG": str(config)}
    env |= {name: os.environ[name] for name in ("PYTHONPATH", "HOME") if name in os.environ}
    places = {"/var/lib/svote-switch": str(directory / "switch"), "/var/lib/svoted": str(directory / "svoted")}
    return DocumentShell(directory, env, places)


async def count_states(helper: HelperProcess) -> dict[str, int]:
    total = (await helper.operator_get("/stats"))["total"]
    return {name: number for name, number in total.items() if number and name != "total"}


async def test_switch_section_moves_the_queue_here_and_back(tmp_path: Path) -> None:
    async with run_chain_and_helper(tmp_path, *era_flags(NEW_ERA), program=STAND_IN_PROGRAM) as (chain, helper):
        round_id = await chain.open_round()
        async with helper.create_wallet(chain.url) as wallet:
            ballot = await wallet.seal_ballot(round_id, 1, 1)
            position = await wallet.cast_ballot(ballot)
        await helper.wait_for_leaf(round_id, position)
        shares = ballot_shares(ballot, position, unix_time_in(1800))
        rows = [erased_row(shares[0]), *map(svoted_row, shares[1:])]
        state = tmp_path / "state"
        shell = create_shell(tmp_path / "machine", state, helper.config)
        (state / "export.json").write_bytes(svoted_file(round_id, rows))
        app_toml = tmp_path / "machine" / "svoted" / "config" / "app.toml"
        blocks = {block.name: block for block in parse_blocks(PAGE) if block.kind == "switch"}
        assert list(blocks) == ["export", "import", "back"]

        async def run(name: str) -> None:
            await anyio.to_thread.run_sync(shell.run_block, blocks[name])

        shell.run_command(DocumentedCommand(f"ROUND={round_id.hex()}", ()))
        await run("export")
        assert app_toml.read_text() == APP_TOML.replace("disable = false", "disable = true")
        await run("import")
        assert await count_states(helper) == {"received": 15}
        assert list((tmp_path / "machine" / "switch").iterdir()) == [], "the unencrypted file is deleted"
        await run("back")

        assert app_toml.read_text() == APP_TOML
        assert await count_states(helper) == {"failed": 15}
        assert list((tmp_path / "machine" / "switch").iterdir()) == []
        returned = json.loads((state / "imported.json").read_bytes())
        times = {"vote_end_time": returned["round"]["vote_end_time"]}
        expected = sorted(({**row, **times} for row in rows[1:]), key=lambda row: row["share_index"])
        assert returned["rows"] == expected
        assert not (state / "stopped").exists()
