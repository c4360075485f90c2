"""Fixtures for operator actions: a fake round authority, and recorded shares with their nullifiers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import proofs
from helper.core.share import Share
from helper.ingest.validator import checked_share
from helper.operations.actions import Operations
from helper.store.action_rows import Actor
from helper.store.sqlite.store import SqliteStore
from tests.support.clock import FakeClock
from tests.support.payloads import share_body
from tests.unit.ingest.admission_fixtures import END, PAYLOADS, body, make_round, parse_share

ANN = Actor(1000, "ann", "socket")
NOW = float(END - 1000)


@dataclass
class FakeJudge:
    """A fake round authority with rounds closed or frozen by the test."""

    closed: set[bytes] = field(default_factory=set)
    odd: dict[bytes, str] = field(default_factory=dict)
    forgotten: list[bytes] = field(default_factory=list)

    def frozen(self, round_id: bytes) -> str | None:
        return self.odd.get(round_id)

    async def is_closed(self, round_id: bytes) -> bool:
        return round_id in self.closed

    def forget(self, round_id: bytes) -> None:
        self.forgotten.append(round_id)


class Desk:
    """Operations over a real store."""

    def __init__(self, path: Path, *, running: bool = True) -> None:
        self.clock = FakeClock(NOW)
        self.path = path
        self.store = SqliteStore(path, clock=self.clock)
        self.judge = FakeJudge()
        self.woken = 0
        self.operations = Operations(
            store=self.store, judge=self.judge, checks=proofs, wake=self._wake, running=running
        )

    def _wake(self) -> None:
        self.woken += 1

    async def open(self) -> None:
        """Open the store and add the recorded round."""
        await self.store.open()
        await self.store.save_rounds([make_round()], NOW)


def recorded(index: int, **changes: object) -> Share:
    """A recorded share with valid hashes, unless changed."""
    return parse_share(body(**{**PAYLOADS[index], **changes}))


def nullifier_of(share: Share) -> bytes:
    """Compute a share's nullifier."""
    (result,) = proofs.read_shares([share_body(share)])
    return checked_share(result).nullifier


async def each(lines: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Lines as a stream."""
    for line in lines:
        yield line
