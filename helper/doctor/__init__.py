"""What is wrong, and what to do about it: checks that run with or without settings, daemon, database or chain.

run.py       everything at once, each check within its own time
finding.py   what a check found
settings.py  the settings file          daemon.py    the running helper, over its control socket
database.py  SQLite and the file        files.py     file modes
disk.py      room, fsync                process.py   core files, open files, memory
chain.py     each node, the clock       circuit.py   the circuit against the nodes' version
proving.py   a self-test proof          backlog.py   what waits against the time that is left
tokens.py    how strong they are        page.py      the page's files against their hashes
doors.py     addresses to listen on

Nothing here writes into the database, asks the chain about a share, or prints a secret.
"""
