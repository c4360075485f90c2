"""Who may send: of all hosts that share a queue, or have a copy of it, one at a time.

A lease is held by a host for some seconds and renewed long before they end. What a host believes of its own lease is
judged by its own clocks, from before it asked, less a margin (`term.py`): it stops before anybody else may begin. Its
fence is a number that no other holding has, and later ones are greater: who keeps the messages asks for it, so that a
host that slept through the end of its lease finds another number and sends nothing.

    alone.py      a queue in a file of this machine: nobody to agree with
    shared.py     the queue's own database says who sends
    s3.py         an object in a bucket, written on conditions; what it says is in record.py
    keeper.py     takes a lease, renews it, tells when it is gone
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Lease"]


class Lease(Protocol):
    """One host's side of the right to send. Used from one task at a time, but for the properties.

    `acquire`, `renew` and `release` raise LeaseError when it is not known what came of them: the lease then stands as
    it did, and ends by itself when its time is over. However long they take, `held` does not wait for them.
    """

    @property
    def seconds(self) -> float:
        """For how long a lease holds from the moment it was taken or renewed."""
        ...

    @property
    def held(self) -> bool:
        """Whether this host certainly holds it now, by its own clocks and with a margin. Costs nothing."""
        ...

    @property
    def fence(self) -> int:
        """The number of this host's latest holding, greater than those of all before it; 0 before the first."""
        ...

    @property
    def holder(self) -> str:
        """The host that had it when it was last looked at and was not ours; "" when that was nobody."""
        ...

    async def acquire(self) -> bool:
        """Take it when nobody holds it, or when this very host did before it was started again; with a new fence.

        Returns:
            False when another host holds it, or took it first: `holder` is its name.

        Raises:
            LeaseError: it is not known.
        """
        ...

    async def renew(self) -> bool:
        """Have it hold for another `seconds`, under the same fence.

        Returns:
            False when it is lost: its time was over and somebody else's fence is there. It is not held then, and must
            be acquired anew.

        Raises:
            LeaseError: it is not known; `held` goes on until its time is over.
        """
        ...

    async def release(self) -> None:
        """Let go at once, so that another host need not wait. Not held from the first moment of the call on.

        Raises:
            LeaseError: it was not told to anybody; it ends by itself.
        """
        ...
