"""The queue's store, in SQLite or PostgreSQL."""
