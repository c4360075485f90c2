"""One flipped bit in each of 1,000 copies of a database, and a helper's whole life on each copy.

The database has a row in every table: shares that wait, are due later, were taken up, sent, failed and confirmed, with
messages, history, a round, its tree and its spent nullifiers. Bits are flipped anywhere in the file, every second one
near the beginning of a page, where SQLite keeps what a page is made of; three of four before the helper starts, the
others under a helper that runs. On each copy the real store opens, recovers, follows the tree of a node, hands out what
is due (and a moment before, when nothing is), reads back what was sent, lists everything for operators, takes failed
shares up again, takes new shares in and old ones again, runs the background check, and sees the chain count every
share. What came of it is compared with the same life on the file as it was.

What must hold: nothing is handed out before its time or otherwise than as it was written. Every share that should have
been handed out was, or is set aside and named; or the start was refused with the way to restore; or the store or its
background check said that the database is damaged. No error that is none of the house. A bit that flipped before the
start, and does not keep the helper from starting, keeps it from nothing else: blocks are taken in, the tree is the
chain's, and no share is taken twice. A share that can not be read hides no other from the operators' list. Every life
comes to its end.

The planted bug that it caught: `load` in helper/store/operations/transitions.py took a row for sound without looking
at its check. The short form printed "shares or messages handed out that are not as written: 2 (= 0)".
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import structlog

from helper.store.rows import SentReveal
from tests.campaign import corrupted_database
from tests.campaign.campaign import Campaign, Findings, Setting
from tests.campaign.corrupted_database import Life, live, row_of, share

LONGEST = 120
"""Seconds of a life: it is over in one or two."""
PAGE = 4096
HEAD = 64
"""Bytes at the beginning of a page that every second bit is flipped in."""
WORKED_ON = {
    row_of(one)
    for part in (
        corrupted_database.WAITING,
        corrupted_database.HELD,
        corrupted_database.TAKEN_UP,
        corrupted_database.FAILED,
    )
    for one in part
}
"""The rows that a whole life hands out for a proof."""
LIVE = WORKED_ON | {row_of(number) for number in corrupted_database.SENT}
"""The rows whose shares wait for something; a confirmed share's row is taken by a new share."""
SHARES = {share(number).share for number in (*corrupted_database.ALL, *corrupted_database.NEW)}


async def run(setting: Setting) -> Findings:
    """Make the copies, live on each, and compare."""
    findings, dice = Findings(), setting.dice("bits")
    base = setting.folder / "base.db"
    kinds: Counter[str] = Counter()
    with structlog.testing.capture_logs():
        await corrupted_database.make(base)
        data = base.read_bytes()
        whole = await live(Path(shutil.copy(base, setting.folder / "whole.db")))
        assert whole.claimed.keys() >= WORKED_ON, "the life is not a whole one"
        assert what_came(whole, whole) == "harmless", whole
        for number in range(setting.scale(1000, 60)):
            at, bit = dice.randrange(len(data)), dice.randrange(8)
            if number % 2:
                at = at - at % PAGE + dice.randrange(HEAD)
            copy = setting.folder / f"{number}.db"
            running = number % 4 == 3
            copy.write_bytes(data if running else _flipped(data, at, bit))
            life = None
            with suppress(TimeoutError):
                async with asyncio.timeout(LONGEST):
                    life = await live(copy, (at, bit) if running else None)
            findings.exactly("lives that do not come to an end", int(life is None), 0)
            if life is None:
                findings.figure("the first without an end", f"bit {bit} of byte {at}, running: {running}")
                break
            kinds[what_came(life, whole)] += 1
            judge(findings, life, whole, running=running)
            if findings.broken and "the first that broke a promise" not in findings.figures:
                told = f"{life.refused} {life.errors} {life.problems} {life.unhandled}"
                findings.figure("the first that broke a promise", f"bit {bit} of byte {at}, running: {running}; {told}")
            _remove(copy)
    for name, times in sorted(kinds.items()):
        findings.figure(f"copies: {name}", times)
    return findings


def what_came(life: Life, whole: Life) -> str:
    """What a flipped bit came to, the gravest first."""
    if life.refused is not None:
        return "refused at the start"
    if life.errors:
        return "operations refused, with an error that says why"
    if life.aside:
        return "rows set aside and named, the rest went on"
    if life.problems or life.mended:
        return "damage found by the background check"
    same = (life.claimed, life.sent, life.listed, life.counts) == (
        whole.claimed,
        whole.sent,
        whole.listed,
        whole.counts,
    )
    return "harmless" if same else "another difference"


def judge(findings: Findings, life: Life, whole: Life, *, running: bool) -> None:
    """Hold one life against that on the whole file."""
    findings.exactly("errors that are none of the house", len(life.unhandled), 0)
    if life.refused is not None:
        findings.exactly("starts refused without the way to restore", int("restore" not in life.refused[1]), 0)
        return
    findings.exactly("shares handed out before their time", life.early, 0)
    findings.exactly("shares or messages handed out that are not as written", len(_wrong(life, whole)), 0)
    told = bool(life.problems) or any("damaged" in text for text in life.errors.values())
    missing = LIVE - life.claimed.keys() - life.sent.keys() - life.aside
    findings.exactly("shares neither acted on nor set aside, and nothing said", 0 if told else len(missing), 0)
    hidden = "list" in life.errors and not {"claim", "counts"} & life.errors.keys()
    findings.exactly("lists that failed while the queue was worked", int(hidden), 0)
    if not running:
        again = sum(answer is not whole.answers[number] for number, answer in life.answers.items())
        findings.exactly("shares taken twice", again, 0)
        findings.exactly("blocks that could not be taken in", int("apply block" in life.errors), 0)
        findings.exactly("background checks that failed", int("verify" in life.errors), 0)
        findings.exactly("trees that are not the chain's", int(not life.tree), 0)


def _wrong(life: Life, whole: Life) -> list[int]:
    """Rows that were handed out otherwise than on the whole file; new shares may stand in other rows."""
    wrong = [number for number, one in life.claimed.items() if number in LIVE and one != whole.claimed.get(number)]
    wrong += [number for number, one in life.claimed.items() if one.share not in SHARES]
    return wrong + [number for number, one in life.sent.items() if _sent(one) != _sent(whole.sent[number])]


def _sent(one: SentReveal) -> SentReveal:
    """A message without what is only told in the counters: whether it was the first try goes by the share's history."""
    return replace(one, first_try=True, first_message=True)


def _flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def _remove(copy: Path) -> None:
    for path in copy.parent.glob(f"{copy.name}*"):
        path.unlink()


CAMPAIGN = Campaign("corruption", run)
