"""A queue in a file, and a copy of it on another host: the lease in an object store lets one of them work."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from devnet import ballot
from helper.lease.record import LeaseRecord
from helper.lease.s3 import NOBODY
from tests.support.devnet import Chain
from tests.support.harness import STAND_IN, Helper, cast_vote, soon
from tests.support.s3 import BUCKET, ENV, ObjectStore, storing

pytestmark = pytest.mark.anyio

SECONDS = 5


def host(name: str, folder: Path, http: httpx.AsyncClient, chain: Chain, store: ObjectStore) -> Helper:
    """A helper whose settings are those of the other but for its name."""
    (folder / name).mkdir()
    sections: dict[str, Any] = {
        "helper": {"max_concurrent_proofs": 1},
        "store": {"host": name, "lease_seconds": SECONDS},
        "sender": {"lease": f"s3://{BUCKET}/queue/sender.json"},
        "s3": {"endpoint": store.url},
    }
    return Helper(folder / name, http, chain, program=STAND_IN, **sections)


async def free(store: ObjectStore) -> None:
    """A lease that nobody has any more: the first host need not wait."""
    nobody = LeaseRecord(holder=NOBODY, host="", fence=0, beat=0, seconds=SECONDS, released=True, written=0)
    await store.bucket("queue").put("sender.json", nobody.to_bytes())


async def test_a_restored_copy_refuses_beside_its_original_and_goes_on_without_it(
    tmp_path: Path, http: httpx.AsyncClient, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    async with storing(tmp_path) as store:
        await free(store)
        original, copy = (host(name, tmp_path, http, chain, store) for name in ("original", "copy"))
        try:
            await original.start()
            await original.until("is ready", lambda facts: facts["ready"])
            round_id = await chain.open_round()
            vote = await cast_vote(chain, original, round_id, times=ballot.same_second(soon(60)))
            assert await original.stop() == 0
            shutil.copy(original.db, copy.db)
            await original.start()
            assert (await original.service())["sends"], "it was stopped properly: nobody waits"

            copy.launch()
            assert await copy.ended() == 1
            assert "the host 'original' sends for this queue" in copy.tail()
            assert "copy of the other" in copy.tail()

            await original.kill()
            await copy.start()
            await copy.until("sends", lambda facts: facts["sends"])
            assert (await copy.service())["sender"] == ""
            assert len(vote.shares) == copy.rows("SELECT count(*) FROM shares")[0][0]
        finally:
            for one in (original, copy):
                if one.process is not None:
                    await one.kill()
