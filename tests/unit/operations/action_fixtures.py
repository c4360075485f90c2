"""Fixtures for operator actions: a fake round registry, and recorded shares with their nullifiers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import proofs
from helper.chain.round_registry import RoundRegistry, to_stored_round
from helper.core.share import Share
from helper.ingest.validator import checked_share
from helper.operations.operator_actions import OperatorActions
from helper.store import rounds
from helper.store.audit_log import Actor
from helper.store.sqlite.store import SqliteStore
from tests.support.clock import FakeClock
from tests.support.payloads import share_body
from tests.unit.ingest.admission_fixtures import END, PAYLOADS, create_body, make_round, parse_share

ANN = Actor(1000, "ann", "socket")
NOW = float(END - 1000)


@dataclass
class FakeRounds(RoundRegistry):
    """A fake round registry with rounds closed or frozen by the test."""

    closed: set[bytes] = field(default_factory=set)
    frozen_reasons: dict[bytes, str] = field(default_factory=dict)
    forgotten: list[bytes] = field(default_factory=list)

    def frozen_reason(self, round_id: bytes) -> str | None:
        return self.frozen_reasons.get(round_id)

    async def is_closed(self, round_id: bytes) -> bool:
        return round_id in self.closed

    def forget(self, round_id: bytes) -> None:
        self.forgotten.append(round_id)


class OperationsHarness:
    """Operations over a real store."""

    def __init__(self, path: Path, *, running: bool = True) -> None:
        self.clock = FakeClock(NOW)
        self.path = path
        self.store = SqliteStore(path, clock=self.clock)
        self.rounds = FakeRounds()
        self.wake_count = 0
        self.operations = OperatorActions(
            store=self.store,
            rounds=self.rounds if running else None,
            share_checks=proofs,
            wake=self._wake,
        )

    def _wake(self) -> None:
        self.wake_count += 1

    async def open(self) -> None:
        """Open the store and add the recorded round."""
        await self.store.open()
        await self.store.run(rounds.save_rounds, [to_stored_round(make_round())], NOW)


def recorded_share(index: int, **changes: object) -> Share:
    """A recorded share with valid hashes, unless changed."""
    return parse_share(create_body(**{**PAYLOADS[index], **changes}))


def nullifier_of(share: Share) -> bytes:
    (result,) = proofs.read_shares([share_body(share)])
    return checked_share(result).nullifier


async def stream_lines(lines: Iterable[bytes]) -> AsyncIterator[bytes]:
    for line in lines:
        yield line
