"""Export files of svoted's helper: reading, conversion, import, and writing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

import proofs
from helper.core.share import Share, ShareState
from helper.errors import ExportFileError
from helper.operations.export_format import parse_share_line
from helper.operations.operator_actions import OperatorActions
from helper.operations.svoted_format import INVALID_LINE, SVOTED_STAGE, encode_svoted_export, read_svoted_export
from helper.store.exported_shares import ExportedShare, ImportResult
from helper.store.messages import SentReveal
from helper.store.models import QueueFilter, SpentNullifier
from helper.store.shares import EnqueueOperation, claim_due
from tests.support.svoted import erased_row, pending_broadcast, svoted_file, svoted_row
from tests.unit.ingest.admission_fixtures import END, ROUND_ID
from tests.unit.operations.action_fixtures import (
    ANN,
    NOW,
    OperationsHarness,
    nullifier_of,
    recorded_share,
    stream_lines,
)

LATER = END - 100


def convert_row(row: dict[str, Any], **changes: Any) -> ExportedShare:
    (_, line) = read_svoted_export(svoted_file(ROUND_ID, [row], **changes)).lines
    return parse_share_line(proofs, line.removesuffix(b"\n"))[0]


def sent_row(share: Share, **changes: Any) -> dict[str, Any]:
    return svoted_row(share, pending_broadcast=pending_broadcast(share, nullifier_of(share), **changes))


@pytest.mark.rule("N23")
@pytest.mark.parametrize("version", [1, 2])
def test_received_row_keeps_times_and_attempts(version: int) -> None:
    share = recorded_share(0, submit_at=LATER)

    exported = convert_row({**svoted_row(share), "new_field": {"x": 1}}, version=version, other=[])

    assert exported == ExportedShare(
        share, 1_700_000_000_000, ShareState.WAITING, LATER * 1000, 1, 0, None, "accepted", ""
    )


@pytest.mark.rule("N23")
def test_row_without_original_time_gets_the_effective_one() -> None:
    exported = convert_row(svoted_row(recorded_share(0), submit_at=LATER, original_submit_at=None, received_at=0))

    assert (exported.share.submit_at, exported.due_ms) == (LATER, LATER * 1000)
    assert exported.received_ms == 1_700_000_500_000


def test_row_is_never_due_before_the_time_of_the_wallet() -> None:
    row = svoted_row(recorded_share(0, submit_at=LATER), submit_at=int(NOW))  # imported there with --force-ready

    exported = convert_row(row)

    assert (exported.share.submit_at, exported.due_ms) == (LATER, LATER * 1000)


@pytest.mark.rule("N23")
def test_pending_broadcast_is_the_sent_message() -> None:
    share = recorded_share(0, submit_at=int(NOW) - 5)

    exported = convert_row(sent_row(share), version=2)

    assert exported.state is ShareState.SENT
    assert exported.reveal is not None
    row = exported.reveal
    assert (row.circuit, row.anchor_height, row.height) == ("k10", 84, 90)
    assert (row.sends, row.first_sent_height, row.last_sent_height) == (3, 90, 90)


@pytest.mark.rule("N23")
@pytest.mark.parametrize(
    "broken",
    [
        {"proof": "AAAA"},
        {"vote_round_id": "AAAA"},
        {"proposal_id": 2},
        {"enc_share": "!"},
        {"vote_comm_tree_anchor_height": "84"},
    ],
)
def test_unusable_pending_broadcast_is_proven_again(broken: dict[str, Any]) -> None:
    share = recorded_share(0, submit_at=int(NOW) - 5)

    exported = convert_row(sent_row(share, **broken))

    assert (exported.state, exported.reveal) == (ShareState.WAITING, None)


@pytest.mark.rule("N23")
def test_rows_are_numbered_as_in_the_file() -> None:
    shares = [recorded_share(index, submit_at=LATER) for index in range(4)]
    rows = [
        erased_row(shares[0]),
        svoted_row(shares[1], corrupt=True, corruption_reason="invalid_share_comms_json", raw_share_comms_base64=""),
        svoted_row(shares[2], state=3),
        svoted_row(shares[3], primary_blind="?"),
    ]

    export = read_svoted_export(svoted_file(ROUND_ID, rows))

    assert (export.numbers, export.submitted) == ((2, 3, 4), 1)
    assert [line == INVALID_LINE for line in export.lines[1:]] == [True, False, True]
    assert json.loads(export.lines[0])["shares"] == 3
    failed, _ = parse_share_line(proofs, export.lines[2].removesuffix(b"\n"))
    assert (failed.state, failed.stage) == (ShareState.FAILED, SVOTED_STAGE)


@pytest.mark.rule("N23")
def test_file_without_rows_is_empty() -> None:
    export = read_svoted_export(svoted_file(ROUND_ID, None))

    assert (len(export.lines), export.numbers, export.submitted) == (1, (), 0)


@pytest.mark.rule("N23")
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (svoted_file(ROUND_ID, [], version=3), "has version 3; versions 1 and 2 can be read"),
        (svoted_file(ROUND_ID, [], version="1"), "version is missing or invalid"),
        (svoted_file(ROUND_ID, [])[:-20], "invalid or truncated JSON"),
        (b"", "invalid or truncated JSON"),
        (b"[]", "not an export"),
        (b"{}", "version is missing"),
        (svoted_file(ROUND_ID, [], round_id="AB"), "round_id is missing or invalid"),
        (svoted_file(ROUND_ID, [], rows={}), "rows is missing or invalid"),
    ],
)
def test_invalid_file_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ExportFileError, match=message):
        read_svoted_export(data)


@pytest.mark.rule("N23")
@pytest.mark.parametrize(
    "change",
    [
        {"state": 4},
        {"state": "0"},
        {"share_index": 15},
        {"share_comms": []},
        {"submit_at": -1},
        {"tree_position": 1.5},
        {"enc_share": None},
        {"shares_hash": "AAAA"},
    ],
)
def test_invalid_row_is_reported_and_others_are_converted(change: dict[str, Any]) -> None:
    good = svoted_row(recorded_share(0))

    export = read_svoted_export(svoted_file(ROUND_ID, [{**good, **change}, good, [], None]))

    assert [line == INVALID_LINE for line in export.lines[1:]] == [True, False, True, True]


def test_repr_and_errors_hide_witness() -> None:
    row = sent_row(recorded_share(0, submit_at=int(NOW) - 5))
    export = read_svoted_export(svoted_file(ROUND_ID, [row]))
    with pytest.raises(ExportFileError) as caught:
        read_svoted_export(svoted_file(ROUND_ID, [row], round_id=row["primary_blind"]))

    assert row["primary_blind"] not in repr((export, caught.value, caught.value.__context__))


# ---------------------------------------------------------------------- import


async def import_file(harness: OperationsHarness, *rows: dict[str, Any]) -> tuple[dict[str, int], list[ImportResult]]:
    """Import a file; returns the counts that are not 0, and the reasons of the skipped rows."""
    lines = [line.removesuffix(b"\n") for line in read_svoted_export(svoted_file(ROUND_ID, list(rows))).lines]
    counts, skipped = await harness.operations.import_shares(ANN, stream_lines(lines))
    return {name: n for name, n in counts.items() if n}, [share.reason for share in skipped]


@pytest.mark.rule("N23")
@pytest.mark.parametrize("change", [{"c1": bytes(32)}, {"kind": "hidden"}, {"kind": "hidden", "extra": b"other"}])
async def test_import_of_other_content_is_a_conflict_and_changes_nothing(
    harness: OperationsHarness, change: dict[str, Any]
) -> None:
    stored = recorded_share(0, submit_at=LATER)
    await harness.store.run(EnqueueOperation(replace(stored, **change), b"n" * 32, now=NOW))
    before = await harness.store.list_shares(QueueFilter(), 9)

    assert await import_file(harness, svoted_row(stored)) == ({"known": 1, "conflict": 1}, [ImportResult.CONFLICT])
    assert await harness.store.list_shares(QueueFilter(), 9) == before


@pytest.mark.rule("N23")
async def test_import_of_file_with_another_choice_at_a_position_takes_both(harness: OperationsHarness) -> None:
    row = svoted_row(recorded_share(0, submit_at=LATER))
    other = {**row, "vote_decision": 1 - row["vote_decision"]}

    counts = {"taken": 2, "known": 1, "queued": 1}
    assert await import_file(harness, row, row, other) == (counts, [ImportResult.QUEUED])
    claimed = await harness.store.run(claim_due, now=LATER + 1, limit=9, rounds=[ROUND_ID])
    assert sorted(queued.share.vote_decision for queued in claimed) == [0, 1]


class FakeLookup:
    """A chain that has counted some nullifiers."""

    def __init__(self, *counted: bytes) -> None:
        self.counted = counted
        self.queried: list[SentReveal] = []

    async def __call__(self, reveals: Sequence[SentReveal]) -> list[SpentNullifier]:
        self.queried += reveals
        return [(reveal.round_id, reveal.nullifier) for reveal in reveals if reveal.nullifier in self.counted]


@pytest.mark.rule("N23")
async def test_pending_broadcast_is_looked_for_on_the_chain_first(harness: OperationsHarness) -> None:
    counted, pending, waiting = (recorded_share(index, submit_at=int(NOW) - 5) for index in range(3))
    lookup = FakeLookup(nullifier_of(counted))
    harness.operations = OperatorActions(
        store=harness.store,
        rounds=harness.rounds,
        share_checks=proofs,
        find_counted=lookup,
    )

    counts, reasons = await import_file(harness, sent_row(counted), sent_row(pending), svoted_row(waiting))

    assert (counts, reasons) == ({"taken": 2, "spent": 1}, [ImportResult.CONFIRMED])
    assert [reveal.nullifier for reveal in lookup.queried] == [nullifier_of(counted), nullifier_of(pending)]
    assert [reveal.due_ms for reveal in lookup.queried] == [(int(NOW) - 5) * 1000] * 2
    assert await harness.store.count_shares() == {ROUND_ID: {ShareState.SENT: 1, ShareState.WAITING: 1}}
    (sent,) = await harness.store.list_unconfirmed()
    assert (sent.nullifier, sent.row.sends) == (nullifier_of(pending), 3)


# ---------------------------------------------------------------------- export


def exported(index: int, *, submit_at: int, received: float, **changes: Any) -> ExportedShare:
    share = recorded_share(index, submit_at=submit_at)
    due_ms = max(submit_at, int(received)) * 1000
    as_received = ExportedShare(share, int(received * 1000), ShareState.WAITING, due_ms, 2, 0, None, "accepted", "")
    return replace(as_received, **changes)


@pytest.mark.rule("N24")
def test_written_file_has_the_fields_of_version_1() -> None:
    shares = [
        exported(0, submit_at=LATER, received=NOW + 0.7),
        exported(1, submit_at=0, received=NOW, state=ShareState.FAILED),
    ]

    content = json.loads(encode_svoted_export(shares, vote_end_time=END, exported_at=int(NOW) + 9))

    expected = [
        svoted_row(shares[1].share, submit_at=int(NOW), original_submit_at=None, state=3, processable=False),
        svoted_row(shares[0].share),
    ]
    times = [{"received_at": int(NOW), "attempts": 2, "vote_end_time": END}] * 2
    assert content == {
        "version": 1,
        "round_id": ROUND_ID.hex(),
        "exported_at": int(NOW) + 9,
        "round": {"created_at_time": int(NOW), "vote_end_time": END},
        "rows": [{**row, **given} for row, given in zip(expected, times, strict=True)],
    }


@pytest.mark.rule("N24")
def test_written_file_can_be_read_again() -> None:
    share = exported(0, submit_at=LATER, received=int(NOW))

    (_, line) = read_svoted_export(encode_svoted_export([share], vote_end_time=END, exported_at=int(NOW))).lines

    assert parse_share_line(proofs, line.removesuffix(b"\n"))[0] == share
