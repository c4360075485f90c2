"""The lease that the settings name."""

from __future__ import annotations

from collections.abc import Mapping

from helper.clock import Clock
from helper.config import Config
from helper.core.roles import ROLES
from helper.lease import Lease
from helper.store.factory import host_name
from helper.store.store import Store


def create_lease(config: Config, store: Store, *, clock: Clock, env: Mapping[str, str]) -> Lease | None:
    """The right to send from this store's queue; None where there is nobody to agree with.

    Args:
        config: the settings.
        store: the queue.
        clock: the time.
        env: the environment, for the credentials of an object store.

    Raises:
        ConfigError: what it needs is not installed, or its credentials' file is none.
    """
    outer = _in_bucket(config, clock, env)
    if not store.shared:
        return outer
    # loaded here: a queue in a file needs nothing of it
    from helper.lease.database import DatabaseLease  # noqa: PLC0415
    from helper.store.postgres import PostgresStore  # noqa: PLC0415

    assert isinstance(store, PostgresStore)
    return DatabaseLease(store, clock=clock, outer=outer)


def _in_bucket(config: Config, clock: Clock, env: Mapping[str, str]) -> Lease | None:
    if config.sender.place is None or not ROLES[config.helper.role].sends:
        return None
    from helper.lease.s3 import s3_lease  # noqa: PLC0415 - likewise

    seconds = config.store.lease_seconds
    return s3_lease(
        config.s3.to_settings(), config.sender.place, host=host_name(config), clock=clock, env=env, seconds=seconds
    )
