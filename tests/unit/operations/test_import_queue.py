"""Queue import: strict parsing, validation of shares, repeated imports."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import proofs
from helper.chain.reveal_transaction import RevealMessage
from helper.core.share import ShareState
from helper.errors import ActionRefused, ExportFileError
from helper.operations.actions import ImportReport
from helper.operations.export_format import MAX_LINE, Head, read_head, read_line, write_head, write_line
from helper.operations.import_queue import split_lines
from helper.store.action_rows import ExportedReveal, ExportedShare, ImportResult
from helper.store.rows import HistoryEntry, PreparedReveal, QueueFilter
from tests.unit.ingest.admission_fixtures import END, ROUND_ID
from tests.unit.operations.action_fixtures import ANN, NOW, Desk, each, nullifier_of, recorded
from tests.unit.store.fixtures import rows as sqlite_rows


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    one = Desk(tmp_path / "queue.db")
    await one.open()
    await one.store.set_meta("chain_id", "chain-1")
    yield one
    await one.store.close()


NOTHING_IMPORTED = dict.fromkeys(
    ("taken", "revived", "known", "queued", "failed", "damaged", "spent", "closed", "unknown", "invalid"), 0
)
"""The counts of an empty import."""


def waiting(index: int, **changes: Any) -> ExportedShare:
    """A recorded share in state received."""
    carried = ExportedShare(
        share=recorded(index, submit_at=END - 100),
        received_ms=int(NOW * 1000),
        state=ShareState.RECEIVED,
        due_ms=(END - 100) * 1000,
        attempts=2,
        crashes=1,
        proved_height=7,
        stage="proof",
        note="timed out",
        history=(HistoryEntry(int(NOW * 1000), "proof", "timed out", counted=True),),
    )
    return replace(carried, **changes)


def sent(index: int, **changes: Any) -> ExportedShare:
    """A recorded share in state broadcast."""
    share = recorded(index)
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
    prepared = PreparedReveal(message.to_tx(), message.tx_hash(), 84, "k11", 90)
    reveal = ExportedReveal(prepared, 2, 90, 93, "node:80", "AMBIGUOUS")
    return waiting(index, share=share, due_ms=int(NOW * 1000), state=ShareState.BROADCAST, reveal=reveal)


def lines(*carried: ExportedShare, chain_id: str | None = "chain-1", shares: int | None = None) -> list[bytes]:
    head = Head(chain_id=chain_id, made_at=5, shares=len(carried) if shares is None else shares)
    return [line.removesuffix(b"\n") for line in (write_head(head), *map(write_line, carried))]


def test_read_line_returns_written_share() -> None:
    for one in (waiting(0), sent(1), waiting(2, state=ShareState.FAILED), waiting(3, history=(), proved_height=None)):
        assert read_line(proofs, write_line(one))[0] == one
    head = Head(chain_id=None, made_at=5, shares=2)
    assert read_head(write_head(head)) == head


def test_export_repr_and_errors_hide_witness() -> None:
    one = sent(0)
    line = json.loads(write_line(one))
    secrets = [line["share"]["primary_blind"], line["share"]["shares_hash"], line["reveal"]["message"][:64]]
    assert not any(secret in repr(one) for secret in secrets)
    for broken in ({**line, "state": "gone"}, {**line, "share": {**line["share"], "proposal_id": 0}}):
        with pytest.raises(ExportFileError) as caught:
            read_line(proofs, json.dumps(broken).encode())
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
    line = json.loads(write_line(sent(0)))
    with pytest.raises(ExportFileError):
        read_line(proofs, json.dumps({**line, **change}).encode())


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
    line = json.loads(write_line(sent(0)))
    line["reveal"] |= change
    with pytest.raises(ExportFileError):
        read_line(proofs, json.dumps(line).encode())


@pytest.mark.parametrize("change", [{"proposal_id": 2}, {"vote_decision": 0}, {"enc_share": b"e" * 64}])
def test_read_line_message_of_another_share_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ExportFileError):
        read_line(proofs, write_line(sent(0, **change)))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 2000), st.binary(max_size=3))
def test_read_line_arbitrary_bytes_give_share_or_error(junk: bytes, cut: int, put: bytes) -> None:
    good = write_line(waiting(0))
    for line in (junk, good[:cut] + put + good[cut + len(put) :]):
        try:
            read_line(proofs, line)
        except ExportFileError:
            continue
    for head in (junk, b"{}", b"[]", b""):
        with pytest.raises(ExportFileError):
            read_head(head)


async def test_import_keeps_state_and_imports_once(desk: Desk) -> None:
    carried = [waiting(0), sent(1), waiting(2, state=ShareState.FAILED)]

    rehearsed = await desk.operations.import_shares(ANN, each(lines(*carried)), dry=True)
    assert await desk.store.counts() == {}
    told = await desk.operations.import_shares(ANN, each(lines(*carried)))
    again = await desk.operations.import_shares(ANN, each(lines(*carried)))

    assert told == rehearsed == ImportReport({**NOTHING_IMPORTED, "taken": 3}, ())
    assert again.counts == {**NOTHING_IMPORTED, "known": 3, "queued": 2, "failed": 1}
    reasons = [ImportResult.QUEUED, ImportResult.QUEUED, ImportResult.FAILED]
    assert [(one.number, one.reason) for one in again.left] == list(enumerate(reasons, 1))
    expected = {ShareState.RECEIVED: 1, ShareState.BROADCAST: 1, ShareState.FAILED: 1}
    assert await desk.store.counts() == {ROUND_ID: expected}
    assert await desk.store.is_known(carried[0].share.key)
    (reveal,) = await desk.store.unconfirmed()
    assert reveal.nullifier == nullifier_of(carried[1].share)
    assert desk.woken == 1
    assert [act.what for act in await desk.store.actions(limit=5)] == ["import", "import"]


async def test_import_many_skipped_shares_lists_first_and_counts_all(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helper.operations.actions.MAX_LEFT", 2)
    report = await desk.operations.import_shares(ANN, each([*lines(shares=3), b"{}", b"[]", b""]))
    assert report.counts == {**NOTHING_IMPORTED, "invalid": 3}
    assert [one.number for one in report.left] == [1, 2]


async def test_import_moved_shares_wakes_dispatcher(desk: Desk) -> None:
    await desk.operations.import_shares(ANN, each(lines(waiting(0))))
    rows = sqlite_rows(desk.path, "SELECT id, row_check FROM shares")
    assert await desk.operations.hand_over(ANN, QueueFilter(), 0, rows) == {"moved": 1, "stayed": 0}
    woken = desk.woken

    report = await desk.operations.import_shares(ANN, each(lines(waiting(0))))

    assert report == ImportReport({**NOTHING_IMPORTED, "taken": 1, "revived": 1}, ())
    assert desk.woken == woken + 1
    (act, *_) = await desk.store.actions(limit=1)
    assert (act.what, act.outcome) == ("import", {"taken": 1, "revived": 1})


async def test_import_invalid_shares_are_skipped(desk: Desk) -> None:
    wrong = [
        waiting(0, share=replace(recorded(0), primary_blind=recorded(1).primary_blind)),
        waiting(1, share=replace(recorded(1), share_comms=b"\xff" * 512)),
        waiting(2, share=recorded(2, submit_at=END + 1)),
        waiting(2, due_ms=2**62),
        waiting(3, share=recorded(3, vote_decision=7)),
        waiting(4, share=recorded(4, proposal_id=9)),
        sent(5, nullifier=b"\x07" * 32),
    ]
    told = await desk.operations.import_shares(ANN, each([*lines(*wrong, waiting(6), shares=9), b"{}"]))
    assert (told.counts["invalid"], told.counts["taken"]) == (8, 1)
    assert [one.number for one in told.left] == [1, 2, 3, 4, 5, 6, 7, 9]
    assert {(one.ref, one.reason) for one in told.left} == {(None, ImportResult.INVALID)}


async def test_import_export_of_another_chain_is_refused(desk: Desk) -> None:
    with pytest.raises(ActionRefused, match="chain-2"):
        await desk.operations.import_shares(ANN, each(lines(waiting(0), chain_id="chain-2")))
    assert (await desk.operations.import_shares(ANN, each(lines(waiting(0), chain_id=None)))).counts["taken"] == 1


@pytest.mark.parametrize("number", [0, 1, 3])
async def test_import_truncated_export_keeps_received_shares(desk: Desk, number: int) -> None:
    with pytest.raises(ExportFileError, match=f"2 of {number}" if number else "2 of 0"):
        await desk.operations.import_shares(ANN, each(lines(waiting(0), waiting(1), shares=number)))
    assert await desk.store.counts() == {ROUND_ID: {ShareState.RECEIVED: 2}}
    (act,) = await desk.store.actions(limit=5)
    assert act.outcome is not None
    assert act.outcome["taken"] == 2
    with pytest.raises(ExportFileError, match="not a queue export"):
        await desk.operations.import_shares(ANN, each([]))


async def test_split_lines_any_chunking_gives_complete_lines() -> None:
    text = b"one\n\ntwo\nthree\n"
    for size in range(1, len(text) + 1):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert [line async for line in split_lines(each(pieces))] == [b"one", b"", b"two", b"three"]
    for pieces in ([b"one"], [b"x" * (MAX_LINE + 1)], [b"one\n", b"x" * MAX_LINE, b"xx", b"\n"]):
        with pytest.raises(ExportFileError):
            assert [line async for line in split_lines(each(pieces))]
