"""Diagnostic checks with advice. They run with or without settings, helper, database or chain.

run.py       all checks concurrently, each with a time limit
result.py    result of a check
settings.py  settings file, tokens, published addresses
daemon.py    running helper, over its control socket    machine.py  file modes, addresses, process limits
database.py  SQLite and the file                        disk.py     free space, fsync
chain.py     nodes, clock                               proving.py  self-test proof, circuit
backlog.py   waiting shares against the time left       page.py     files of the page against their hashes

No check writes to the database, sends share data to a node, or prints a secret.
"""
