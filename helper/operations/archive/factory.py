"""Creates the archive's bucket and writer from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from helper.chain.block_reader import RevealHistory
from helper.chain.chain_data import Round
from helper.chain.node_pool import NodePool, ReadOnlyNodePool
from helper.circuits.registry import circuit_infos
from helper.clock import Clock
from helper.config.sections import ROLES, Config
from helper.object_store.bucket import Bucket, BucketLocation
from helper.object_store.s3_bucket import open_bucket
from helper.operations.archive.writer import ArchiveWriter


def open_archive_bucket(config: Config, clock: Clock, env: Mapping[str, str]) -> Bucket | None:
    """Open the archive's bucket. Returns None if no archive is configured.

    Raises:
        ConfigError: a required package is not installed, or the credentials file is invalid.
    """
    if not config.archive.place:
        return None
    return open_bucket(config.s3.to_settings(), BucketLocation.parse(config.archive.place), clock=clock, env=env)


def create_archive_writer(
    config: Config,
    node_pool: NodePool,
    rounds: Callable[[], Sequence[Round] | None],
    *,
    is_writer: Callable[[], bool],
    clock: Clock,
    env: Mapping[str, str],
) -> ArchiveWriter | None:
    """Create the archive writer. Returns None if no archive is configured or the host's role does not send.

    Args:
        config: the configuration.
        node_pool: the node pool.
        rounds: the chain's rounds, None while unknown.
        is_writer: whether this host writes the archive; one host of a cluster does.
        clock: the time.
        env: environment variables, for the credentials file.

    Raises:
        ConfigError: a required package is not installed, or the credentials file is invalid.
    """
    bucket = open_archive_bucket(config, clock, env) if ROLES[config.helper.role].can_send else None
    if bucket is None:
        return None
    return ArchiveWriter(
        bucket,
        RevealHistory(ReadOnlyNodePool(node_pool, timeout=config.chain.timeout_seconds)),
        rounds=rounds,
        is_writer=is_writer,
        circuits=circuit_infos(),
        clock=clock,
        interval_seconds=config.archive.check_seconds,
    )
