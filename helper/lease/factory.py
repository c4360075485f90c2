"""Creates the configured lease."""

from __future__ import annotations

from collections.abc import Mapping

from helper.clock import Clock
from helper.config import Config
from helper.core.roles import ROLES
from helper.lease import Lease
from helper.store.factory import get_host_name
from helper.store.store import Store


def create_lease(config: Config, store: Store, *, clock: Clock, env: Mapping[str, str]) -> Lease | None:
    """Create the sender lease of this store's queue.

    Args:
        config: the configuration.
        store: the queue.
        clock: the source of time.
        env: the environment, for the credentials of an object store.

    Returns:
        None if no other host can use the queue.

    Raises:
        ConfigError: a required library is not installed, or the credentials file is invalid.
    """
    outer = _create_s3_lease(config, clock, env)
    if not store.is_shared:
        return outer
    # Imported here because the PostgreSQL libraries are optional.
    from helper.lease.database import DatabaseLease  # noqa: PLC0415
    from helper.store.postgres import PostgresStore  # noqa: PLC0415

    assert isinstance(store, PostgresStore)
    return DatabaseLease(store, clock=clock, outer=outer)


def _create_s3_lease(config: Config, clock: Clock, env: Mapping[str, str]) -> Lease | None:
    if config.sender.lease_location is None or not ROLES[config.helper.role].can_send:
        return None
    from helper.lease.s3 import create_s3_lease  # noqa: PLC0415 - loads the object store library

    seconds = config.store.lease_seconds
    return create_s3_lease(
        config.s3.to_settings(),
        config.sender.lease_location,
        host=get_host_name(config),
        clock=clock,
        env=env,
        seconds=seconds,
    )
