"""The tests of the lease and the archive with an object store of another make, and 100 contenders for one lease.

Run them with `make test ARGS='tests/deploy/test_object_stores.py'`. The first run compiles the store, which takes about
four minutes of CPU. The tests that other modules define run here with the fixtures of this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from helper.clock import SystemClock
from helper.errors import LeaseError
from helper.lease.s3_lease import LeaseRecord, S3Lease
from helper.object_store import Bucket
from tests.deploy.object_store_programs import install_s3rver, install_versitygw, versitygw_command
from tests.deploy.prerequisites import skip_or_fail
from tests.integration.conftest import chain, era, http, started_chains  # noqa: F401 - fixtures of the tests below
from tests.integration.test_lease import test_restored_copy_is_refused_until_original_stops  # noqa: F401 - runs here
from tests.integration.test_proof_bundle import (  # noqa: F401 - runs here
    test_proof_export_of_confirmed_reveal_sends_no_node_the_nullifier,
)
from tests.integration.test_round_archive import test_finished_round_is_archived_and_audited  # noqa: F401 - runs here
from tests.support.lease_contenders import LEASE_OBJECT, MARK_FOLDER
from tests.support.process import TIMEOUT_SECONDS
from tests.support.s3 import (
    BUCKET_NAME,
    CREDENTIALS_ENV,
    ObjectStoreProcess,
    create_client,
    put_released_lease,
    run_object_store,
)
from tests.unit.object_store.test_s3_bucket import (  # noqa: F401 - run here
    _reset_faults,
    store,
    test_access_denied_is_reported,
    test_conditional_write_requires_expected_object,
    test_conflicting_write_is_rejected_and_lease_retries,
    test_credentials_file_is_used,
    test_lease_over_s3_is_exclusive,
    test_missing_bucket_is_distinguished_from_missing_object,
    test_objects_are_stored_and_listed_below_prefix,
    test_stopped_client_does_not_block_test_server,
    test_store_error_message_is_short,
)

PROCESSES: Final = 5
CONTENDERS: Final = 20
"""Contenders in each process."""
LEASE_SECONDS: Final = 5.0
MARKS: Final = 10
"""Marks of a holder before it is stopped."""
BASE32_DIGITS: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
CHANGES: Final = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM) * 2
"""How the process of the holder is stopped, one change of the holder after the other."""

PROGRAMS: Final = ("go", "npm")
"""Programs that install the stores; go 1.25 or newer."""


@pytest.fixture(scope="session", autouse=True)
def _programs() -> None:
    """Skips all tests without the programs."""
    if None in map(shutil.which, PROGRAMS):
        skip_or_fail(f"needs {' and '.join(PROGRAMS)}")


@pytest.fixture(scope="session")
def object_store_program(_programs: None) -> tuple[str, ...]:
    """The command of the store that replaces moto."""
    return versitygw_command(install_versitygw())


@dataclass(frozen=True, slots=True)
class Version:
    """A version of the lease object, with the time at which the store wrote it (Unix seconds)."""

    written_at: float
    record: LeaseRecord


@dataclass(frozen=True, slots=True)
class Mark:
    """An object that a contender wrote while it held the lease with this fencing token, with the store's time."""

    written_at: float
    fence: int


async def test_store_without_conditional_writes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "S3RVER")  # the only keys that it accepts
    program = (str(install_s3rver()), "--port", "{port}", "--directory", "{data}", "--configure-bucket", BUCKET_NAME)
    server = ObjectStoreProcess(tmp_path, program)
    try:
        await server.start_server()
        bucket = server.open_bucket_client("queue", url=server.server_url)
        await bucket.put("readable", b"x")
        assert await bucket.get("readable") is not None
        with pytest.raises(LeaseError, match="ignores If-None-Match or If-Match and cannot hold a lease"):
            await S3Lease(bucket, "sender.json", host="a", clock=SystemClock(), seconds=10).acquire()
        assert await bucket.get("sender.json") is None
    finally:
        await server.kill()


async def test_hundred_contenders_have_one_holder_in_the_log_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS_ENV.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "s3-data-versions").mkdir()
    async with run_object_store(tmp_path, versitygw_command(install_versitygw(), versions=True)) as server:
        client = create_client(server.server_url)
        client.put_bucket_versioning(Bucket=BUCKET_NAME, VersioningConfiguration={"Status": "Enabled"})
        folder, _, name = LEASE_OBJECT.rpartition("/")
        bucket = server.open_bucket_client(folder)
        await put_released_lease(bucket, seconds=LEASE_SECONDS, name=name)
        async with run_contenders(server.server_url) as contenders:
            fence = 0
            for change in CHANGES:
                holder = await wait_for_marks(bucket, name, server.open_bucket_client(MARK_FOLDER), after=fence)
                fence = holder.fence
                process = contenders[holder.host.partition(".")[0]]
                process.send_signal(change)
                await wait_for_holder(bucket, name, after=fence)
                if change is signal.SIGSTOP:
                    process.send_signal(signal.SIGCONT)
                else:
                    await process.wait()
                    await start_contenders(contenders, holder.host.partition(".")[0], server.server_url)
            await wait_for_marks(bucket, name, server.open_bucket_client(MARK_FOLDER), after=fence)
        versions, marks = await asyncio.to_thread(read_log, client)
    assert len({version.record.fence for version in versions}) > len(CHANGES)
    assert len(marks) >= MARKS * (len(CHANGES) + 1)
    assert_one_holder(versions, marks)


