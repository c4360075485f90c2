"""Searches a PostgreSQL server's tables, WAL, temporary files and log for data of votes.

A server retains deleted data, so data that must not remain must never be written: no secret, position or transaction at
any time, no nullifier of a pending share. A confirmed nullifier is among all spent ones, including in the write-ahead
log. The files are searched while all shares wait and at the end; a replication slot retains every WAL segment, so
everything ever written is searched. Short-lived temporary files of the server are not covered.

Injected fault: `Keyring.encrypt` and `Keyring.decrypt` returned texts unchanged. It printed "secrets, nullifiers and
positions of waiting shares at the server: 247: 70001 in a record in data/pg_wal/000000010000000000000001, … (=
none)" and "transactions at the server: 144 (= 0)".
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.campaign.campaign import Findings
from tests.campaign.canaries import Votes, collect_nullifiers, find_secrets, stored_secrets
from tests.support.erasure_check import columns_containing
from tests.support.harness import HelperProcess
from tests.support.queue_storage import ZERO_GAP, PostgresSchema

CHUNK_BYTES = 8
"""Number of bytes of a secret, or of its characters in hex or base64, that counts as a leak."""
WAL_FOLDER = Path("data/pg_wal")


class PostgresSearch:
    """Searches a server's files.

    Args:
        findings: receives the goals.
        helper: the helper whose queue is on the server.
        schema: the queue's schema.
    """

    search_seconds = 4
    """Seconds that a search of a server's files may take on a shared machine."""

    def __init__(self, findings: Findings, helper: HelperProcess, schema: PostgresSchema) -> None:
        self.findings = findings
        self._helper = helper
        self._storage = schema
        self._initial_chunks = schema.read_files()
        schema.query_rows("SELECT pg_create_physical_replication_slot('campaign', true)")

    def is_database_file(self, _path: str) -> bool:
        """Return whether a share's secrets may be in this file temporarily: never, with PostgreSQL."""
        return False

    def check_waiting_shares(self, votes: Votes) -> None:
        """Check that pending shares are on the server in encrypted form only."""
        files = self._read_new_files()
        sealed = {str(share): bytes(text) for share, text in self._helper.query_rows("SELECT id, witness FROM shares")}
        matched = {name for name, _ in find_secret_chunks(files, sealed)}
        self.findings.require_equal("encrypted witnesses that the search does not find", len(sealed) - len(matched), 0)
        leaks = find_secret_chunks(
            files, _encoded_secrets(stored_secrets(votes) | collect_nullifiers(votes)) | _encoded_positions(votes)
        )
        self.findings.require_equal(
            "secrets, nullifiers and positions of waiting shares at the server", _format_matches(leaks), "none"
        )
        columns = {name for _, position in votes for name in columns_containing(self._helper, position)}
        self.findings.require_none("columns with a position", columns)

    def _read_new_files(self) -> dict[Path, bytes]:
        """Return the data added since before the first share: a server's own numbers may look like positions."""
        added = {}
        for path, data in self._storage.read_files().items():
            before = self._initial_chunks.get(path, b"").rstrip(b"\0")
            added[path] = data[len(before) :] if data.startswith(before) else data
        return added

    def find_remains(self, _votes: Votes, _public: dict[str, bytes], waiting: int) -> list[str]:
        """Return tables with rows of more shares than are pending."""
        tables = ("shares", "reveals", "claims")
        return [name for name in tables if self._helper.count_rows(name) > waiting]

    def check_after_confirmation(self, votes: Votes, public: dict[str, bytes]) -> None:
        """Search for everything after all shares are confirmed."""
        findings, files, nullifiers = self.findings, self._read_new_files(), collect_nullifiers(votes)
        leaks = find_secret_chunks(files, _encoded_secrets(stored_secrets(votes)) | _encoded_positions(votes))
        findings.require_equal("secrets and positions at the server", _format_matches(leaks), "none")
        findings.require_equal(
            "transactions at the server", len(find_secrets(ZERO_GAP.join(files.values()), public)), 0
        )
        findings.record_figure("bytes of its files searched", sum(map(len, files.values())))
        # The table of all spent nullifiers also appears in the write-ahead log.
        spent = self._storage.table_files("spent")
        findings.require_at_least("files of the table of spent nullifiers", len(spent & files.keys()), 2)
        others = {path: data for path, data in files.items() if path not in spent and WAL_FOLDER not in path.parents}
        leaks = find_secret_chunks(others, _encoded_secrets(nullifiers))
        findings.require_equal("nullifiers outside the table of spent nullifiers", _format_matches(leaks), "none")
        rows = self._helper.query_rows("SELECT nullifier FROM spent")
        present = sum((value,) in rows for value in nullifiers.values())
        findings.require_equal("nullifiers missing from that table", len(nullifiers) - present, 0)


def find_secret_chunks(files: Mapping[Path, bytes], secrets: Mapping[str, bytes]) -> set[tuple[str, Path]]:
    """Find secrets of which eight aligned bytes occur in a file."""
    names: dict[int, set[str]] = {}
    for name, secret in secrets.items():
        for at in range(0, len(secret) - CHUNK_BYTES + 1, CHUNK_BYTES):
            names.setdefault(int.from_bytes(secret[at : at + CHUNK_BYTES], sys.byteorder), set()).add(name)
    chunks, matches = frozenset(names), set[tuple[str, Path]]()
    for path, data in files.items():
        for shift in range(min(CHUNK_BYTES, len(data))):
            length = (len(data) - shift) // CHUNK_BYTES * CHUNK_BYTES
            hits = chunks.intersection(memoryview(data)[shift : shift + length].cast("Q"))
            matches |= {(name, path) for chunk in hits for name in names[chunk]}
    return matches


def _format_matches(matches: Iterable[tuple[str, Path]]) -> str:
    descriptions = sorted(f"{name} in {path}" for name, path in matches)
    return f"{len(descriptions)}: {', '.join(descriptions[:3])}" if descriptions else "none"


def _encoded_secrets(secrets: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the secrets unencoded, in hex and in base64."""
    encoded = dict(secrets)
    for name, value in secrets.items():
        text = value.hex()
        encoded |= {f"{name} in hex": text.encode(), f"{name} in upper-case hex": text.upper().encode()}
        encoded[f"{name} in base64"] = base64.b64encode(value)
    return encoded


def _encoded_positions(votes: Votes) -> dict[str, bytes]:
    """Return positions as columns store them, and as packed with the next field."""
    encoded: dict[str, bytes] = {}
    for _, at in votes:
        encoded |= {f"{at} as a column": at.to_bytes(8, "little"), f"{at} as a parameter": at.to_bytes(8, "big")}
        encoded[f"{at} in a record"] = at.to_bytes(4, "big") + bytes(4)  # followed by a time in seconds
    return encoded
