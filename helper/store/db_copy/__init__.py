"""Copies a queue between databases, and encrypts or decrypts a file in place.

queue_copy.py         the complete procedure: locks, copy, comparison, marks, undo, erasing the source
endpoint.py           a database that is copied from or to, and the copied tables
sqlite_endpoint.py    a SQLite file
postgres_endpoint.py  a PostgreSQL schema
file_encryption.py    encrypting or decrypting a file in place
factory.py            endpoints from command-line arguments
"""
