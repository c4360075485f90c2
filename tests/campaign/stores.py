"""Selects the store of a campaign's helpers: SQLite files or a PostgreSQL server for the run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.support.postgres import Cluster


@contextlib.contextmanager
def run_cluster(store: str) -> Iterator[Cluster | None]:
    """Run the server that stores the helpers' queues, then remove it; None for SQLite files.

    Raises:
        ClusterError: PostgreSQL is not installed.
    """
    if store == "sqlite":
        yield None
        return
    cluster = Cluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.remove()
