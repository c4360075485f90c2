"""PostgreSQL store for hosts that share one queue. Not imported with SQLite."""
