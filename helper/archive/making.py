"""The archive as the settings name it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from helper.archive.writer import ArchiveWriter
from helper.chain.counted import CountedBlocks
from helper.chain.failover import Endpoints
from helper.chain.models import Round
from helper.clock import Clock
from helper.config import Config
from helper.objects.base import Bucket, Place
from helper.objects.s3 import open_bucket
from helper.roles import ROLES
from proofs import CIRCUITS


def archive_bucket(config: Config, clock: Clock, env: Mapping[str, str]) -> Bucket | None:
    """The archive's place, None where none is set.

    Raises:
        ConfigError: what it needs is not installed, or its credentials' file is none.
    """
    if not config.archive.place:
        return None
    return open_bucket(config.s3, Place.parse(config.archive.place), clock=clock, env=env)


def archive_writer(
    config: Config,
    endpoints: Endpoints,
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
        CountedBlocks(endpoints, timeout=config.chain.timeout_seconds),
        rounds=rounds,
        mine=mine,
        circuits=CIRCUITS,
        clock=clock,
        every=config.archive.check_seconds,
    )
