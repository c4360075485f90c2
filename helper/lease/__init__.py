"""The sender lease, which ensures that at most one host sends."""

from helper.lease.sender_lease import Lease

__all__ = ["Lease"]
