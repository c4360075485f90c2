"""The commands: one module a noun, each with its `app`; `main.py` joins them.

What a program reads (`--json`) is one line, the last on standard output; all else goes to standard error.
"""
