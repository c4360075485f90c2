"""Flips one bit in each of 1,000 copies of a database and runs a helper on each copy.

Method. The database has a row in every table: shares that wait, are due later, were claimed, sent, failed and
confirmed, with messages, history, a round, its tree and its spent nullifiers. Bits are flipped anywhere in the file,
every second one near the start of a page, where SQLite stores the page header. Three of four are flipped before the
helper starts, the others while it runs. On each copy the real store opens, recovers, follows a node's tree, claims what
is due (and checks that nothing is due before), reads sent messages, lists everything for operators, retries failed
shares, enqueues new and known shares, runs the integrity check, and applies blocks that confirm every share. The result
is compared with a run on the original file.

Requirements. Nothing is returned before its time or with changed content. Every share that should have been returned
was, or is quarantined and reported; or the start was refused with advice to restore; or the store or its integrity
check reported the damage. A damaged row may be replaced when its share is posted again, if it is reported; a message
that was sent is then returned unchanged. All errors are the product's own. A bit that flipped before the start, and
does not prevent the start, prevents nothing else: blocks are applied, the tree equals the chain's, and no share is
enqueued twice. Operators can list the shares after the integrity check, unless it found damage. Every run ends.

Injected fault that it caught: `load` in helper/store/transitions.py accepted a row without verifying its
check value. The short form printed "returned shares or messages that differ from the written ones: 2 (= 0)".
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import structlog

from helper.store.messages import SentReveal
from helper.store.models import EnqueueResult
from tests.campaign import corrupted_database
from tests.campaign.campaign import CampaignRun, Findings
from tests.campaign.corrupted_database import RunResult, create_numbered_share, row_id_of, run_helper

TIMEOUT_SECONDS = 120
"""Timeout of a run in seconds; it takes one or two."""
PAGE_BYTES = 4096
HEADER_BYTES = 64
"""Bytes at the start of a page in which every second bit is flipped."""
PROCESSED_ROWS = {
    row_id_of(number)
    for part in (
        corrupted_database.WAITING_NUMBERS,
        corrupted_database.LATER_NUMBERS,
        corrupted_database.CLAIMED_NUMBERS,
        corrupted_database.FAILED_NUMBERS,
    )
    for number in part
}
"""Rows that a complete run claims for a proof."""
LIVE_ROWS = PROCESSED_ROWS | {row_id_of(number) for number in corrupted_database.SENT_NUMBERS}
"""Rows of pending shares; a new share reuses a confirmed share's row."""
EXPECTED_SHARES = {
    create_numbered_share(number).share
    for number in (*corrupted_database.STORED_NUMBERS, *corrupted_database.NEW_NUMBERS)
}


async def run(setting: CampaignRun) -> Findings:
    findings, rng = Findings(), setting.seeded_random("bits")
    base = setting.directory / "base.db"
    kinds: Counter[str] = Counter()
    with structlog.testing.capture_logs():
        await corrupted_database.create_database(base)
        data = base.read_bytes()
        intact = await run_helper(Path(shutil.copy(base, setting.directory / "intact.db")))
        assert intact.claimed.keys() >= PROCESSED_ROWS, "the run on the intact file is incomplete"
        assert classify_result(intact, intact) == "harmless", intact
        for number in range(setting.scale(1000, 60)):
            at, bit = rng.randrange(len(data)), rng.randrange(8)
            if number % 2:
                at = at - at % PAGE_BYTES + rng.randrange(HEADER_BYTES)
            copy = setting.directory / f"{number}.db"
            running = number % 4 == 3
            copy.write_bytes(data if running else _with_flipped_bit(data, at, bit))
            result = None
            with suppress(TimeoutError):
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    result = await run_helper(copy, (at, bit) if running else None)
            findings.require_equal("runs that did not end", int(result is None), 0)
            if result is None:
                findings.record_figure("first run that did not end", f"bit {bit} of byte {at}, running: {running}")
                break
            kinds[classify_result(result, intact)] += 1
            check_result(findings, result, intact, running=running)
            if findings.broken_goals and "first run that broke a promise" not in findings.figures:
                outcome = f"{result.refused} {result.errors} {result.problems} {result.unhandled}"
                findings.record_figure(
                    "first run that broke a promise", f"bit {bit} of byte {at}, running: {running}; {outcome}"
                )
            _remove_database(copy)
    for name, times in sorted(kinds.items()):
        findings.record_figure(f"copies: {name}", times)
    return findings


