"""Queue import: strict parsing, validation of shares, repeated imports."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import proofs
from helper.chain.reveal_transaction import RevealMessage
from helper.core.share import ShareState
from helper.errors import ActionRefused, ExportFileError
from helper.operations.export_format import (
    MAX_LINE_BYTES,
    ExportHeader,
    encode_header,
    encode_share_line,
    parse_header,
    parse_share_line,
)
from helper.operations.operator_actions import split_lines
from helper.store.exported_shares import ExportedShare, ImportResult
from helper.store.models import HistoryEntry, QueueFilter
from helper.store.table_rows import RevealRow
from tests.unit.ingest.admission_fixtures import END, ROUND_ID
from tests.unit.operations.action_fixtures import (
    ANN,
    NOW,
    OperationsHarness,
    nullifier_of,
    recorded_share,
    stream_lines,
)
from tests.unit.store.fixtures import query_rows as sqlite_rows

NOTHING_IMPORTED = dict.fromkeys(
    ("taken", "revived", "known", "queued", "failed", "damaged", "conflict", "spent", "closed", "unknown", "invalid"), 0
)
"""The counts of an empty import."""


def waiting_share(index: int, **changes: Any) -> ExportedShare:
    """A recorded share in state received."""
    exported = ExportedShare(
        share=recorded_share(index, submit_at=END - 100),
        received_ms=int(NOW * 1000),
        state=ShareState.WAITING,
        due_ms=(END - 100) * 1000,
        attempts=2,
        crashes=1,
        proved_height=7,
        stage="proof",
        note="timed out",
        history=(HistoryEntry(int(NOW * 1000), "proof", "timed out", spent_attempt=True),),
    )
    return replace(exported, **changes)


def sent_share(index: int, **changes: Any) -> ExportedShare:
    """A recorded share in state broadcast."""
    share = recorded_share(index)
    message = RevealMessage(
        nullifier=nullifier_of(share),
        enc_share=share.c1 + share.c2,
        proposal_id=share.proposal_id,
        vote_decision=share.vote_decision,
        proof=b"p" * 4000,
        round_id=share.round_id,
        anchor_height=84,
    )
    message = replace(message, **changes)
    row = RevealRow(0, message.to_tx(), message.tx_hash(), 84, "k11", 90, 2, 90, 93, "node:80", "AMBIGUOUS")
    return waiting_share(index, share=share, due_ms=int(NOW * 1000), state=ShareState.SENT, reveal=row)


def export_lines(*exported: ExportedShare, chain_id: str | None = "chain-1", shares: int | None = None) -> list[bytes]:
    head = ExportHeader(chain_id=chain_id, made_at=5, shares=len(exported) if shares is None else shares)
    return [line.removesuffix(b"\n") for line in (encode_header(head), *map(encode_share_line, exported))]


def test_read_line_returns_written_share() -> None:
    for record in (
        waiting_share(0),
        sent_share(1),
        waiting_share(2, state=ShareState.FAILED),
        waiting_share(3, history=(), proved_height=None),
    ):
        assert parse_share_line(proofs, encode_share_line(record))[0] == record
    head = ExportHeader(chain_id=None, made_at=5, shares=2)
    assert parse_header(encode_header(head)) == head


def test_read_line_replaces_control_characters() -> None:
    line = json.loads(encode_share_line(sent_share(0)))
    line |= {"stage": "a\nb", "note": "a\x1bb", "history": [[1, "a\0b", "a\x85b", False]]}
    line["reveal"] |= {"last_endpoint": "a\tb", "last_outcome": "a\x7fb"}
    exported, _ = parse_share_line(proofs, json.dumps(line).encode())
    (entry,) = exported.history
    assert exported.reveal is not None
    texts = (exported.stage, exported.note, entry.stage, entry.note)
    assert {*texts, exported.reveal.last_endpoint, exported.reveal.last_outcome} == {"a b"}


def test_export_repr_and_errors_hide_witness() -> None:
    record = sent_share(0)
    line = json.loads(encode_share_line(record))
    secrets = [line["share"]["primary_blind"], line["share"]["shares_hash"], line["reveal"]["message"][:64]]
    assert not any(secret in repr(record) for secret in secrets)
    for invalid in ({**line, "state": "gone"}, {**line, "share": {**line["share"], "proposal_id": 0}}):
        with pytest.raises(ExportFileError) as caught:
            parse_share_line(proofs, json.dumps(invalid).encode())
        assert not any(secret in repr((caught.value, caught.value.__context__)) for secret in secrets)


@pytest.mark.parametrize(
    "change",
    [
        {"state": "submitted"},
        {"state": "witnessed"},
        {"state": "received"},
        {"state": "broadcast", "reveal": None},
        {"due_ms": -1},
        {"due_ms": 2**63},
        {"due_ms": "5"},
        {"due_ms": 5.0},
        {"attempts": True},
        {"attempts": None},
        {"stage": ""},
        {"stage": "s" * 33},
        {"note": "n" * 401},
        {"history": [[1, "proof", "note"]]},
        {"history": [[1, "proof", "note", 2]]},
        {"history": [[0, "proof", "note", False]] * 1001},
        {"more": 1},
        {"share": {}},
        {"share": None},
        {"reveal": {}},
    ],
)
def test_read_line_invalid_is_refused(change: dict[str, Any]) -> None:
    line = json.loads(encode_share_line(sent_share(0)))
    with pytest.raises(ExportFileError):
        parse_share_line(proofs, json.dumps({**line, **change}).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"sends": 0},
        {"first_sent_height": None},
        {"last_sent_height": None},
        {"first_sent_height": 94},
        {"sends": 0, "first_sent_height": None},
        {"anchor_height": 85},
        {"circuit": "k12"},
        {"message": ""},
        {"message": "BAog"},
        {"message": "!!"},
    ],
)
def test_read_line_inconsistent_message_is_refused(change: dict[str, Any]) -> None:
    line = json.loads(encode_share_line(sent_share(0)))
    line["reveal"] |= change
    with pytest.raises(ExportFileError):
        parse_share_line(proofs, json.dumps(line).encode())


@pytest.mark.parametrize("change", [{"proposal_id": 2}, {"vote_decision": 0}, {"enc_share": b"e" * 64}])
def test_read_line_message_of_another_share_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ExportFileError):
        parse_share_line(proofs, encode_share_line(sent_share(0, **change)))


@settings(max_examples=150)
@given(st.binary(max_size=200), st.integers(0, 2000), st.binary(max_size=3))
def test_read_line_arbitrary_bytes_give_share_or_error(junk: bytes, cut: int, inserted: bytes) -> None:
    good = encode_share_line(waiting_share(0))
    for line in (junk, good[:cut] + inserted + good[cut + len(inserted) :]):
        try:
            parse_share_line(proofs, line)
        except ExportFileError:
            continue
    for head in (junk, b"{}", b"[]", b""):
        with pytest.raises(ExportFileError):
            parse_header(head)


async def test_import_keeps_state_and_imports_once(harness: OperationsHarness) -> None:
    exported = [waiting_share(0), sent_share(1), waiting_share(2, state=ShareState.FAILED)]

    dry_result = await harness.operations.import_shares(ANN, stream_lines(export_lines(*exported)), dry_run=True)
    assert await harness.store.count_shares() == {}
    report = await harness.operations.import_shares(ANN, stream_lines(export_lines(*exported)))
    second_counts, second_skipped = await harness.operations.import_shares(ANN, stream_lines(export_lines(*exported)))

    assert report == dry_result == ({**NOTHING_IMPORTED, "taken": 3}, [])
    assert second_counts == {**NOTHING_IMPORTED, "known": 3, "queued": 2, "failed": 1}
    reasons = [ImportResult.QUEUED, ImportResult.QUEUED, ImportResult.FAILED]
    assert [(skipped.number, skipped.reason) for skipped in second_skipped] == list(enumerate(reasons, 1))
    expected = {ShareState.WAITING: 1, ShareState.SENT: 1, ShareState.FAILED: 1}
    assert await harness.store.count_shares() == {ROUND_ID: expected}
    assert await harness.store.is_known(exported[0].share.key)
    (reveal,) = await harness.store.list_unconfirmed()
    assert reveal.nullifier == nullifier_of(exported[1].share)
    assert harness.wake_count == 1
    assert [action.what for action in await harness.store.list_actions(limit=5)] == ["import", "import"]


async def test_import_many_skipped_shares_lists_first_and_counts_all(
    harness: OperationsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helper.operations.operator_actions.MAX_LISTED_SKIPPED", 2)
    lines = [*export_lines(shares=3), b"{}", b"[]", b""]
    counts, listed = await harness.operations.import_shares(ANN, stream_lines(lines))
    assert counts == {**NOTHING_IMPORTED, "invalid": 3}
    assert [skipped.number for skipped in listed] == [1, 2]


async def test_import_moved_shares_wakes_dispatcher(harness: OperationsHarness) -> None:
    await harness.operations.import_shares(ANN, stream_lines(export_lines(waiting_share(0))))
    rows = sqlite_rows(harness.path, "SELECT id, row_check FROM shares")
    assert await harness.operations.move_shares(ANN, QueueFilter(), 0, rows) == {"moved": 1, "stayed": 0}
    wakes_before = harness.wake_count

    report = await harness.operations.import_shares(ANN, stream_lines(export_lines(waiting_share(0))))

    assert report == ({**NOTHING_IMPORTED, "taken": 1, "revived": 1}, [])
    assert harness.wake_count == wakes_before + 1
    (action, *_) = await harness.store.list_actions(limit=1)
    assert (action.what, action.outcome) == ("import", {"taken": 1, "revived": 1})


async def test_import_invalid_shares_are_skipped(harness: OperationsHarness) -> None:
    wrong = [
        waiting_share(0, share=replace(recorded_share(0), primary_blind=recorded_share(1).primary_blind)),
        waiting_share(1, share=replace(recorded_share(1), share_comms=b"\xff" * 512)),
        waiting_share(2, share=recorded_share(2, submit_at=END + 1)),
        waiting_share(2, due_ms=2**62),
        waiting_share(3, share=recorded_share(3, vote_decision=7)),
        waiting_share(4, share=recorded_share(4, proposal_id=9)),
        sent_share(5, nullifier=b"\x07" * 32),
    ]
    counts, listed = await harness.operations.import_shares(
        ANN, stream_lines([*export_lines(*wrong, waiting_share(6), shares=9), b"{}"])
    )
    assert (counts["invalid"], counts["taken"]) == (8, 1)
    assert [skipped.number for skipped in listed] == [1, 2, 3, 4, 5, 6, 7, 9]
    assert {(skipped.ref, skipped.reason) for skipped in listed} == {(None, ImportResult.INVALID)}


async def test_import_export_of_another_chain_is_refused(harness: OperationsHarness) -> None:
    with pytest.raises(ActionRefused, match="chain-2"):
        await harness.operations.import_shares(ANN, stream_lines(export_lines(waiting_share(0), chain_id="chain-2")))
    lines = stream_lines(export_lines(waiting_share(0), chain_id=None))
    assert (await harness.operations.import_shares(ANN, lines))[0]["taken"] == 1


@pytest.mark.parametrize("number", [0, 1, 3])
async def test_import_truncated_export_keeps_received_shares(harness: OperationsHarness, number: int) -> None:
    with pytest.raises(ExportFileError, match=f"2 of {number}" if number else "2 of 0"):
        await harness.operations.import_shares(
            ANN, stream_lines(export_lines(waiting_share(0), waiting_share(1), shares=number))
        )
    assert await harness.store.count_shares() == {ROUND_ID: {ShareState.WAITING: 2}}
    (action,) = await harness.store.list_actions(limit=5)
    assert action.outcome is not None
    assert action.outcome["taken"] == 2
    with pytest.raises(ExportFileError, match="not a queue export"):
        await harness.operations.import_shares(ANN, stream_lines([]))


async def test_split_lines_any_chunking_gives_complete_lines() -> None:
    text = b"one\n\ntwo\nthree\n"
    for size in range(1, len(text) + 1):
        chunks = [text[start : start + size] for start in range(0, len(text), size)]
        assert [line async for line in split_lines(stream_lines(chunks))] == [b"one", b"", b"two", b"three"]
    for chunks in ([b"one"], [b"x" * (MAX_LINE_BYTES + 1)], [b"one\n", b"x" * MAX_LINE_BYTES, b"xx", b"\n"]):
        with pytest.raises(ExportFileError):
            assert [line async for line in split_lines(stream_lines(chunks))]
