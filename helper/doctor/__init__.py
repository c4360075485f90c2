"""Diagnostic checks with advice. They run with or without settings, helper, database or chain.

No check writes to the database, sends share data to a node, or prints a secret.
"""
