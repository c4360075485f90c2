"""PostgreSQL cluster for tests."""

from __future__ import annotations

from devnet import postgres
from devnet.postgres import find_binaries
from tests.support.process import TIMEOUT_SECONDS

__all__ = ["Cluster", "find_binaries"]


class Cluster(postgres.Cluster):
    """A cluster with the timeout of the tests."""

    def __init__(self) -> None:
        super().__init__("tests", timeout_seconds=TIMEOUT_SECONDS)
