"""The archive as the settings name it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from helper.chain.models import Round
from helper.chain.node_pool import NodePool
from helper.chain.reveal_history import RevealHistory
from helper.clock import Clock
from helper.config import Config
from helper.core.roles import ROLES
from helper.object_store.bucket import Bucket, BucketLocation
from helper.object_store.s3 import open_bucket
from helper.operations.archive.writer import ArchiveWriter
from proofs import CIRCUITS


def archive_bucket(config: Config, clock: Clock, env: Mapping[str, str]) -> Bucket | None:
    """The archive's place, None where none is set.

    Raises:
        ConfigError: what it needs is not installed, or its credentials' file is none.
    """
    if not config.archive.place:
        return None
    return open_bucket(config.s3.to_settings(), BucketLocation.parse(config.archive.place), clock=clock, env=env)


def archive_writer(
    config: Config,
    endpoints: NodePool,
    rounds: Callable[[], Sequence[Round] | None],
    *,
    mine: Callable[[], bool],
    clock: Clock,
    env: Mapping[str, str],
) -> ArchiveWriter | None:
    """Who writes the archive, None where none is set, and where another role does.

    Args:
        config: the settings.
        endpoints: says which nodes are fresh.
        rounds: the chain's rounds, None while they are not known.
        mine: whether this host is the one of several that writes.
        clock: the time.
        env: the environment, for the credentials' file.

    Raises:
        ConfigError: what it needs is not installed, or its credentials' file is none.
    """
    bucket = archive_bucket(config, clock, env) if ROLES[config.helper.role].sends else None
    if bucket is None:
        return None
    return ArchiveWriter(
        bucket,
        RevealHistory(endpoints, timeout=config.chain.timeout_seconds),
        rounds=rounds,
        mine=mine,
        circuits=CIRCUITS,
        clock=clock,
        every=config.archive.check_seconds,
    )
