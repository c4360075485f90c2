"""Migrates a queue between databases.

A migration copies all rows while no helper runs, compares them, and then marks the source as moved.

migration.py          the complete procedure: locks, copy, comparison, marks
table_pass.py         one pass over all rows, which copies or compares them
tables.py             the migrated tables, and the comparison of pages
endpoint.py           a database that is migrated from or to
sqlite_endpoint.py    a SQLite file
postgres_endpoint.py  a PostgreSQL schema
source_cleanup.py     erasing or reactivating the source
file_encryption.py    encrypting or decrypting a file in place
factory.py            endpoints from command-line arguments
"""
