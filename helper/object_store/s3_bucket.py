"""Buckets over obstore, a binding of the Rust crate object_store."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import anyio
import anyio.to_thread

from helper.clock import Clock
from helper.errors import BucketError, BucketRefused, BucketThrottled, ConfigError
from helper.object_store.bucket import (
    PROFILE_VARIABLE,
    BucketLocation,
    S3Settings,
    StoredObject,
    find_credentials_file,
    read_access_keys,
)

if TYPE_CHECKING:
    from obstore import PutMode
    from obstore.store import ClientConfig, S3Config, S3Credential, S3Store


T = TypeVar("T")

PACKAGE_MISSING_TEXT: Final = "needs obstore, which is not installed"
KEY_CACHE_SECONDS: Final = 300.0
"""Seconds after which a credentials file is read again, as keys may be rotated while the service runs."""
_MAX_BYTES: Final = 16 << 20
"""Maximum size of an object that is read. The largest object written, an index of 100 full blocks, has 7 MB."""
_MAX_REASON: Final = 200
_MAX_REQUESTS: Final = 8
"""Concurrent requests to a bucket, so that a thread is always free for other parts of the service."""
_DENIED: Final = re.compile(r"status code: 40[13]\b")
_THROTTLED: Final = re.compile(r"status code: 429\b|<Code>SlowDown</Code>")
_DURATION: Final = re.compile(r" in [0-9.]+(?:ns|µs|ms|s)\b")
_STATUS_AND_BODY: Final = re.compile(r"(status code: \d{3}[^:]*): .*")
_ERROR_CODE: Final = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")


def open_bucket(
    settings: S3Settings,
    location: BucketLocation,
    *,
    clock: Clock,
    env: Mapping[str, str],
    seconds: float | None = None,
) -> S3Bucket:
    """Open a bucket. Makes no request.

    Args:
        settings: connection settings.
        location: bucket and path.
        clock: the source of time.
        env: the environment, for the credentials file.
        seconds: time limit of a request, None for that of the settings.

    Raises:
        ConfigError: the library is not installed, or the credentials file is invalid.
    """
    try:
        from obstore.store import S3Store  # noqa: PLC0415 - an optional dependency
    except ImportError:
        raise ConfigError(f"{location} {PACKAGE_MISSING_TEXT}", advice="pip install 'svote-helper[s3]'") from None
    timeout = timedelta(seconds=settings.timeout_seconds if seconds is None else seconds)
    options: ClientConfig = {"timeout": timeout, "connect_timeout": timeout}
    config: S3Config = {"region": settings.region, "virtual_hosted_style_request": settings.virtual_host}
    if settings.endpoint:
        config["endpoint"] = settings.endpoint
        options["allow_http"] = settings.endpoint.startswith("http://")
    provider: Callable[[], S3Credential] | None = None
    if file := find_credentials_file(settings.credentials_file, env):
        profile = env.get(PROFILE_VARIABLE) or "default"
        read_access_keys(file, profile)  # detects errors in the file now rather than at the first request
        provider = partial(_read_credential, file, profile, clock)
    store = S3Store(
        location.bucket,
        prefix=location.path or None,
        config=config,
        client_options=options,
        retry_config={"max_retries": 0, "retry_timeout": timeout},
        credential_provider=provider,
    )
    return S3Bucket(store, location, timeout.total_seconds())


def _read_credential(file: Path, profile: str, clock: Clock) -> S3Credential:
    keys = read_access_keys(file, profile)
    return {
        "access_key_id": keys.access_key,
        "secret_access_key": keys.secret_key,
        "token": keys.token,
        "expires_at": datetime.fromtimestamp(clock.now() + KEY_CACHE_SECONDS, UTC),
    }


class S3Bucket:
    """A `helper.object_store.bucket.Bucket` over an S3 store.

    Each request is a blocking call of the library in a worker thread. The asynchronous calls of the library complete in
    its own threads, which hold Python objects and abort a process that exits at that moment.

    Args:
        store: the client, without retries.
        location: bucket and path, for messages.
        seconds: time limit of a request. The client has the same limit, so that threads do not outlive it.
    """

    def __init__(self, store: S3Store, location: BucketLocation, seconds: float) -> None:
        import obstore  # noqa: PLC0415 - an optional dependency

        self._api = obstore
        self._store = store
        self._location = location
        self._seconds = seconds
        self._threads = anyio.CapacityLimiter(_MAX_REQUESTS)

    async def get(self, name: str) -> StoredObject | None:
        """See `Bucket`."""
        try:
            return await self._request(f"read {name}", partial(self._get, name))
        except FileNotFoundError:
            return None

    def _get(self, name: str) -> StoredObject:
        result = self._api.get(self._store, name)
        if result.meta["size"] > _MAX_BYTES:
            raise BucketError(f"{self._location}: {name} has {result.meta['size']} bytes, the limit is {_MAX_BYTES}")
        return StoredObject(bytes(result.bytes()), self._require_etag(result.meta["e_tag"], name))

    async def put(self, name: str, body: bytes) -> None:
        """See `Bucket`."""
        with self._existing_bucket():
            await self._request(f"write {name}", lambda: self._api.put(self._store, name, body, use_multipart=False))

    async def create(self, name: str, body: bytes) -> str | None:
        """See `Bucket`."""
        with self._existing_bucket():
            return await self._write_if(name, body, "create")

    async def replace(self, name: str, body: bytes, tag: str) -> str | None:
        """See `Bucket`."""
        try:
            return await self._write_if(name, body, {"e_tag": tag})
        except FileNotFoundError:
            return None

    async def _write_if(self, name: str, body: bytes, mode: PutMode) -> str | None:
        errors = self._api.exceptions
        try:
            written = await self._request(f"write {name}", lambda: self._api.put(self._store, name, body, mode=mode))
        except (errors.AlreadyExistsError, errors.PreconditionError):
            return None
        return self._require_etag(written["e_tag"], name)

    async def list_names(self, folder: str) -> list[str]:
        """See `Bucket`."""

        def list_all() -> list[str]:
            return [meta["path"] for page in self._api.list(self._store, folder, chunk_size=1000) for meta in page]

        with self._existing_bucket():
            return sorted(await self._request(f"list {folder}", list_all, bounded=False))

    async def list_folders(self) -> list[str]:
        """See `Bucket`."""
        with self._existing_bucket():
            listed = await self._request("list directories", lambda: self._api.list_with_delimiter(self._store))
            return sorted(path.rpartition("/")[2] for path in listed["common_prefixes"])

    def _require_etag(self, tag: str | None, name: str) -> str:
        if not tag:
            raise BucketError(f"{self._location}: the store returned no ETag for {name}")
        return tag

    @contextmanager
    def _existing_bucket(self) -> Iterator[None]:
        """Report "not found" as a missing bucket, in calls that do not need an existing object."""
        try:
            yield
        except FileNotFoundError:
            raise BucketRefused(f"{self._location}: no such bucket") from None

    async def _request(self, what: str, call: Callable[[], T], *, bounded: bool = True) -> T:
        """Make a request in a thread and translate its errors, except those that callers handle.

        Args:
            what: the operation, for messages.
            call: makes the request, and blocks.
            bounded: whether the time limit applies to the entire call; otherwise only to each of its requests.
        """
        errors = self._api.exceptions
        try:
            with anyio.fail_after(self._seconds if bounded else None):
                return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._threads)
        except (FileNotFoundError, errors.AlreadyExistsError, errors.PreconditionError, BucketError):
            raise
        except TimeoutError:
            raise BucketError(f"{self._location}: {what}: no response within {self._seconds:g} s") from None
        except (errors.PermissionDeniedError, errors.UnauthenticatedError, PermissionError) as error:
            raise BucketRefused(f"{self._location}: {what}: {_error_reason(error)}") from None
        except (errors.BaseError, OSError, ConfigError) as error:
            # The library does not classify denied list requests.
            kind = BucketRefused if _DENIED.search(str(error)) else BucketError
            kind = BucketThrottled if _THROTTLED.search(str(error)) else kind
            raise kind(f"{self._location}: {what}: {_error_reason(error)}") from None


def _error_reason(error: Exception) -> str:
    """Return the first line of the library's message, without durations, so that equal errors have equal texts.

    It contains only the error code of the response body, because some stores include the request's key and token in it.
    """
    text = str(error).strip() or type(error).__name__
    line = _STATUS_AND_BODY.sub(r"\1", _DURATION.sub("", text.splitlines()[0]))
    line = line if len(line) <= _MAX_REASON else f"{line[:_MAX_REASON]}…"
    code = _ERROR_CODE.search(text)
    return line if code is None else f"{line} ({code[1]})"
