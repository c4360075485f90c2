"""Hosts that share one queue: membership, clock skew and the send loop of the lease holder."""
