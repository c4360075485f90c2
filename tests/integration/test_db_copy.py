"""`db copy` from a file to a shared database and back in the middle of a round: every share is confirmed once."""

from __future__ import annotations

from pathlib import Path
from secrets import token_hex

import httpx
import pytest

from devnet import ballot
from tests.integration.test_export_import import run_operator_command, suspend_processes
from tests.integration.test_proof_bundle import run_command_line
from tests.support.devnet import DevChain
from tests.support.harness import STAND_IN_PROGRAM, HelperProcess, cast_vote, run_helper
from tests.support.postgres import Cluster, find_binaries
from tests.support.schemas import assert_conforms

CLUSTERS = ["cluster"] if find_binaries() is not None else []


async def copy_after_kill(helper: HelperProcess, target: str) -> None:
    await helper.kill()
    arguments = ("db", "copy", "--to", target, "--yes", "--json", "--config", str(helper.config))
    code, copied, messages = await run_command_line(helper.config.parent, *arguments)
    assert code == 0, messages
    assert_conforms("db-copy", copied)
    assert copied["state"] == "moved"


@pytest.mark.parametrize("database", CLUSTERS)
async def test_db_copy_to_shared_database_and_back_keeps_claimed_shares(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    http: httpx.AsyncClient,
    chain: DevChain,
    monkeypatch: pytest.MonkeyPatch,
    database: str,
) -> None:
    monkeypatch.setenv("SVOTE_HELPER_BACKUP_PASSPHRASE", "correct horse battery")
    cluster: Cluster = request.getfixturevalue(database)
    keys, schema = tmp_path / "keys", f"moved_{token_hex(6)}"
    keys.touch(0o600)
    keys.write_text(token_hex(32))
    store_settings = {"key_file": str(keys), "schema_name": schema}
    shared = {**store_settings, "url": cluster.url, "host": "one"}

    async with run_helper(tmp_path, http, chain, store=store_settings) as helper:
        round_id = await chain.open_round()
        before = await cast_vote(chain, helper, round_id)
        await helper.wait_until_confirmed(before)
        with suspend_processes(await helper.worker_pids()):
            under_way = await cast_vote(chain, helper, round_id, proposal=2, times=ballot.immediate_times())
            await copy_after_kill(helper, cluster.url)

    left = HelperProcess(tmp_path, http, chain, program=STAND_IN_PROGRAM, store=store_settings)
    left.spawn()
    assert await left.wait_for_exit() == 1
    assert "was moved to postgresql://" in left.log_tail()

    async with run_helper(tmp_path, http, chain, store=shared) as helper:
        await helper.wait_until_confirmed(before)
        await helper.wait_until_confirmed(under_way)
        with suspend_processes(await helper.worker_pids()):  # or all shares could be revealed before the export
            after = await cast_vote(chain, helper, round_id, proposal=3)
            exported = await run_operator_command(helper, tmp_path, "export", "--move", "--output", "x.age")
        assert exported["moved"] > 0
        assert exported["moved"] + exported["stayed"] == exported["shares"]
        code, imported, messages = await run_command_line(
            tmp_path, "queue", "import", "x.age", "--config", str(helper.config), "--yes", "--json"
        )
        assert (code, imported["revived"]) == (3 if exported["stayed"] else 0, exported["moved"]), messages
        await copy_after_kill(helper, "sqlite")

    async with run_helper(tmp_path, http, chain, store=store_settings) as helper:
        for vote in (before, under_way, after):
            await helper.wait_until_confirmed(vote)
    nullifiers = [share.nullifier.hex() for vote in (before, under_way, after) for share in vote.shares]
    assert await chain.spent_nullifiers(round_id) == dict.fromkeys(nullifiers, 1)
