"""What a SQLite file has of votes whose shares wait, and after their confirmation."""

from __future__ import annotations

import base64

from tests.campaign.campaign import Findings
from tests.campaign.canaries import Votes, held_of, left_in, nullifiers_of, secrets_of
from tests.support.erasure_check import elsewhere, public_of, rows_with
from tests.support.harness import Helper


class FileSearch:
    """Looks through a helper's file.

    Args:
        findings: where goals go.
        helper: whose file it is.
    """

    look_seconds = 0
    """What a look at it takes."""

    def __init__(self, findings: Findings, helper: Helper) -> None:
        self.findings = findings
        self._helper = helper

    def of_database(self, path: str) -> bool:
        """Whether this is a file in which a share's secrets may be for some time."""
        return path.startswith(str(self._helper.db))

    def waiting(self, votes: Votes) -> None:
        """While all shares wait they are there: else the search would find nothing that should be gone either."""
        files, held = self._helper.bytes_on_disk(), held_of(votes)
        self.findings.exactly("waiting secrets that the search does not find", len(held) - len(left_in(files, held)), 0)

    def left(self, votes: Votes, public: dict[str, bytes], _waiting: int) -> list[str]:
        """What is left of confirmed votes: their secrets, what is `public` of their reveals, their positions."""
        files = self._helper.bytes_on_disk()
        secrets = {name: value for vote, at in votes for name, value in secrets_of(vote, at).items()}
        left = left_in(files, secrets | public)
        left += [name for name, one in nullifiers_of(votes).items() if files.count(one) != 1]
        return left + [name for _, position in votes for name in rows_with(self._helper, position)]

    def after(self, votes: Votes, _public: dict[str, bytes]) -> None:
        """The whole search, when all is confirmed: also for positions at any place, and for written forms."""
        findings, files, public = self.findings, self._helper.bytes_on_disk(), public_of(self._helper)
        at = [place for _, position in votes for place in elsewhere(files, position.to_bytes(3, "big"), public)]
        nullifiers = nullifiers_of(votes)
        blinds = {name: value for name, value in held_of(votes).items() if name.startswith("blind")}
        written: dict[str, bytes] = {}
        for name, value in {**blinds, **nullifiers}.items():
            written |= {f"{name} in hex": value.hex().encode(), f"{name} in base64": base64.b64encode(value)}
        findings.exactly("positions left in the database's bytes", len(at), 0)
        findings.exactly("blinds and nullifiers in the database in hex or base64", len(left_in(files, written)), 0)
        findings.exactly(
            "nullifiers not exactly once in it", sum(files.count(one) != 1 for one in nullifiers.values()), 0
        )
