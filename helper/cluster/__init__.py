"""Cluster of hosts that share a queue: membership, clock skew, send loop."""
