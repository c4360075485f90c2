"""Command-line interface: one module per command group, each with its `app`. `main.py` combines them.

`--json` output is one line, the last on standard output. Messages go to standard error.
"""
