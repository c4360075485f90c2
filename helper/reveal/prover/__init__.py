"""Makes proofs in worker processes.

Processes do not block the API and can be killed.

This module imports nothing: a worker starts four times as fast without the libraries of the pool.
"""
