"""Searches a SQLite file for data of votes before and after confirmation."""

from __future__ import annotations

import base64

from tests.campaign.campaign import Findings
from tests.campaign.canaries import Votes, collect_nullifiers, collect_secrets, find_secrets, stored_secrets
from tests.support.erasure_check import columns_containing, find_outside_public, read_public_blobs
from tests.support.harness import HelperProcess


class SqliteSearch:
    """Searches a helper's file."""

    search_seconds = 0
    """Seconds that a search may take."""

    def __init__(self, findings: Findings, helper: HelperProcess) -> None:
        self.findings = findings
        self._helper = helper

    def is_database_file(self, path: str) -> bool:
        """Return whether a share's secrets may be in this file temporarily."""
        return path.startswith(str(self._helper.db))

    def check_waiting_shares(self, votes: Votes) -> None:
        """Check that the search finds pending shares; otherwise it could not prove an erasure."""
        files, held = self._helper.bytes_on_disk(), stored_secrets(votes)
        self.findings.require_equal(
            "waiting secrets that the search does not find", len(held) - len(find_secrets(files, held)), 0
        )
        positions = len(self._find_positions(files, votes))
        self.findings.require_at_least("positions of waiting shares", positions, len(collect_nullifiers(votes)))

    def _find_positions(self, files: bytes, votes: Votes) -> list[int]:
        """Return the offsets of positions outside the public data of the file."""
        public = read_public_blobs(self._helper)
        return [
            place for _, position in votes for place in find_outside_public(files, position.to_bytes(3, "big"), public)
        ]

    def find_remains(self, votes: Votes, public: dict[str, bytes], _waiting: int) -> list[str]:
        """Return remains of confirmed votes: secrets, `public` values of their reveals, positions."""
        files = self._helper.bytes_on_disk()
        secrets = {name: value for vote, at in votes for name, value in collect_secrets(vote, at).items()}
        left = find_secrets(files, secrets | public)
        left += [name for name, value in collect_nullifiers(votes).items() if files.count(value) != 1]
        return left + [name for _, position in votes for name in columns_containing(self._helper, position)]

    def check_after_confirmation(self, votes: Votes, _public: dict[str, bytes]) -> None:
        """Search for everything after all shares are confirmed, including positions and encodings."""
        findings, files, nullifiers = self.findings, self._helper.bytes_on_disk(), collect_nullifiers(votes)
        blinds = {name: value for name, value in stored_secrets(votes).items() if name.startswith("blind")}
        written: dict[str, bytes] = {}
        for name, value in {**blinds, **nullifiers}.items():
            written |= {f"{name} in hex": value.hex().encode(), f"{name} in base64": base64.b64encode(value)}
        findings.require_equal("positions left in the database's bytes", len(self._find_positions(files, votes)), 0)
        findings.require_equal(
            "blinds and nullifiers in the database in hex or base64", len(find_secrets(files, written)), 0
        )
        findings.require_equal(
            "nullifiers not exactly once in the database",
            sum(files.count(value) != 1 for value in nullifiers.values()),
            0,
        )
