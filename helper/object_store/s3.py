"""Buckets over obstore: the object_store crate, which signs, speaks TLS and finds credentials."""

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
from helper.errors import BucketError, BucketRefused, ConfigError
from helper.object_store.bucket import BucketLocation, S3Settings, StoredObject
from helper.object_store.credentials import PROFILE, credentials_file, read_keys

if TYPE_CHECKING:
    from obstore import PutMode
    from obstore.store import ClientConfig, S3Config, S3Credential, S3Store

T = TypeVar("T")

MISSING: Final = "needs obstore, which is not installed"
KEYS_LAST: Final = 300.0
"""Seconds after which a credentials file is read again: keys are changed while services run."""
_LARGEST: Final = 16 << 20
"""Bytes; the largest of ours, an index of 100 blocks that are full of reveals, has 7 MB."""
_SAID: Final = 200
_AT_ONCE: Final = 8
"""Requests to a bucket at once: no other part of the service waits for a thread because of them."""
_REFUSED: Final = re.compile(r"status code: 40[13]\b")
_TOOK: Final = re.compile(r" in [0-9.]+(?:ns|µs|ms|s)\b")
_ANSWER: Final = re.compile(r"(status code: \d{3}[^:]*): .*")
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")


def open_bucket(
    settings: S3Settings, place: BucketLocation, *, clock: Clock, env: Mapping[str, str], seconds: float | None = None
) -> S3Bucket:
    """A bucket as the settings reach it. Nothing is asked yet.

    Args:
        settings: how the store is reached.
        place: where in which bucket.
        clock: the time.
        env: the environment, for the credentials' file.
        seconds: the longest time that a call may take, None for the setting's.

    Raises:
        ConfigError: the library is not installed, or the credentials' file is none.
    """
    try:
        from obstore.store import S3Store  # noqa: PLC0415 - only where it is wanted
    except ImportError:
        raise ConfigError(f"{place} {MISSING}", advice="pip install 'svote-helper[s3]'") from None
    longest = timedelta(seconds=settings.timeout_seconds if seconds is None else seconds)
    options: ClientConfig = {"timeout": longest, "connect_timeout": longest}
    config: S3Config = {"region": settings.region, "virtual_hosted_style_request": settings.virtual_host}
    if settings.endpoint:
        config["endpoint"] = settings.endpoint
        options["allow_http"] = settings.endpoint.startswith("http://")
    provider: Callable[[], S3Credential] | None = None
    if file := credentials_file(settings.credentials_file, env):
        profile = env.get(PROFILE) or "default"
        read_keys(file, profile)  # what is wrong with it is told now
        provider = partial(_credential, file, profile, clock)
    store = S3Store(
        place.bucket,
        prefix=place.path or None,
        config=config,
        client_options=options,
        retry_config={"max_retries": 0, "retry_timeout": longest},
        credential_provider=provider,
    )
    return S3Bucket(store, place, longest.total_seconds())


def _credential(file: Path, profile: str, clock: Clock) -> S3Credential:
    keys = read_keys(file, profile)
    return {
        "access_key_id": keys.access_key,
        "secret_access_key": keys.secret_key,
        "token": keys.token,
        "expires_at": datetime.fromtimestamp(clock.now() + KEYS_LAST, UTC),
    }


class S3Bucket:
    """`helper.object_store.bucket.Bucket` over an S3 store.

    Each request is a blocking call of the library in a thread of ours. Its asynchronous ones end in threads of its own
    that hold Python's objects: a process that ends at that moment is aborted by them.

    Args:
        store: the client, which tries everything once.
        place: for words.
        seconds: the longest time that a request may take; the client keeps to it too, so no thread stays for longer.
    """

    def __init__(self, store: S3Store, place: BucketLocation, seconds: float) -> None:
        import obstore  # noqa: PLC0415 - only where it is wanted

        self._api = obstore
        self._store = store
        self._place = place
        self._seconds = seconds
        self._threads = anyio.CapacityLimiter(_AT_ONCE)

    async def get(self, name: str) -> StoredObject | None:
        """See `Bucket`."""
        try:
            return await self._ask(f"read {name}", partial(self._get, name))
        except FileNotFoundError:
            return None

    def _get(self, name: str) -> StoredObject:
        answer = self._api.get(self._store, name)
        if answer.meta["size"] > _LARGEST:
            raise BucketError(f"{self._place}: {name} has {answer.meta['size']} bytes, more than anything of ours")
        return StoredObject(bytes(answer.bytes()), self._tag(answer.meta["e_tag"], name))

    async def put(self, name: str, body: bytes) -> None:
        """See `Bucket`."""
        with self._there():
            await self._ask(f"write {name}", lambda: self._api.put(self._store, name, body, use_multipart=False))

    async def create(self, name: str, body: bytes) -> str | None:
        """See `Bucket`."""
        with self._there():
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
            written = await self._ask(f"write {name}", lambda: self._api.put(self._store, name, body, mode=mode))
        except (errors.AlreadyExistsError, errors.PreconditionError):
            return None
        return self._tag(written["e_tag"], name)

    async def names(self, folder: str) -> list[str]:
        """See `Bucket`."""

        def listed() -> list[str]:
            return [meta["path"] for lot in self._api.list(self._store, folder, chunk_size=1000) for meta in lot]

        with self._there():
            return sorted(await self._ask(f"list {folder}", listed, whole=False))

    async def folders(self) -> list[str]:
        """See `Bucket`."""
        with self._there():
            listed = await self._ask("list folders", lambda: self._api.list_with_delimiter(self._store))
            return sorted(path.rpartition("/")[2] for path in listed["common_prefixes"])

    def _tag(self, tag: str | None, name: str) -> str:
        if not tag:
            raise BucketError(f"{self._place}: the store told no ETag of {name}")
        return tag

    @contextmanager
    def _there(self) -> Iterator[None]:
        """Where it is no answer that there is no object, what is not there is the bucket."""
        try:
            yield
        except FileNotFoundError:
            raise BucketRefused(f"{self._place}: there is no such bucket") from None

    async def _ask(self, what: str, call: Callable[[], T], *, whole: bool = True) -> T:
        """One request, in a thread: its errors in our words, but for those that are answers.

        Args:
            what: what is asked.
            call: asks it, and blocks.
            whole: whether it is one request, which has an end in time; else each of several has.
        """
        errors = self._api.exceptions
        try:
            with anyio.fail_after(self._seconds if whole else None):
                return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._threads)
        except (FileNotFoundError, errors.AlreadyExistsError, errors.PreconditionError, BucketError):
            raise
        except TimeoutError:
            raise BucketError(f"{self._place}: {what}: no answer within {self._seconds:g} s") from None
        except (errors.PermissionDeniedError, errors.UnauthenticatedError, PermissionError) as error:
            raise BucketRefused(f"{self._place}: {what}: {_said(error)}") from None
        except (errors.BaseError, OSError, ConfigError) as error:
            # for lists the library knows no refusal
            kind = BucketRefused if _REFUSED.search(str(error)) else BucketError
            raise kind(f"{self._place}: {what}: {_said(error)}") from None


def _said(error: Exception) -> str:
    """The first line of the library's words, the others are its own inner state: the same for the same trouble.

    Of what the store answered only its code: some repeat there which key and token they were asked with.
    """
    text = str(error).strip() or type(error).__name__
    line = _ANSWER.sub(r"\1", _TOOK.sub("", text.splitlines()[0]))
    line = line if len(line) <= _SAID else f"{line[:_SAID]}…"
    code = _CODE.search(text)
    return line if code is None else f"{line} ({code[1]})"
