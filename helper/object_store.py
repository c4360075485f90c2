"""Buckets of S3-compatible object stores, over obstore, a binding of the Rust crate object_store.

A bucket has small named objects, with conditional writes. A credentials file is one of S3 tools: an INI file with one
section per profile.
"""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import anyio
import anyio.to_thread

from helper.clock import Clock
from helper.config.sections import S3Section
from helper.config.value_types import BucketLocation
from helper.errors import BucketError, BucketRefused, BucketThrottled, ConfigError

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
CREDENTIALS_FILE_VARIABLE: Final = "AWS_SHARED_CREDENTIALS_FILE"
PROFILE_VARIABLE: Final = "AWS_PROFILE"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object: its bytes and the ETag of this version."""

    body: bytes
    etag: str


def open_bucket(
    settings: S3Section,
    location: BucketLocation,
    *,
    clock: Clock,
    seconds: float | None = None,
    retries: int = 0,
) -> Bucket:
    """Open a bucket, with the credentials of the settings or of the environment. Makes no request.

    Args:
        seconds: time limit of a request, None for that of the settings.
        retries: repetitions of a request after an error of the store or the connection, within the time limit. Not for
            conditional writes: one that was done without a response would be repeated, and refused.

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
    # Without a file, the client finds keys itself: AWS_ACCESS_KEY_ID and related variables, a web identity, or the role
    # of the container or machine.
    if file := settings.credentials_file or os.environ.get(CREDENTIALS_FILE_VARIABLE):
        provider = partial(read_credential, Path(file), os.environ.get(PROFILE_VARIABLE) or "default", clock)
        provider()  # detects errors in the file now rather than at the first request
    store = S3Store(
        location.bucket,
        prefix=location.path or None,
        config=config,
        client_options=options,
        retry_config={"max_retries": retries, "retry_timeout": timeout},
        credential_provider=provider,
    )
    return Bucket(store, location, timeout.total_seconds())


def read_credential(path: Path, profile: str, clock: Clock) -> S3Credential:
    """Read the keys of a profile from a credentials file.

    Raises:
        ConfigError: it cannot be read or has no keys. The message quotes nothing from the file.
    """
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, configparser.Error):
        raise ConfigError(f"{path} is not a credentials file: [{profile}], then aws_access_key_id = …") from None
    if not parser.has_section(profile):
        raise ConfigError(f"{path} has no section [{profile}]")
    section = parser[profile]
    access, secret = section.get("aws_access_key_id", ""), section.get("aws_secret_access_key", "")
    if not access or not secret:
        raise ConfigError(f"{path}: [{profile}] needs aws_access_key_id and aws_secret_access_key")
    return {
        "access_key_id": access,
        "secret_access_key": secret,
        "token": section.get("aws_session_token") or None,
        "expires_at": datetime.fromtimestamp(clock.now() + KEY_CACHE_SECONDS, UTC),
    }


class Bucket:
    """Named objects below one path of a store.

    Each method except `list_names` makes one request, with a time limit for it and its repetitions. All raise
    BucketError if the outcome is unknown (a write may have been done), and BucketRefused if the store denies access.

    A request is a blocking call of the library in a worker thread. The asynchronous calls of the library complete in
    its own threads, which hold Python objects and abort a process that exits at that moment.

    Args:
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
        """Return an object, None if it does not exist."""
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
        """Write an object unconditionally."""
        with self._existing_bucket():
            await self._request(f"write {name}", lambda: self._api.put(self._store, name, body, use_multipart=False))

    async def create(self, name: str, body: bytes) -> str | None:
        """Write an object if it does not exist.

        Returns:
            Its ETag; None if it was not written, because it exists or another write was in progress.
        """
        with self._existing_bucket():
            return await self._write_if(name, body, "create")

    async def replace(self, name: str, body: bytes, tag: str) -> str | None:
        """Replace an object if its ETag is `tag`.

        Returns:
            The new ETag; None if it was not written, because the version differs, the object is missing, or another
            write was in progress.
        """
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
        """Return the names of all objects below a directory, sorted. May need several requests."""

        def list_all() -> list[str]:
            return [meta["path"] for page in self._api.list(self._store, folder, chunk_size=1000) for meta in page]

        with self._existing_bucket():
            return sorted(await self._request(f"list {folder}", list_all, bounded=False))

    async def list_folders(self) -> list[str]:
        """Return the directories directly below the path, sorted."""
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
