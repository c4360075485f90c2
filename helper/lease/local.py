"""A queue in a file of this machine: the file's lock leaves one daemon, and it always sends."""

from __future__ import annotations

import math


class LocalLease:
    """`helper.lease.Lease` where there is nobody else: always held."""

    seconds: float = math.inf
    held: bool = True
    fence: int = 0
    holder: str = ""

    async def acquire(self) -> bool:
        """Nothing to do."""
        return True

    async def renew(self) -> bool:
        """Nothing to do."""
        return True

    async def release(self) -> None:
        """Nothing to do."""
