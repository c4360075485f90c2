"""PostgreSQL store for hosts that share one queue. Not imported with SQLite."""

from helper.store.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
