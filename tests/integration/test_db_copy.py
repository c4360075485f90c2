"""A queue that goes from a file into a shared database and back under a helper that works: all is counted, once."""

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
from tests.integration.test_export_import import stopped
from tests.integration.test_proof_bundle import command
from tests.support.devnet import Chain
from tests.support.harness import STAND_IN, Helper, cast_vote, helping
from tests.support.postgres import Cluster, binaries
from tests.support.process import PATIENCE
from tests.support.schemas import conforms

CLUSTERS = ["cluster"] if binaries() is not None else []


@asynccontextmanager
async def moving_beside(helper: Helper, to: str, arrived: Any) -> AsyncIterator[None]:
    """A move that was begun while the helper works, and is to end by itself once that was killed in this block."""
    words = ("db", "copy", "--to", to, "--wait", "--yes", "--json", "--config", str(helper.config))
    moving = asyncio.create_task(command(helper.config.parent, *words))
    async with asyncio.timeout(PATIENCE):
        while not await asyncio.to_thread(arrived):
            assert not moving.done(), moving.result()
            await asyncio.sleep(0.05)
    yield
    await helper.kill()
    code, told, said = await moving
    assert code == 0, said
    conforms("db-copy", told)
    assert told["state"] == "moved"


@pytest.mark.anyio
@pytest.mark.parametrize("database", CLUSTERS)
async def test_into_a_shared_database_and_back_with_shares_in_hand(
    request: pytest.FixtureRequest, tmp_path: Path, http: httpx.AsyncClient, chain: Chain, database: str
) -> None:
    cluster: Cluster = request.getfixturevalue(database)
    keys, schema = tmp_path / "keys", f"moved_{token_hex(6)}"
    keys.touch(0o600)
    keys.write_text(token_hex(32))
    alone = {"key_file": str(keys), "schema_name": schema}
    shared = {**alone, "url": cluster.address, "host": "one"}

    def has_all() -> bool:
        with psycopg.connect(cluster.address) as conn:
            if conn.execute("SELECT to_regclass(%s)", (f"{schema}.shares",)).fetchone() == (None,):
                return False
            return conn.execute(f"SELECT count(*) FROM {schema}.shares".encode()).fetchone() == (16,)

    async with helping(tmp_path, http, chain, store=alone) as helper:
        round_id = await chain.open_round()
        before = await cast_vote(chain, helper, round_id)
        await helper.confirmed(before)
        with stopped(await helper.workers()):
            under_way = await cast_vote(chain, helper, round_id, proposal=2, times=ballot.immediate())
            async with moving_beside(helper, cluster.address, has_all):
                pass

    left = Helper(tmp_path, http, chain, program=STAND_IN, store=alone)
    left.launch()
    assert await left.ended() == 1
    assert "was moved to postgresql://" in left.tail()

    async with helping(tmp_path, http, chain, store=shared) as helper:
        await helper.confirmed(before)
        await helper.confirmed(under_way)
        async with moving_beside(helper, "sqlite", lambda: True):
            after = await cast_vote(chain, helper, round_id, proposal=3)

    async with helping(tmp_path, http, chain, store=alone) as helper:
        for vote in (before, under_way, after):
            await helper.confirmed(vote)
    nullifiers = [share.nullifier.hex() for vote in (before, under_way, after) for share in vote.shares]
    assert await chain.spent(round_id) == dict.fromkeys(nullifiers, 1)
