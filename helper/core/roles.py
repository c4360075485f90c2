"""Roles of hosts that share a queue. A host with a database file has the role `all`. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Role:
    """The tasks of a host.

    Every role follows the chain: its rounds, trees and confirmed reveals.

    Attributes:
        takes: admits shares from wallets.
        proves: proves due shares and stores the prepared messages.
        sends: sends prepared messages and handles closed rounds; only one host does this at a time.
    """

    takes: bool
    proves: bool
    sends: bool

    @property
    def works(self) -> bool:
        """Whether the host processes admitted shares."""
        return self.proves or self.sends


ROLES: Final = {
    "all": Role(takes=True, proves=True, sends=True),
    "api": Role(takes=True, proves=False, sends=False),
    "prover": Role(takes=False, proves=True, sends=False),
    "sender": Role(takes=False, proves=False, sends=True),
}
"""Roles by their name in `[helper] role` and `serve --role`."""
