"""Proofs are made in worker processes, so that they never slow down an answer and can be killed.

Nothing is imported here: a worker is a process of its own, and starts four times as fast without the pool's libraries.
"""
