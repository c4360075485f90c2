"""Fixtures of admission: recorded payloads; fake chain, store and native checks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

import proofs
from helper.chain.chain_data import Anchor, Proposal, Round, RoundStatus
from helper.chain.commitment_trees import CommitmentTreeSync
from helper.chain.round_registry import RoundRegistry, RoundView
from helper.clock import Clock
from helper.core.share import Share, ShareKey, ShareState
from helper.ingest.validator import checked_share
from helper.store.models import EnqueueResult
from helper.store.shares import EnqueueOperation
from proofs import InvalidReason, InvalidShare, ReadShare
from tests.support.partial_store import PartialStore
from tests.support.payloads import as_read_share, decode_share

_LINES = (Path(__file__).parents[2] / "recorded" / "round" / "shares.jsonl").read_bytes().splitlines()
PAYLOADS: list[dict[str, Any]] = [json.loads(line) for line in _LINES]
"""The 16 recorded payloads."""
ROUND_ID = bytes.fromhex(PAYLOADS[0]["vote_round_id"])
POSITION = 2
END = 1_795_268_195
COMMITMENT = b"\x11" * 32
NULLIFIER = b"\x22" * 32


def create_payload(**changes: Any) -> dict[str, Any]:
    """The first recorded payload with fields replaced."""
    return {**PAYLOADS[0], **changes}


def create_body(**changes: Any) -> bytes:
    """The same payload as JSON."""
    return json.dumps(create_payload(**changes)).encode()


def make_round(status: RoundStatus = RoundStatus.ACTIVE, *, height: int = 50, round_id: bytes = ROUND_ID) -> Round:
    """The recorded round: proposals 1 and 2 with options 0 and 1."""
    proposals = (Proposal(1, (0, 1)), Proposal(2, (0, 1)))
    return Round(round_id, status, END, proposals, height)


class FakeClock(Clock):
    def __init__(self) -> None:
        self.time = 1_795_268_000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds


@dataclass
class FakeChain:
    """Rounds and trees; each sync runs the next of `syncs`.

    `served_leaves` are not agreed; `stored_leaves` are from the database.
    """

    clock: FakeClock
    rounds: dict[bytes, Round] = field(default_factory=lambda: {ROUND_ID: make_round()})
    leaves: dict[tuple[bytes, int], bytes] = field(default_factory=lambda: {(ROUND_ID, POSITION): COMMITMENT})
    syncs: list[Callable[[], None]] = field(default_factory=list)
    wait_timeouts: list[float] = field(default_factory=list)
    sync_seconds: float = 0.5
    served_leaves: dict[tuple[bytes, int], bytes] = field(default_factory=dict)
    stored_leaves: dict[tuple[bytes, int], bytes] = field(default_factory=dict)
    frozen_rounds: set[bytes] = field(default_factory=set)
    other_ends: dict[bytes, int] = field(default_factory=dict)
    status_reports: set[bytes] = field(default_factory=set)
    proposal_reports: set[bytes] = field(default_factory=set)

    @property
    def registry(self) -> RoundRegistry:
        return cast(RoundRegistry, self)

    @property
    def trees(self) -> CommitmentTreeSync:
        return cast(CommitmentTreeSync, self)

    def get(self, round_id: bytes) -> Round | None:
        return self.rounds.get(round_id)

    def agreed_rounds(self) -> list[Round]:
        return list(self.rounds.values())

    def is_agreed(self, round_id: bytes) -> bool:
        return round_id in self.rounds

    def active_rounds(self) -> list[Round]:
        return [known for known in self.rounds.values() if known.status is RoundStatus.ACTIVE]

    def leaf(self, round_id: bytes, position: int) -> bytes | None:
        return self.leaves.get((round_id, position))

    def round_paused(self, round_id: bytes) -> str | None:
        return "its end changed" if round_id in self.frozen_rounds else None

    def stored_leaf(self, round_id: bytes, position: int) -> bytes | None:
        return self.stored_leaves.get((round_id, position))

    def find_anchor(self, round_id: bytes, position: int, get_leaf: Callable[[], bytes]) -> Anchor | None:
        served = (round_id, position) in self.leaves or self.served_leaves.get((round_id, position)) == get_leaf()
        return self.anchor(round_id) if served else None

    def view(self, round_id: bytes) -> RoundView:
        return RoundView(
            self.rounds.get(round_id),
            is_status_agreed=round_id not in self.status_reports,
            are_proposals_agreed=round_id not in self.proposal_reports,
            is_end_agreed=round_id not in self.other_ends,
            latest_end=0,
        )

    def size(self, round_id: bytes) -> int:
        leaves = [*self.leaves, *self.served_leaves]
        return max((position + 1 for known, position in leaves if known == round_id), default=0)

    def anchor(self, round_id: bytes) -> Anchor | None:
        return Anchor(84, self.size(round_id), b"\x44" * 32) if self.size(round_id) else None

    async def wait_for_news(self, _round_id: bytes, _position: int, timeout: float) -> None:
        """Wait for the next sync, even one without news."""
        self.wait_timeouts.append(timeout)
        await asyncio.sleep(0)  # a pause is read once per iteration of the event loop
        if not self.syncs or self.sync_seconds > timeout:
            self.clock.time += timeout
            return
        self.clock.time += self.sync_seconds
        self.syncs.pop(0)()


@dataclass
class FakeStore(PartialStore):
    """Stores shares in a list and records its calls in order."""

    shares: list[Share] = field(default_factory=list)
    known_keys: set[ShareKey] = field(default_factory=set)
    spent: set[tuple[bytes, bytes]] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    error: Exception | None = None
    is_round_closed: bool = False

    async def is_known(self, key: ShareKey) -> bool:
        self.calls.append("known")
        return key in self.known_keys

    async def is_spent(self, round_id: bytes, nullifier: bytes) -> bool:
        self.calls.append("spent")
        return (round_id, nullifier) in self.spent

    async def run(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(op, EnqueueOperation)
        share, nullifier = op.share, op.nullifier
        self.calls.append("enqueue")
        if self.error is not None:
            raise self.error
        if share.key in self.known_keys or (share.round_id, nullifier) in self.spent:
            return EnqueueResult.DUPLICATE
        if self.is_round_closed:
            return EnqueueResult.CLOSED
        self.known_keys.add(share.key)
        self.shares.append(share)
        return EnqueueResult.QUEUED

    async def count_shares(self) -> dict[bytes, dict[ShareState, int]]:
        return {ROUND_ID: {ShareState.WAITING: len(self.shares)}} if self.shares else {}

    async def count_ready(self, *, now: float) -> dict[bytes, int]:
        return {ROUND_ID: sum(share.submit_at <= now for share in self.shares)}


_BY_FIELDS: frozenset[str] = frozenset(get_args(InvalidReason)[:10])
"""Reasons that do not depend on field elements, points and hashes."""


class FakeChecks:
    """Accepts every share whose fields are valid, without checking hashes, or raises `error`, or returns `invalid`."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.invalid: InvalidShare | None = None

    def read_shares(self, bodies: Sequence[bytes]) -> list[ReadShare | InvalidShare]:
        return [self._read(body) for body in bodies]

    def _read(self, body: bytes) -> ReadShare | InvalidShare:
        (result,) = proofs.read_shares([body])
        if isinstance(result, InvalidShare) and result.reason in _BY_FIELDS:
            return result
        if self.error is not None:
            raise self.error
        return self.invalid or as_read_share(decode_share(body), vote_commitment=COMMITMENT, nullifier=NULLIFIER)


def parse_share(body: bytes) -> Share:
    """The share of a body whose fields are valid, without checking hashes."""
    (result,) = FakeChecks().read_shares([body])
    return checked_share(result).share
