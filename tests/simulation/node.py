"""Simulated chain nodes with injectable faults."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from hashlib import sha256
from typing import Any, TypeVar

from helper.chain.chain_data import BlockHead
from helper.chain.node_http import SEND_TIMEOUT_SECONDS, NodeResponse, NoResponse
from helper.chain.reveal_transaction import RevealMessage
from helper.errors import ChainResponseError, ChainUnavailable
from tests.simulation.chain import BAD_PROOF_LOG, SimChain
from tests.simulation.event_log import EventLog
from tests.simulation.liar import Liar

T = TypeVar("T")

TIMEOUT_SECONDS = 10.0
BAD_GATEWAY_RESPONSE = (502, {"error": "no consensus engine"})


class NodeFault(Enum):
    UNREACHABLE = "unreachable"
    ERRORS = "responds 5xx"
    SLOW = "slow"
    STOPPED = "accepts requests, and responds after it continues"
    STALE = "stale"
    LAGGING = "steadily some blocks behind"
    SYNCING = "syncing"
    RESET = "reset to height 1"
    OTHER_CHAIN = "serves another chain"
    WRONG_ROOT = "reports a wrong root"
    NO_ROUND = "rounds not found"
    PENDING = "reports rounds as PENDING"
    LOST_REPLY = "loses replies"
    BAD_GATEWAY = "502 after sending"
    DROPS_REVEALS = "accepts reveals without including them"
    REVEALS_FAIL = "reveals fail in the block"
    NO_ANCHOR = "lacks the anchor"
    BAD_PROOF = "rejects valid proofs"
    REJECTS_MESSAGES = "rejects valid messages"
    REJECTS_BUSY = "mempool is full"
    INVALID_RESPONSE = "responds with HTML"
    NO_RPC = "RPC unreachable"
    PRUNED = "keeps few blocks"
    FAR_BEHIND = "far behind"
    MINUTES_BEHIND = "minutes behind"
    NO_INDEX = "has no transaction index"


SCRIPTED_FAULTS = frozenset({NodeFault.FAR_BEHIND, NodeFault.MINUTES_BEHIND, NodeFault.NO_INDEX})
"""Faults that no seed draws without a liar."""
SECONDS_BEHIND: Mapping[NodeFault | None, float] = {NodeFault.FAR_BEHIND: 55.0, NodeFault.MINUTES_BEHIND: 125.0}
"""Seconds by which a node is behind, once the chain is that much further than at the fault's start."""

FALSE_HEIGHT_FAULTS = frozenset({NodeFault.STALE, NodeFault.LAGGING, NodeFault.FAR_BEHIND, NodeFault.RESET})
"""Faults of a node that is in sync, for a minute or longer, with other heights than the chain's."""
FALSE_RESPONSE_FAULTS = frozenset(
    {
        NodeFault.OTHER_CHAIN,
        NodeFault.RESET,
        NodeFault.WRONG_ROOT,
        NodeFault.NO_ROUND,
        NodeFault.PENDING,
        NodeFault.BAD_PROOF,
        NodeFault.REJECTS_MESSAGES,
    }
)
"""Faults in which a node returns false information."""


REFUSAL_LOGS: Mapping[NodeFault | None, str] = {
    NodeFault.OTHER_CHAIN: "vote round not found",
    NodeFault.NO_ROUND: "vote round not found",
    NodeFault.PENDING: "vote round is not active: PENDING",
}
"""Text with which a node with one of these faults refuses every reveal."""


