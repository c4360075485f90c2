"""Pending registrations: stored until their validator has a staking record, or for a week."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import anyio
import orjson
import structlog

from admin.admin_database import MAX_REGISTRATIONS, AdminStore, Registration
from admin.registration_request import RegistrationRequest, parse_registration, validator_address
from helper.chain.node_pool import ReadOnlyNodePool
from helper.clock import Clock
from helper.errors import ChainError, HelperError
from helper.observability.log_config import RecurringErrorLog

log = structlog.get_logger("helper.admin")

CHECK_SECONDS: Final = 5.0
"""Seconds between two staking checks of pending registrations."""
MAX_PER_CHECK: Final = 32
"""Maximum number of registrations in one staking check; the next check continues after the last of them."""
MAX_CONCURRENT_QUERIES: Final = 8
"""Maximum number of concurrent staking queries."""
QUERY_SECONDS: Final = 15.0
"""Time limit in seconds of one staking query, including the wait for a free slot."""
PUBLISH_SECONDS: Final = 1.0
"""Minimum seconds between two updates of the published list."""
PUBLISH_PAUSE_FACTOR: Final = 9.0
"""Minimum time between two updates as a multiple of the last update's duration, so that updates use at most 10 %."""
PAGE_BYTES: Final = 64_000
"""Maximum bytes of a page of the published list. One entry has at most 5 kB."""


@dataclass(frozen=True, slots=True)
class PublishedList:
    """Pending registrations as they are served.

    Attributes:
        pages: JSON lists of at most `PAGE_BYTES` bytes each; at least one.
        total: number of registrations on all pages.
    """

    pages: Sequence[bytes]
    total: int


class RegistrationRegistry:
    """Pending registrations and their staking checks.

    Nodes are queried when a validator registers, and by `run` in the background. Reading `published` sends no queries.

    Args:
        store: stores the registrations.
        chain: the nodes, queried for staking records.
        clock: the time.
    """

    def __init__(self, store: AdminStore, chain: ReadOnlyNodePool, *, clock: Clock) -> None:
        self._store = store
        self._chain = chain
        self._clock = clock
        self._query_slots = asyncio.Semaphore(MAX_CONCURRENT_QUERIES)
        # One request at a time is parsed and verified: both hold the GIL, so concurrent ones would only delay others.
        self._signature_slot = asyncio.Semaphore(1)
        self._changed = asyncio.Event()
        self._last_checked = ""
        self._error_log = RecurringErrorLog(
            log, failed="registrations_unavailable", recovered="registrations_available"
        )
        self.published = PublishedList((b"[]",), 0)
        """The list as last prepared by `publish`."""

    async def register(self, body: bytes, *, production: bool, network: bytes) -> Registration | None:
        """Store a registration. Return None if its validator already has a staking record.

        If too few nodes respond, the registration is stored. A request that is not newer than the stored one of its
        address changes nothing, and the stored registration is returned.

        Args:
            body: the request and its signature, see `admin.registration_request.parse_registration`.
            production: whether its URL must be a public HTTPS URL.
            network: of its sender, see `admin.registration_limit.client_network`.

        Raises:
            RegistrationError: the request is invalid.
            SignatureRefusedError: the signature is not valid for the request's address.
            RegistryFullError: a limit on the number of registrations is reached.
            StoreError: it could not be stored.
        """
        async with self._signature_slot:
            # In a thread: the first one imports modules, which takes 0.2 s or more.
            request = await asyncio.to_thread(_parse_and_verify, body, self._clock.now(), production=production)
        if await self._has_staking_record(request.operator_address):
            if await self._store.delete_registrations([request.operator_address]):
                self._changed.set()
            return None
        registration = await self._store.register(request, network=network, now=self._clock.now())
        self._changed.set()
        log.debug("registration_stored", operator=request.operator_address)
        return registration

    async def run(self) -> None:
        """Check staking records and update the published list until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._check_repeatedly())
            group.create_task(self._publish_changes())

    async def publish(self) -> None:
        """Prepare the published list from the store."""
        waiting = await self._store.list_pending(now=self._clock.now())
        if len(waiting) >= MAX_REGISTRATIONS > self.published.total:
            log.warning("registrations_full", count=len(waiting))
        pages = await asyncio.to_thread(_paginate, waiting)
        self.published = PublishedList(pages, len(waiting))

    async def check_staking(self) -> None:
        """Delete expired registrations, and those of the next `MAX_PER_CHECK` whose validators have a staking record.

        If too few nodes respond, the remaining checks are skipped.
        """
        deleted = await self._store.delete_expired(now=self._clock.now())
        addresses = await self._store.addresses_after(self._last_checked, MAX_PER_CHECK)
        self._last_checked = addresses[-1] if len(addresses) == MAX_PER_CHECK else ""
        for start in range(0, len(addresses), MAX_CONCURRENT_QUERIES):
            batch = addresses[start : start + MAX_CONCURRENT_QUERIES]
            results = await asyncio.gather(*(self._has_staking_record(address) for address in batch))
            deleted += await self._store.delete_registrations(
                [address for address, inside in zip(batch, results, strict=True) if inside]
            )
            if all(has_record is None for has_record in results):
                break
        if deleted:
            self._changed.set()

    async def _check_repeatedly(self) -> None:
        while True:
            await self._run_logged(self.check_staking)
            await self._clock.sleep(CHECK_SECONDS)

    async def _publish_changes(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            started_at = self._clock.monotonic()
            if not await self._run_logged(self.publish):
                self._changed.set()
            duration = self._clock.monotonic() - started_at
            await self._clock.sleep(max(PUBLISH_SECONDS, PUBLISH_PAUSE_FACTOR * duration))

    async def _run_logged(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Do the work and return whether it succeeded. Logs the first failure and the first success after it."""
        try:
            await work()
        except HelperError as error:
            self._error_log.note(error)
            return False
        self._error_log.note(None)
        return True

    async def _has_staking_record(self, account: str) -> bool | None:
        """Whether there is a staking record, with any status; None if too few nodes respond in time."""
        address = validator_address(account)
        try:
            with anyio.fail_after(QUERY_SECONDS):
                async with self._query_slots:
                    statuses = await self._chain.call_enough(lambda client: client.validator_status(address))
            return None if statuses is None else None not in statuses  # a registration is deleted if there is one
        except (ChainError, TimeoutError):
            return None


def _paginate(waiting: Iterable[Registration]) -> Sequence[bytes]:
    """JSON lists of at most `PAGE_BYTES` bytes each."""
    pages: list[list[bytes]] = [[]]
    size = 0
    for registration in waiting:
        entry = orjson.dumps(registration)
        if size + len(entry) + 2 > PAGE_BYTES:
            pages.append([])
            size = 0
        pages[-1].append(entry)
        size += len(entry) + 1  # with a comma or bracket
    return tuple(b"[" + b",".join(entries) + b"]" for entries in pages)


def _parse_and_verify(body: bytes, now: float, *, production: bool) -> RegistrationRequest:
    # Imported here, in a thread: the libraries take 0.2 s, and most hosts get no registration.
    from admin.account_keys import verify_signature  # noqa: PLC0415

    request, pub_key, signature = parse_registration(body, now=now, production=production)
    verify_signature(request.signed_text(), signer=request.operator_address, pub_key=pub_key, signature=signature)
    return request
