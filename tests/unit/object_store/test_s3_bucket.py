"""Buckets over HTTP: an object store that honors conditions, and faults of real object stores.

tests/deploy/test_object_stores.py repeats these tests with another server than moto.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from helper.clock import SystemClock
from helper.config.sections import S3Section
from helper.config.value_types import BucketLocation
from helper.errors import BucketError, BucketRefused, BucketThrottled, ConfigError, LeaseError
from helper.lease.s3_lease import LeaseRecord, S3Lease
from helper.object_store import Bucket, open_bucket
from helper.operations.archive_reader import RETRIES
from tests.support.clock import FakeClock
from tests.support.process import find_free_port
from tests.support.s3 import BUCKET_NAME, CREDENTIALS_ENV, ObjectStoreProcess, put_released_lease
from tests.support.servers import serve_connections


@pytest.fixture(scope="module")
def store(
    tmp_path_factory: pytest.TempPathFactory, object_store_program: tuple[str, ...]
) -> Iterator[ObjectStoreProcess]:
    process = ObjectStoreProcess(tmp_path_factory.mktemp("s3"), object_store_program)
    try:
        asyncio.run(process.start())
        yield process
    finally:
        asyncio.run(process.kill())


@pytest.fixture(autouse=True)
async def _reset_faults(store: ObjectStoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear all faults; set credentials in the environment."""
    await store.set_faults()
    for name, value in CREDENTIALS_ENV.items():
        monkeypatch.setenv(name, value)


async def test_stopped_client_does_not_block_test_server(store: ObjectStoreProcess) -> None:
    # Regression: with SIGSTOP at this moment, a test waited forever for the server.
    url = urlsplit(store.url)
    partial_requests = [
        b"",
        b"PUT /" + BUCKET_NAME.encode(),
        f"PUT /{BUCKET_NAME}/x HTTP/1.1\r\ncontent-length: 9\r\n\r\nhalf".encode(),
    ]
    stopped = [await asyncio.open_connection(url.hostname, url.port) for _ in partial_requests]
    try:
        for half, (_, writer) in zip(partial_requests, stopped, strict=True):
            writer.write(half)
            await writer.drain()
        bucket: Bucket = store.open_bucket_client("stopped", seconds=5)
        await bucket.put("a.txt", b"whole")
        assert await bucket.list_names("") == ["a.txt"]
    finally:
        for _, writer in stopped:
            writer.close()


async def test_objects_are_stored_and_listed_below_prefix(store: ObjectStoreProcess) -> None:
    bucket: Bucket = store.open_bucket_client("some/where")
    assert await bucket.get("a/1.txt") is None
    await bucket.put("a/1.txt", b"first")
    await bucket.put("a/1.txt", b"second")
    await bucket.put("a/index/2.txt", b"")
    await bucket.put("b/3.txt", b"x")
    await bucket.put("4.txt", b"x")
    current = await bucket.get("a/1.txt")
    assert current is not None
    assert (current.body, bool(current.etag)) == (b"second", True)
    assert await bucket.list_names("a") == ["a/1.txt", "a/index/2.txt"]
    assert await bucket.list_names("a/index") == ["a/index/2.txt"]
    assert await bucket.list_names("nothing") == []
    assert await bucket.list_folders() == ["a", "b"]
    assert await store.open_bucket_client().list_names("some/where/b") == ["some/where/b/3.txt"]


async def test_conditional_write_requires_expected_object(store: ObjectStoreProcess) -> None:
    bucket = store.open_bucket_client("conditions")
    first = await bucket.create("x", b"1")
    assert first
    assert await bucket.create("x", b"2") is None
    second = await bucket.replace("x", b"3", first)
    assert second
    assert second != first
    assert await bucket.replace("x", b"4", first) is None
    assert await bucket.replace("not there", b"4", first) is None
    current = await bucket.get("x")
    assert current is not None
    assert (current.body, current.etag) == (b"3", second)


