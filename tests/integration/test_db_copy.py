"""`db copy` from a file to a shared database and back while a helper runs: every share is confirmed once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx
import psycopg
import pytest

from devnet import ballot
from tests.integration.test_export_import import suspend_processes
from tests.integration.test_proof_bundle import run_command_line
from tests.support.devnet import DevChain
from tests.support.harness import STAND_IN_PROGRAM, HelperProcess, cast_vote, run_helper
from tests.support.postgres import Cluster, find_binaries
from tests.support.process import TIMEOUT_SECONDS
from tests.support.schemas import assert_conforms

CLUSTERS = ["cluster"] if find_binaries() is not None else []


@asynccontextmanager
async def run_concurrent_copy(helper: HelperProcess, target: str, arrived: Any) -> AsyncIterator[None]:
    """Start a migration during operation. It must finish after the helper is killed at the end of the block."""
    arguments = ("db", "copy", "--to", target, "--wait", "--yes", "--json", "--config", str(helper.config))
    copying = asyncio.create_task(run_command_line(helper.config.parent, *arguments))
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not await asyncio.to_thread(arrived):
            assert not copying.done(), copying.result()
            await asyncio.sleep(0.05)
    yield
    await helper.kill()
    code, copied, messages = await copying
    assert code == 0, messages
    assert_conforms("db-copy", copied)
    assert copied["state"] == "moved"


@pytest.mark.anyio
@pytest.mark.parametrize("database", CLUSTERS)
async def test_db_copy_to_shared_database_and_back_keeps_claimed_shares(
    request: pytest.FixtureRequest, tmp_path: Path, http: httpx.AsyncClient, chain: DevChain, database: str
) -> None:
    cluster: Cluster = request.getfixturevalue(database)
    keys, schema = tmp_path / "keys", f"moved_{token_hex(6)}"
    keys.touch(0o600)
    keys.write_text(token_hex(32))
    store_settings = {"key_file": str(keys), "schema_name": schema}
    shared = {**store_settings, "url": cluster.url, "host": "one"}

    def has_all() -> bool:
        with psycopg.connect(cluster.url) as conn:
            if conn.execute("SELECT to_regclass(%s)", (f"{schema}.shares",)).fetchone() == (None,):
                return False
            return conn.execute(f"SELECT count(*) FROM {schema}.shares".encode()).fetchone() == (16,)

    async with run_helper(tmp_path, http, chain, store=store_settings) as helper:
        round_id = await chain.open_round()
        before = await cast_vote(chain, helper, round_id)
        await helper.wait_until_confirmed(before)
        with suspend_processes(await helper.worker_pids()):
            under_way = await cast_vote(chain, helper, round_id, proposal=2, times=ballot.immediate_times())
            async with run_concurrent_copy(helper, cluster.url, has_all):
                pass

    left = HelperProcess(tmp_path, http, chain, program=STAND_IN_PROGRAM, store=store_settings)
    left.spawn()
    assert await left.wait_for_exit() == 1
    assert "was moved to postgresql://" in left.log_tail()

    async with run_helper(tmp_path, http, chain, store=shared) as helper:
        await helper.wait_until_confirmed(before)
        await helper.wait_until_confirmed(under_way)
        async with run_concurrent_copy(helper, "sqlite", lambda: True):
            after = await cast_vote(chain, helper, round_id, proposal=3)

    async with run_helper(tmp_path, http, chain, store=store_settings) as helper:
        for vote in (before, under_way, after):
            await helper.wait_until_confirmed(vote)
    nullifiers = [share.nullifier.hex() for vote in (before, under_way, after) for share in vote.shares]
    assert await chain.spent_nullifiers(round_id) == dict.fromkeys(nullifiers, 1)
