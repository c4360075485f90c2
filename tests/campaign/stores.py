"""Which store a campaign's helpers have: files of their own, or a PostgreSQL server that is the run's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.support.postgres import Cluster


@contextlib.contextmanager
def run_cluster(store: str) -> Iterator[Cluster | None]:
    """What helpers of one run of a campaign keep their queues in, gone afterwards; None for files of their own.

    Raises:
        ClusterError: there is no PostgreSQL here.
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
