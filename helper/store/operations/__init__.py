"""Store operations: functions over one transaction, shared by SQLite and PostgreSQL."""
