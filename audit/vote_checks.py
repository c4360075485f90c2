"""Checks the delegations and cast votes of a round against each other and the reveals (A5, D4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

import proofs
from audit.documents import Option
from audit.transactions import Cast, Delegation
from audit.verdicts import Findings
from proofs import EncodingError

SHARES_PER_VOTE: Final = 16
"""Maximum number of reveals of one cast vote."""


class VoteChecks:
    """The delegations and cast votes of a round."""

    def __init__(self, findings: Mapping[str, Findings]) -> None:
        self._findings = findings
        self._nullifiers: set[bytes] = set()
        self._note_nullifiers: set[bytes] = set()
        self._delegations = 0
        self._casts: Counter[int] = Counter()

    def add_delegation(self, message: Delegation, height: int) -> None:
        """Check that no note was delegated before."""
        self._delegations += 1
        for nullifier in message.nullifiers:
            self._check_new(self._note_nullifiers, nullifier, f"block {height}", "a note was delegated before")

    def add_cast(self, message: Cast, height: int) -> None:
        """Check that the authority note was not spent before."""
        self._casts[message.proposal_id] += 1
        self._check_new(self._nullifiers, message.nullifier, f"block {height}", "an authority note was spent before")

    def _check_new(self, seen_nullifiers: set[bytes], nullifier: bytes, where: str, problem: str) -> None:
        self._findings["D4"].count += 1
        try:
            proofs.check_encoding("nullifier", nullifier)
        except EncodingError as error:  # another encoding of the same number would be a different nullifier
            self._findings["D4"].add_problem(f"{where}: a nullifier is malformed ({error.reason})")
        if nullifier in seen_nullifiers:
            self._findings["D4"].add_problem(f"{where}: {problem}")
        seen_nullifiers.add(nullifier)

    def finish(self, counts: Mapping[Option, int]) -> None:
        """Compare the number of votes with the reveals and the delegations.

        Args:
            counts: number of counted reveals per option.
        """
        for proposal_id, casts in sorted(self._casts.items()):
            if casts > self._delegations:
                self._findings["D4"].add_problem(
                    f"proposal {proposal_id} has {casts} votes but only {self._delegations} delegations"
                )
        reveals: Counter[int] = Counter()
        for (proposal_id, _), count in counts.items():
            reveals[proposal_id] += count
        for proposal_id, count in sorted(reveals.items()):
            self._findings["A5"].count += count
            if count > SHARES_PER_VOTE * self._casts[proposal_id]:
                self._findings["A5"].add_problem(
                    f"proposal {proposal_id} has {count} reveals but only {self._casts[proposal_id]} cast votes"
                )