def classify_result(result: RunResult, expected: RunResult) -> str:
    """Classify the effect of a flipped bit, most severe first."""
    if result.refused is not None:
        return "start refused"
    if result.errors:
        return "operations refused with the reason"
    if result.damaged_rows:
        return "rows set aside and reported, all others processed"
    if _replaced_rows(result, expected):
        return "rows reported and replaced by a new post, all processed"
    if result.problems or result.repaired:
        return "damage detected by the integrity check"
    is_same = (result.claimed, result.sent_messages, result.listed, result.counts) == (
        expected.claimed,
        expected.sent_messages,
        expected.listed,
        expected.counts,
    )
    return "harmless" if is_same else "other difference"


def check_result(findings: Findings, result: RunResult, expected: RunResult, *, running: bool) -> None:
    """Compare one run with that on the intact file."""
    findings.require_equal("errors that are not the product's own", len(result.unhandled), 0)
    if result.refused is not None:
        findings.require_equal("starts refused without advice to restore", int("restore" not in result.refused[1]), 0)
        return
    findings.require_equal("shares claimed before their time", result.early_claims, 0)
    findings.require_equal(
        "returned shares or messages that differ from the written ones", len(_wrong_rows(result, expected)), 0
    )
    is_reported = bool(result.problems) or any("damaged" in text for text in result.errors.values())
    replaced = _replaced_rows(result, expected)
    unreported = len(replaced) - len(result.reported_nullifiers)
    findings.require_equal("rows replaced by a new post without a report", max(unreported, 0), 0)
    repeated = result.repeated_claims - len(replaced)
    findings.require_equal("rows claimed twice without a new post", max(repeated, 0), 0)
    missing = LIVE_ROWS - result.claimed.keys() - result.sent_messages.keys() - result.damaged_rows - replaced
    findings.require_equal(
        "shares neither processed nor set aside, without a report", 0 if is_reported else len(missing), 0
    )
    hidden = "list after the check" in result.errors and not result.problems
    findings.require_equal("lists that failed although the integrity check found nothing", int(hidden), 0)
    if not running:
        other_responses = sum(
            response is not expected.responses[number] for number, response in result.responses.items()
        )
        findings.require_equal("shares enqueued twice", other_responses - len(replaced), 0)
        findings.require_equal("blocks that could not be applied", int("apply block" in result.errors), 0)
        findings.require_equal("integrity checks that failed", int("verify" in result.errors), 0)
        findings.require_equal("trees that differ from the chain's", int(not result.tree), 0)


def _replaced_rows(result: RunResult, expected: RunResult) -> set[int]:
    """Return the rows of live shares that were stored again, and then processed, because their rows were damaged."""
    processed = {queued.nullifier for queued in result.claimed.values()}
    processed |= {message.nullifier for message in result.sent_messages.values()}
    return {
        row_id_of(number)
        for number, response in result.responses.items()
        if (response, expected.responses[number]) == (EnqueueResult.QUEUED, EnqueueResult.DUPLICATE)
        and row_id_of(number) in LIVE_ROWS
        and create_numbered_share(number).nullifier in processed
    }


def _wrong_rows(result: RunResult, expected: RunResult) -> list[int]:
    """Return rows whose content differs from the intact file; new shares may use other rows."""
    wrong = [
        number
        for number, queued in result.claimed.items()
        if number in LIVE_ROWS and queued != expected.claimed.get(number)
    ]
    wrong += [number for number, queued in result.claimed.items() if queued.share not in EXPECTED_SHARES]
    written = {message.nullifier: message for message in expected.sent_messages.values()}
    return wrong + [
        row
        for row, message in result.sent_messages.items()
        if _normalize_message(message, row) != _normalize_message(written[message.nullifier], row)
    ]


def _normalize_message(message: SentReveal, row: int) -> SentReveal:
    """Ignore the flag that depends on the share's history; of a replaced row, the row's own data."""
    message = replace(message, is_first_message=True)
    if row in LIVE_ROWS:
        return message
    sent = message.row._replace(share_id=row, row_check=b"")
    return replace(message, row=sent, attempts=0, due_ms=0, first_due_ms=0, rank=0)


def _with_flipped_bit(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def _remove_database(copy: Path) -> None:
    for path in copy.parent.glob(f"{copy.name}*"):
        path.unlink()
