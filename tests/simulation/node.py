"""The chain's nodes as the service meets them, with their faults."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from hashlib import sha256
from typing import Any, TypeVar

from helper.chain.models import BlockHead
from helper.chain.node_http import Answer, Unanswered
from helper.chain.reveal_transaction import RevealMessage
from helper.errors import ChainAnswerError, ChainUnavailable
from tests.simulation.chain import SimChain
from tests.simulation.event_log import Story

T = TypeVar("T")

TIMEOUT = 10.0
BAD_GATEWAY = (502, {"error": "no consensus engine"})


class Fault(Enum):
    """What may be wrong with a node."""

    AWAY = "away"
    ERRORS = "answers 5xx"
    SLOW = "slow"
    STALE = "stands still"
    LAGS = "is some blocks behind, steadily"
    SYNCING = "catches up"
    RESET = "began anew"
    OTHER_CHAIN = "serves another chain"
    WRONG_ROOT = "tells a wrong root"
    NO_ROUND = "does not know the rounds"
    PENDING = "calls the rounds pending"
    LOST_REPLY = "loses its replies"
    BAD_GATEWAY = "502 after sending"
    SWALLOWS = "accepts and forgets"
    FAILS = "its reveals fail in the block"
    NO_ANCHOR = "lacks the anchor"
    BAD_PROOF = "refuses good proofs"
    PERMANENT = "refuses good messages"
    BUSY = "turns reveals away"
    NONSENSE = "answers HTML"
    NO_RPC = "its RPC is away"
    PRUNED = "keeps few blocks"


LIES = frozenset(
    {Fault.OTHER_CHAIN, Fault.RESET, Fault.WRONG_ROOT, Fault.NO_ROUND, Fault.PENDING, Fault.BAD_PROOF, Fault.PERMANENT}
)
"""Faults of a node that says what is not so."""


WORDS: Mapping[Fault | None, str] = {
    Fault.OTHER_CHAIN: "vote round not found",
    Fault.NO_ROUND: "vote round not found",
    Fault.PENDING: "vote round is not active: PENDING",
}
"""With what words a node that has one of these faults refuses every reveal."""


class SimNode:
    """One node.

    Attributes:
        fault: what is wrong with it now.
        on_broadcast: told of each reveal that reaches it, before it looks at it: (message, node).
        on_lie: told of each refusal for good that is a lie.
        on_refusal: told of each message that a new proof may follow at once: its proof was refused, or itself for good.
    """

    def __init__(self, name: str, chain: SimChain, dice: random.Random, story: Story) -> None:
        self.name = name
        self.chain = chain
        self.dice = dice
        self._story = story
        self.fault: Fault | None = None
        self._since = 0
        self._began = 0.0
        self._lag = 0
        self.on_broadcast: Callable[[RevealMessage, SimNode], None] = lambda message, node: None
        self.on_lie: Callable[[RevealMessage], None] = lambda message: None
        self.on_refusal: Callable[[RevealMessage], None] = lambda message: None

    def set_fault(self, fault: Fault | None) -> None:
        """Something goes wrong, or is well again."""
        self.fault = fault
        self._since = self.chain.height
        self._began = asyncio.get_running_loop().time()
        self._lag = self.dice.choice((1, 2, 3)) if fault is Fault.LAGS else 0

    @property
    def height(self) -> int:
        """The newest block that it has."""
        newest = self.chain.height
        if self.fault is Fault.STALE:
            return self._since
        if self.fault is Fault.LAGS:
            return max(1, newest - self._lag)
        if self.fault is Fault.SYNCING:
            return max(1, min(newest, self._since - 40 + int(asyncio.get_running_loop().time() - self._began)))
        if self.fault is Fault.RESET:
            return min(newest, 1 + int((asyncio.get_running_loop().time() - self._began) / 5))
        return newest

    async def reach(self, *, rpc: bool = False) -> None:
        """What happens to any question."""
        fault = self.fault
        if fault is Fault.AWAY or (rpc and fault is Fault.NO_RPC):
            await asyncio.sleep(self.dice.choice((0, 0, 3.0)))
            raise ChainUnavailable("unreachable (ConnectError)")
        if fault is Fault.ERRORS and self.dice.random() < 0.7:
            await asyncio.sleep(0)
            if self.dice.random() < 0.5:
                raise ChainUnavailable("HTTP 503")
            raise ChainAnswerError("HTTP 500")
        if fault is Fault.NONSENSE and self.dice.random() < 0.7:
            raise ChainAnswerError("not JSON")
        if fault is Fault.SLOW:
            await self._crawl()
            return
        luck = self.dice.random()
        if luck < 0.5:
            await asyncio.sleep(0 if luck < 0.35 else luck - 0.35)

    async def _crawl(self) -> None:
        wait = self.dice.random() * 14
        await asyncio.sleep(min(wait, TIMEOUT))
        if wait >= TIMEOUT:
            raise Unanswered("no answer within 10 s", sent=True)

    def head(self) -> BlockHead:
        """Its newest block."""
        head = self.chain.head(self.height)
        if self.fault is Fault.OTHER_CHAIN:
            return replace(head, chain_id="other-7")
        if self.fault is Fault.RESET:
            return replace(head, time=self.chain.head(self.chain.height).time)
        return head

    def knows(self, round_id: bytes) -> bool:
        """Whether it knows a round."""
        one = self.chain.rounds.get(round_id)
        return one is not None and one.created <= self.height and self.fault not in (Fault.OTHER_CHAIN, Fault.NO_ROUND)

    # A reveal

    async def take(self, message: RevealMessage) -> Answer:
        """`POST reveal-share`."""
        fault = self.fault
        if fault is Fault.AWAY:
            await asyncio.sleep(0)
            raise Unanswered("unreachable (ConnectError)", sent=False)
        self.on_broadcast(message, self)
        if fault is Fault.SLOW:
            return await self._take_slowly(message)
        await asyncio.sleep(0 if self.dice.random() < 0.5 else self.dice.random() * 0.3)
        if fault is Fault.LOST_REPLY and self.dice.random() < 0.7:
            self._check(message)
            raise Unanswered("connection failed (ReadError)", sent=True)
        if fault is Fault.BAD_GATEWAY and self.dice.random() < 0.8:
            if self.dice.random() < 0.5:
                self._check(message)
            return _answer(*BAD_GATEWAY)
        if fault is Fault.NONSENSE and self.dice.random() < 0.7:
            if self.dice.random() < 0.5:
                self._check(message)
            return Answer(self.dice.choice((200, 500)), b"<html>")
        status, body = self._odd(message) or self._check(message)
        return _answer(status, body)

    async def _take_slowly(self, message: RevealMessage) -> Answer:
        taken = self.dice.random() < 0.5
        if taken:
            answer = self._check(message)
        await self._crawl()
        return _answer(*(answer if taken else self._check(message)))

    def _odd(self, message: RevealMessage) -> tuple[int, dict[str, Any]] | None:
        """An answer that comes of its fault."""
        fault, dice = self.fault, self.dice
        if fault is Fault.ERRORS and dice.random() < 0.7:
            return dice.choice(((500, {"error": "internal"}), (503, {"error": "keys are warming up"})))
        if fault is Fault.BUSY:
            busy = (422, {"code": 20, "log": "mempool is full: 5000 txs"})
            return dice.choice((busy, (429, {"error": "too many requests"}), (503, {})))
        if fault in WORDS:
            return _refusal(1, WORDS[fault])
        if fault is Fault.NO_ANCHOR:
            missing = f"no commitment tree root at height {message.anchor_height}"
            return _refusal(5, f"invalid zero-knowledge proof: {missing}")
        return self._lie(message) if fault in (Fault.BAD_PROOF, Fault.PERMANENT) else None

    def _lie(self, message: RevealMessage) -> tuple[int, dict[str, Any]]:
        """A refusal of what is good."""
        self.on_refusal(message)
        if self.fault is Fault.BAD_PROOF:
            return _refusal(1, "invalid zero-knowledge proof: verification failed")
        self.on_lie(message)
        return _refusal(9, "invalid message field: enc_share")

    def _check(self, message: RevealMessage) -> tuple[int, dict[str, Any]]:
        """CheckTx, and into the mempool."""
        height = self.height
        refusal = self.chain.judge(message, height, time=self.chain.head(height).time)
        if refusal is not None:
            if "verification failed" in refusal[1]:
                self.on_refusal(message)
            return _refusal(*refusal)
        tx = message.to_tx()
        accepted = (200, {"code": 0, "tx_hash": sha256(tx).hexdigest().upper()})
        if tx in self.chain.mempool and self.dice.random() < 0.5:
            return 200, {"code": 0, "tx_hash": "", "log": "tx pending in mempool (duplicate submission)"}
        if self.fault is Fault.SWALLOWS:
            return accepted
        code = 11 if self.fault is Fault.FAILS and self.dice.random() < 0.7 else None
        self.chain.submit(tx, message, code=code)
        return accepted


def _refusal(code: int, log: str) -> tuple[int, dict[str, Any]]:
    return 422, {"code": code, "log": log, "tx_hash": ""}


def _answer(status: int, body: dict[str, Any]) -> Answer:
    return Answer(status, json.dumps(body).encode())
