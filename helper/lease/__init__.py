"""The sender lease, which ensures that at most one host sends.

The lease covers all hosts with the same queue or a copy of it.

The lease is valid for a few seconds, and its holder renews it long before it expires. The holder decides by its own
clocks whether its lease is still valid, measuring from before the request and subtracting a margin (`term.py`). It
therefore stops before another host can start. Each acquisition has a new, greater fencing token. The store checks the
token before each send, so a host that was suspended until after the expiry finds a newer token and sends nothing.

    local.py      the queue is a file of this machine: always held
    database.py   one row of the shared database
    s3.py         one object in a bucket, written conditionally; s3_record.py has its content
    keeper.py     acquires and renews the lease
    factory.py    creates the configured lease
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Lease"]


class Lease(Protocol):
    """One host's view of the sender lease.

    Only one task may call the methods; any task may read the properties.

    `acquire`, `renew` and `release` raise LeaseError if the outcome is unknown. The lease is then unchanged and expires
    on time. `is_held` does not wait for a call that is in progress.
    """

    @property
    def seconds(self) -> float:
        """Validity in seconds, from the moment it is acquired or renewed."""
        ...

    @property
    def is_held(self) -> bool:
        """Whether this host holds the lease, by its own clocks minus a safety margin. Makes no request."""
        ...

    @property
    def fence(self) -> int:
        """Fencing token of this host's latest acquisition, greater than all earlier ones; 0 before the first."""
        ...

    @property
    def holder(self) -> str:
        """The other host that held the lease when it was last read; "" if none did."""
        ...

    @property
    def holder_seconds(self) -> float:
        """Validity in seconds of the other host's lease when it was last read; it may have other settings."""
        ...

    async def acquire(self) -> bool:
        """Acquire the lease if no host holds it, or if this host held it before a restart.

        Each acquisition gets a new fencing token.

        Returns:
            False if another host holds it or was faster; `holder` is then its name.

        Raises:
            LeaseError: the outcome is unknown.
        """
        ...

    async def renew(self) -> bool:
        """Extend the lease by `seconds`, with the same token.

        Returns:
            False if it expired and another host acquired it. It must then be acquired again.

        Raises:
            LeaseError: the outcome is unknown; `is_held` stays true until the lease expires.
        """
        ...

    async def release(self) -> None:
        """Release the lease, so that another host does not have to wait. `is_held` is immediately false.

        Raises:
            LeaseError: the release was not stored; the lease expires on time.
        """
        ...
