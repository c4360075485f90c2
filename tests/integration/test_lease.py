"""A queue in a file and a copy on another host: the lease in an object store lets only one of them run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx

from devnet import ballot
from tests.support.devnet import DevChain
from tests.support.harness import STAND_IN_PROGRAM, HelperProcess, cast_vote, unix_time_in
from tests.support.s3 import BUCKET_NAME, ObjectStoreProcess, put_released_lease

LEASE_SECONDS = 5


def host_config(
    name: str, directory: Path, http: httpx.AsyncClient, chain: DevChain, store: ObjectStoreProcess
) -> HelperProcess:
    """Return the settings of a host. Only its name differs between hosts."""
    sections: dict[str, Any] = {
        "helper": {"max_concurrent_proofs": 1},
        "store": {"host": name, "lease_seconds": LEASE_SECONDS},
        "sender": {"lease": f"s3://{BUCKET_NAME}/queue/sender.json"},
        "s3": {"endpoint": store.url},
    }
    return HelperProcess(directory / name, http, chain, program=STAND_IN_PROGRAM, **sections)


async def test_restored_copy_is_refused_until_original_stops(
    tmp_path: Path, http: httpx.AsyncClient, chain: DevChain, object_store: ObjectStoreProcess
) -> None:
    await put_released_lease(object_store.open_bucket_client("queue"), seconds=LEASE_SECONDS)
    original, copy = (host_config(name, tmp_path, http, chain, object_store) for name in ("original", "copy"))
    try:
        await original.start()
        await original.wait_until("is ready", lambda facts: facts["ready"])
        round_id = await chain.open_round()
        vote = await cast_vote(chain, original, round_id, times=ballot.same_second_times(unix_time_in(1800)))
        assert await original.stop() == 0
        shutil.copy(original.db, copy.db)
        await original.start()
        assert (await original.service_stats())["sends"], "after a clean shutdown the other host does not wait"

        copy.spawn()
        assert await copy.wait_for_exit() == 1
        assert "host 'original' holds the sender lease of this queue" in copy.log_tail()
        assert "copy of the other" in copy.log_tail()

        await original.kill()
        await copy.start()
        await copy.wait_until("sends", lambda facts: facts["sends"])
        assert (await copy.service_stats())["sender"] == ""
        assert len(vote.shares) == copy.count_rows()
    finally:
        for path in (original, copy):
            if path.process is not None:
                await path.kill()
