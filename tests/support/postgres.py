"""A PostgreSQL cluster of the tests' own."""

from __future__ import annotations

from devnet import postgres
from devnet.postgres import binaries
from tests.support.process import PATIENCE

__all__ = ["Cluster", "binaries"]


class Cluster(postgres.Cluster):
    """One that waits as long as tests do."""

    def __init__(self) -> None:
        super().__init__("tests", patience=PATIENCE)
