"""What a host does for the queue that it shares with others. Alone, on a queue in a file, it does all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Role:
    """One way to run.

    Every role follows the chain: its rounds, its trees, and what it has counted.

    Attributes:
        takes: takes shares from wallets.
        proves: makes the proofs of due shares, up to the message that is kept.
        sends: brings kept messages to the chain, and looks after closed rounds; of all hosts one does at a time.
    """

    takes: bool
    proves: bool
    sends: bool

    @property
    def works(self) -> bool:
        """Whether it does anything with shares that were taken."""
        return self.proves or self.sends


ROLES: Final = {
    "all": Role(takes=True, proves=True, sends=True),
    "api": Role(takes=True, proves=False, sends=False),
    "prover": Role(takes=False, proves=True, sends=False),
    "sender": Role(takes=False, proves=False, sends=True),
}
"""By the name that `[helper] role` and `serve --role` have for them."""