async def test_credentials_file_is_used(
    store: ObjectStoreProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CREDENTIALS_ENV:
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    access, secret = CREDENTIALS_ENV["AWS_ACCESS_KEY_ID"], CREDENTIALS_ENV["AWS_SECRET_ACCESS_KEY"]
    file.write_text(f"[default]\naws_access_key_id = {access}\naws_secret_access_key = {secret}\n")
    await store.open_bucket_client(credentials_file=str(file)).put("by file", b"x")
    assert await store.open_bucket_client(credentials_file=str(file)).get("by file") is not None


async def test_missing_bucket_is_distinguished_from_missing_object(store: ObjectStoreProcess) -> None:
    bucket = store.open_bucket_client(name="another-one")
    for request in (bucket.put("a", b""), bucket.create("a", b"")):
        with pytest.raises(BucketRefused, match="s3://another-one: no such bucket"):
            await request


async def test_store_error_message_is_short(store: ObjectStoreProcess) -> None:
    bucket = store.open_bucket_client()
    await store.set_faults(unavailable=2)
    with pytest.raises(BucketThrottled, match="write a") as caught:
        await bucket.put("a", b"")
    with pytest.raises(BucketThrottled, match="read a"):
        await bucket.get("a")
    assert await store.request_counts() == {"PUT": 1, "GET": 1}
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    await store.set_faults(delay=0.5)
    with pytest.raises(BucketError):
        await store.open_bucket_client(seconds=0.1).get("a")
    unreachable = S3Section(endpoint=f"http://127.0.0.1:{find_free_port()}")
    with pytest.raises(BucketError):
        await open_bucket(unreachable, BucketLocation(BUCKET_NAME, ""), clock=SystemClock(), seconds=1).get("a")


async def test_requests_are_repeated_if_the_store_fails_but_not_if_it_refuses(store: ObjectStoreProcess) -> None:
    bucket = store.open_bucket_client(retries=RETRIES)
    await store.set_faults(unavailable=RETRIES)
    await bucket.put("a", b"x")
    assert await store.request_counts() == {"PUT": RETRIES + 1}
    await store.set_faults(forbidden=1)
    with pytest.raises(BucketRefused):
        await bucket.put("a", b"x")
    assert await store.request_counts() == {"PUT": 1}


async def test_same_store_error_has_same_message() -> None:
    bucket = open_bucket(
        S3Section(endpoint=f"http://127.0.0.1:{find_free_port()}"),
        BucketLocation(BUCKET_NAME, ""),
        clock=SystemClock(),
        seconds=5,
    )
    errors = set()
    for _ in range(5):
        with pytest.raises(BucketError) as caught:
            await bucket.get("a")
        errors.add(str(caught.value))
    assert len(errors) == 1, "a log that reports each reason once would report each attempt"


@pytest.mark.parametrize("status", [400, 403, 500])
async def test_store_error_message_contains_only_response_code(status: int) -> None:
    body = b"<Error><Code>ExpiredToken</Code><AWSAccessKeyId>AKIA1</AWSAccessKeyId><Token-0>secret</Token-0></Error>"

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %d No\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)
        await writer.drain()
        writer.close()

    async with serve_connections(refuse) as port:
        address = f"http://127.0.0.1:{port}"
        bucket = open_bucket(
            S3Section(endpoint=address), BucketLocation(BUCKET_NAME, ""), clock=SystemClock(), seconds=5
        )
        for request in (bucket.get("a"), bucket.create("a", b""), bucket.list_names("a")):
            with pytest.raises(BucketError, match=rf"{status}.*\(ExpiredToken\)$") as caught:
                await request
            assert "AKIA1" not in str(caught.value)
            assert "secret" not in str(caught.value)


async def test_access_denied_is_reported(store: ObjectStoreProcess) -> None:
    bucket = store.open_bucket_client()
    await store.set_faults(forbidden=3)
    for request in (bucket.put("a", b""), bucket.get("a"), bucket.list_names("a")):
        with pytest.raises(BucketRefused):
            await request


async def test_conflicting_write_is_rejected_and_lease_retries(store: ObjectStoreProcess) -> None:
    bucket = store.open_bucket_client("met")
    await store.set_faults(conflict=1)
    assert await bucket.create("x", b"1") is None
    assert await bucket.get("x") is None
    tag = await bucket.create("x", b"1")
    assert tag
    await store.set_faults(conflict=1)
    assert await bucket.replace("x", b"2", tag) is None
    assert await bucket.replace("x", b"3", tag)
    await put_released_lease(bucket, seconds=2)
    lease = S3Lease(bucket, "sender.json", host="a", clock=SystemClock(), seconds=10)
    assert await lease.acquire()
    await store.set_faults(conflict=1)
    assert await lease.renew()
    await store.set_faults(conflict=1)
    await lease.release()
    await store.set_faults(conflict=1)
    assert await lease.acquire()
    assert lease.fence == 2


async def test_missing_library_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ConfigError, match="s3://votes needs obstore") as caught:
        open_bucket(S3Section(), BucketLocation("votes", ""), clock=SystemClock())
    assert caught.value.advice == "pip install 'svote-helper[s3]'"


async def test_lease_over_s3_is_exclusive(store: ObjectStoreProcess) -> None:
    clock = FakeClock()

    def lease(host: str) -> S3Lease:
        return S3Lease(store.open_bucket_client("lease"), "sender.json", host=host, clock=clock, seconds=30)

    await put_released_lease(store.open_bucket_client("lease"), seconds=30)
    hosts = [lease(name) for name in "abc"]
    acquired = await asyncio.gather(*(lease.acquire() for lease in hosts))
    assert sorted(acquired) == [False, False, True]
    winner = hosts[acquired.index(True)]
    await store.set_faults(lost_response=1)
    with pytest.raises(LeaseError):
        await winner.renew()
    assert await winner.renew()
    assert await store.request_counts() == {"PUT": 3, "GET": 1}
    await winner.release()
    other = hosts[acquired.index(False)]
    assert await other.acquire()
    assert (other.fence, winner.is_held, other.is_held) == (2, False, True)
    current = await store.open_bucket_client("lease").get("sender.json")
    assert current is not None
    assert LeaseRecord.from_bytes(current.body).fence == 2
    assert not await winner.acquire()
    clock.advance(31)  # the holder no longer renews
    assert await winner.acquire()
    assert (winner.fence, other.is_held, await other.renew()) == (3, False, False)


async def test_store_ignoring_conditions_is_refused(store: ObjectStoreProcess) -> None:
    await store.set_faults(ignores_conditions=True)
    lease = S3Lease(store.open_bucket_client("deaf"), "sender.json", host="a", clock=SystemClock(), seconds=10)
    with pytest.raises(LeaseError, match="ignores If-None-Match"):
        await lease.acquire()
