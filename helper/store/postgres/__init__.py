"""The store on PostgreSQL, for several hosts that share one queue. Nothing of it is loaded where SQLite is used."""

from helper.store.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
