"""Diagnostic checks with advice. They run with or without settings, helper, database or chain.

run.py       all checks concurrently, each with a time limit
result.py    result of a check
settings.py  settings file              daemon.py    running helper, over its control socket
database.py  SQLite and the file        files.py     file modes
disk.py      free space, fsync          process.py   core files, open files, memory
chain.py     nodes, clock       circuit.py   circuit against the nodes' version
proving.py   self-test proof            backlog.py   waiting shares against the time left
tokens.py    token strength             page.py      files of the page against their hashes
ports.py     listen addresses           publication.py  published chain addresses

No check writes to the database, sends share data to a node, or prints a secret.
"""