class SimNode:
    """A simulated node.

    Attributes:
        send_error_rate: fraction of reveals to which it responds 502 without processing them.
        on_broadcast: called with (message, node) for each reveal that arrives, before it is checked.
        on_false_refusal: called for each permanent refusal of a valid message.
        on_refusal: called for each message that may be proven again immediately: its proof was refused, or the message
            permanently.
    """

    def __init__(self, name: str, chain: SimChain, rng: random.Random, event_log: EventLog) -> None:
        self.name = name
        self.chain = chain
        self.rng = rng
        self._event_log = event_log
        self.fault: NodeFault | None = None
        self.liar = Liar(chain)
        self.send_error_rate = 0.0
        self._fault_height = 0
        self._fault_started_at = 0.0
        self._running = asyncio.Event()
        self._running.set()
        self._lag = 0
        self.on_broadcast: Callable[[RevealMessage, SimNode], None] = lambda message, node: None
        self.on_false_refusal: Callable[[RevealMessage], None] = lambda message: None
        self.on_refusal: Callable[[RevealMessage], None] = lambda message: None

    def set_fault(self, fault: NodeFault | None) -> None:
        self.fault = fault
        self._fault_height = self.chain.height
        self._fault_started_at = asyncio.get_running_loop().time()
        self._lag = self.rng.choice((1, 2, 3)) if fault is NodeFault.LAGGING else 0
        if fault is NodeFault.STOPPED:
            self._running.clear()
        else:
            self._running.set()

    @property
    def height(self) -> int:
        """Height of the newest block of this node."""
        newest = self.chain.height
        if self.fault is NodeFault.STALE:
            return self._fault_height
        if self.fault is NodeFault.LAGGING:
            return max(1, newest - self._lag)
        if self.fault in SECONDS_BEHIND:
            limit, first = self.chain.now() - SECONDS_BEHIND[self.fault], self._fault_height
            return next((height for height in range(newest, first, -1) if self.chain.head(height).time <= limit), first)
        if self.fault is NodeFault.SYNCING:
            return max(
                1,
                min(newest, self._fault_height - 40 + int(asyncio.get_running_loop().time() - self._fault_started_at)),
            )
        if self.fault is NodeFault.RESET:
            return min(newest, 1 + int((asyncio.get_running_loop().time() - self._fault_started_at) / 5))
        return newest

    async def simulate_request(self, *, rpc: bool = False) -> None:
        """Simulate the latency and faults of any request."""
        fault = self.fault
        if fault is NodeFault.UNREACHABLE or (rpc and fault is NodeFault.NO_RPC):
            await asyncio.sleep(self.rng.choice((0, 0, 3.0)))
            raise ChainUnavailable("unreachable (ConnectError)")
        if fault is NodeFault.ERRORS and self.rng.random() < 0.7:
            await asyncio.sleep(0)
            if self.rng.random() < 0.5:
                raise ChainUnavailable("HTTP 503")
            raise ChainResponseError("HTTP 500")
        if fault is NodeFault.INVALID_RESPONSE and self.rng.random() < 0.7:
            raise ChainResponseError("not JSON")
        if fault is NodeFault.SLOW:
            await self._delay_response(self.rng.random() * 14, self.rng.choice((1.0, TIMEOUT_SECONDS)))
            return
        if fault is NodeFault.STOPPED:
            await self._wait_until_running(self.rng.choice((1.0, TIMEOUT_SECONDS)))
            return
        draw = self.rng.random()
        if draw < 0.5:
            await asyncio.sleep(0 if draw < 0.35 else draw - 0.35)

    async def _delay_response(self, wait: float, timeout: float) -> None:
        """Respond after `wait` seconds, if the helper waits that long."""
        await asyncio.sleep(min(wait, timeout))
        if wait >= timeout:
            raise NoResponse(f"no response within {timeout:g} s", sent=True)

    async def _wait_until_running(self, timeout: float) -> None:
        """Respond once the node continues, if the helper waits that long."""
        try:
            async with asyncio.timeout(timeout):
                await self._running.wait()
        except TimeoutError:
            raise NoResponse(f"no response within {timeout:g} s", sent=True) from None

    def served_head(self) -> BlockHead:
        head = self.chain.head(self.height)
        if self.fault is NodeFault.OTHER_CHAIN:
            return replace(head, chain_id="other-7")
        if self.fault is NodeFault.RESET:
            return replace(head, time=self.chain.head(self.chain.height).time)
        return self.liar.head(head)

    def has_round(self, round_id: bytes) -> bool:
        round_ = self.chain.rounds.get(round_id)
        return (
            round_ is not None
            and round_.created_height <= self.height
            and self.fault not in (NodeFault.OTHER_CHAIN, NodeFault.NO_ROUND)
        )

    # Reveals

    async def connect_to_send(self) -> None:
        """Accept the connection of a reveal. No byte of the reveal has left before."""
        if self.fault is NodeFault.UNREACHABLE:
            await asyncio.sleep(0)
            raise NoResponse("unreachable (ConnectError)", sent=False)
        if self.fault in (NodeFault.SLOW, NodeFault.STOPPED) and self.rng.random() < 0.3:
            await asyncio.sleep(self.rng.random() * 6)  # TCP and TLS handshakes

    async def receive_reveal(self, message: RevealMessage) -> NodeResponse:
        """Handle `POST reveal-share`."""
        self.on_broadcast(message, self)
        fault = self.fault
        if fault is NodeFault.SLOW:
            return await self._receive_slowly(message)
        if fault is NodeFault.STOPPED:
            await self._wait_until_running(SEND_TIMEOUT_SECONDS)
            return _to_answer(*self._check_and_submit(message))
        await asyncio.sleep(0 if self.rng.random() < 0.5 else self.rng.random() * 0.3)
        if self.send_error_rate and self.rng.random() < self.send_error_rate:
            return _to_answer(*BAD_GATEWAY_RESPONSE)
        if fault is NodeFault.LOST_REPLY and self.rng.random() < 0.7:
            self._check_and_submit(message)
            raise NoResponse("connection failed (ReadError)", sent=True)
        if fault is NodeFault.BAD_GATEWAY and self.rng.random() < 0.8:
            if self.rng.random() < 0.5:
                self._check_and_submit(message)
            return _to_answer(*BAD_GATEWAY_RESPONSE)
        if fault is NodeFault.INVALID_RESPONSE and self.rng.random() < 0.7:
            if self.rng.random() < 0.5:
                self._check_and_submit(message)
            return NodeResponse(self.rng.choice((200, 500)), b"<html>")
        lie = self.liar.answer_reveal(message, self.height)
        if lie is not None and lie[1].get("log") == BAD_PROOF_LOG:
            self.on_refusal(message)
        status, body = lie or self._faulty_response(message) or self._check_and_submit(message)
        return _to_answer(status, body)

    async def _receive_slowly(self, message: RevealMessage) -> NodeResponse:
        is_checked_first = self.rng.random() < 0.5
        if is_checked_first:
            response = self._check_and_submit(message)
        await self._delay_response(self.rng.random() * self.rng.choice((4, 14, 90)), SEND_TIMEOUT_SECONDS)
        return _to_answer(*(response if is_checked_first else self._check_and_submit(message)))

    def _faulty_response(self, message: RevealMessage) -> tuple[int, dict[str, Any]] | None:
        """Return the response caused by the active fault, or None."""
        fault, rng = self.fault, self.rng
        if fault is NodeFault.ERRORS and rng.random() < 0.7:
            return rng.choice(((500, {"error": "internal"}), (503, {"error": "keys are warming up"})))
        if fault is NodeFault.REJECTS_BUSY:
            busy = (422, {"code": 20, "log": "mempool is full: 5000 txs"})
            return rng.choice((busy, (429, {"error": "too many requests"}), (503, {})))
        if fault in REFUSAL_LOGS:
            return _refusal_response(1, REFUSAL_LOGS[fault])
        if fault is NodeFault.NO_ANCHOR:
            missing = f"no commitment tree root at height {message.anchor_height}"
            return _refusal_response(5, f"invalid zero-knowledge proof: {missing}")
        return self._refuse_falsely(message) if fault in (NodeFault.BAD_PROOF, NodeFault.REJECTS_MESSAGES) else None

    def _refuse_falsely(self, message: RevealMessage) -> tuple[int, dict[str, Any]]:
        self.on_refusal(message)
        if self.fault is NodeFault.BAD_PROOF:
            return _refusal_response(1, BAD_PROOF_LOG)
        self.on_false_refusal(message)
        return _refusal_response(9, "invalid message field: enc_share")

    def _check_and_submit(self, message: RevealMessage) -> tuple[int, dict[str, Any]]:
        height = self.height
        refusal = self.chain.check_reveal(message, height, time=self.chain.head(height).time)
        if refusal is not None:
            if refusal[1] == BAD_PROOF_LOG:
                self.on_refusal(message)
            return _refusal_response(*refusal)
        tx = message.to_tx()
        accepted = (200, {"code": 0, "tx_hash": sha256(tx).hexdigest().upper()})
        if tx in self.chain.mempool and self.rng.random() < 0.5:
            return 200, {"code": 0, "tx_hash": "", "log": "tx pending in mempool (duplicate submission)"}
        if self.fault is NodeFault.DROPS_REVEALS:
            return accepted
        code = 11 if self.fault is NodeFault.REVEALS_FAIL and self.rng.random() < 0.7 else None
        self.chain.submit_transaction(tx, message, code=code)
        return accepted


def _refusal_response(code: int, log: str) -> tuple[int, dict[str, Any]]:
    return 422, {"code": code, "log": log, "tx_hash": ""}


def _to_answer(status: int, body: dict[str, Any]) -> NodeResponse:
    return NodeResponse(status, json.dumps(body).encode())
