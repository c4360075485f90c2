"""Lease of a queue in a local file. The file lock allows only one process, so the lease is always held."""

from __future__ import annotations

import math


class LocalLease:
    """A `helper.lease.Lease` that is always held."""

    seconds: float = math.inf
    is_held: bool = True
    fence: int = 0
    holder: str = ""
    holder_seconds: float = math.inf

    async def acquire(self) -> bool:
        """Return True."""
        return True

    async def renew(self) -> bool:
        """Return True."""
        return True

    async def release(self) -> None:
        """Do nothing."""
