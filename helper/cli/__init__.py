"""Command-line interface: a function per command; `main.py` has the table of commands and loads the requested one.

`--json` output is one line, the last on standard output. Messages go to standard error.
"""
