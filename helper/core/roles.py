"""Roles of hosts that share a queue. A host with a database file has the role `all`. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Role:
    """The tasks of a host.

    Every role follows the chain: its rounds, trees and confirmed reveals.

    Attributes:
        can_accept: admits shares from wallets.
        can_prove: proves due shares and stores the prepared messages.
        can_send: sends prepared messages and handles closed rounds; only one host does this at a time.
    """

    can_accept: bool
    can_prove: bool
    can_send: bool

    @property
    def can_process(self) -> bool:
        """Whether the host processes admitted shares."""
        return self.can_prove or self.can_send


ROLES: Final = {
    "all": Role(can_accept=True, can_prove=True, can_send=True),
    "api": Role(can_accept=True, can_prove=False, can_send=False),
    "prover": Role(can_accept=False, can_prove=True, can_send=False),
    "sender": Role(can_accept=False, can_prove=False, can_send=True),
}
"""Roles by their name in `[helper] role` and `serve --role`."""
