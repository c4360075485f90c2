"""The SQLite store: one database file, one writing thread."""
