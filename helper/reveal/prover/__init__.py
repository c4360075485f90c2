"""Creates proofs in worker processes.

Worker processes do not block the API and can be killed.

This module imports nothing, because a worker starts four times as fast without the libraries of the pool.
"""