async def start_contenders(contenders: dict[str, asyncio.subprocess.Process], name: str, url: str) -> None:
    """Start a process with `CONTENDERS` contenders, and wait until it contends."""
    arguments = ("-m", "tests.support.lease_contenders", url, name, str(CONTENDERS), str(LEASE_SECONDS))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, env={**os.environ, **CREDENTIALS_ENV}
    )
    contenders[name] = process
    assert process.stdout is not None
    async with asyncio.timeout(TIMEOUT_SECONDS):
        assert await process.stdout.readline() == b"ready\n"


@contextlib.asynccontextmanager
async def run_contenders(url: str) -> AsyncIterator[dict[str, asyncio.subprocess.Process]]:
    """Run all processes of contenders, by name. Kills them at the end."""
    contenders: dict[str, asyncio.subprocess.Process] = {}
    try:
        await asyncio.gather(*(start_contenders(contenders, f"process{n}", url) for n in range(PROCESSES)))
        yield contenders
    finally:
        for process in contenders.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def wait_for_holder(bucket: Bucket, name: str, *, after: int) -> LeaseRecord:
    """Wait until a host holds the lease with a greater fencing token than `after`."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while True:
            stored = await bucket.get(name)
            assert stored is not None
            record = LeaseRecord.from_bytes(stored.body)
            if record.fence > after and not record.released:
                return record
            await asyncio.sleep(0.05)


async def wait_for_marks(bucket: Bucket, name: str, marks: Bucket, *, after: int) -> LeaseRecord:
    """Wait until a host with a greater fencing token than `after` holds the lease and has written `MARKS` marks."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while True:
            holder = await wait_for_holder(bucket, name, after=after)
            if len(await marks.list_names(str(holder.fence))) >= MARKS:
                return holder
            await asyncio.sleep(0.05)


def read_log(client: Any) -> tuple[list[Version], list[Mark]]:
    """Read all versions of the lease, oldest first, and all marks, from the store."""
    versions: list[Version] = []
    marks: list[Mark] = []
    for page in client.get_paginator("list_object_versions").paginate(Bucket=BUCKET_NAME):
        for entry in page.get("Versions", ()):
            written_at = parse_ulid_time(entry["VersionId"])
            if entry["Key"] == LEASE_OBJECT:
                stored = client.get_object(Bucket=BUCKET_NAME, Key=LEASE_OBJECT, VersionId=entry["VersionId"])
                versions.append(Version(written_at, LeaseRecord.from_bytes(stored["Body"].read())))
            elif entry["Key"].startswith(f"{MARK_FOLDER}/"):
                marks.append(Mark(written_at, int(entry["Key"].split("/")[1])))
    return sorted(versions, key=lambda version: version.written_at), marks


def parse_ulid_time(version_id: str) -> float:
    """Return the Unix seconds in a version id of the store, which is a ULID: ten base32 digits are milliseconds.

    The store lists times of modification in whole seconds only.
    """
    milliseconds = 0
    for digit in version_id[:10]:
        milliseconds = 32 * milliseconds + BASE32_DIGITS.index(digit)
    return milliseconds / 1000


def assert_one_holder(versions: Sequence[Version], marks: Sequence[Mark]) -> None:
    """Assert by the times of the store that no two contenders held the lease at the same time.

    A holder considers its lease expired before LEASE_SECONDS have passed since it *requested* its last version. If
    another one wrote its first version later than that, or after the release, the two terms do not overlap. The marks
    show that the holders kept to this: a mark outside the term of its token may only be one that a stopped process had
    already begun to write.
    """
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for before, after in itertools.pairwise(versions):
        begins.setdefault(after.record.fence, after.written_at)
        if after.record.released:
            ends[after.record.fence] = after.written_at
        if after.record.fence == before.record.fence:
            assert after.record.holder == before.record.holder
            continue
        assert after.record.fence > before.record.fence
        assert before.record.released or after.written_at - before.written_at >= LEASE_SECONDS
        ends.setdefault(before.record.fence, after.written_at)
    late = [mark for mark in marks if not begins[mark.fence] <= mark.written_at <= ends.get(mark.fence, math.inf)]
    assert len(late) <= CHANGES.count(signal.SIGSTOP)
