"""How a wallet of library version 5.3.0 votes on the chain, through one base URL, which may be that of a gateway.

The rules leave open what follows an unknown outcome. This wallet sends the same transaction again in the same pass, and
then looks for its votes in the commitment tree.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from devnet.ballot import Ballot, seal_ballot
from devnet.clients.responses import (
    ChainOutcome,
    ChainReply,
    TxReply,
    TxState,
    classify_chain_response,
    classify_tx_response,
)
from devnet.clients.wallet_http import ATTEMPT_HEADER, Attempt, WalletHttp
from devnet.eras import BATCH_CAST
from devnet.vote_submission import batch_body, cast_vote_body, delegation_body

CHAIN_SECONDS: Final = 150.0
CHAIN_WAITS: Final = (2.0, 4.0)
"""Seconds between the attempts of a pass."""
MAX_CHAIN_BODY_BYTES: Final = 1 << 20
TX_SECONDS: Final = 10.0
TX_TRACK_SECONDS: Final = 90.0
TX_POLL_SECONDS: Final = 1.0
TREE_SECONDS: Final = 60.0
MAX_PAGE_BYTES: Final = 8 << 20


class WalletError(RuntimeError):
    """The vote could not be cast, or its fate is unknown."""


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """A round as its voter sees it: key, creation (given by the app) and end in Unix seconds."""

    round_id: bytes
    ea_pk: bytes
    created_at: int
    end: int


class ChainVoter:
    """Delegates and votes."""

    def __init__(self, http: WalletHttp, url: str, rng: random.Random) -> None:
        self._http = http
        self._url = url
        self._rng = rng

    async def load_round(self, round_id: bytes, *, created_at: int) -> RoundTimes:
        """Read the key and the end of a round."""
        response = await self._http.get(self._url, f"round/{round_id.hex()}", TX_SECONDS)
        fields = response.json_object().get("round", {})
        if response.status != 200 or not fields.get("ea_pk"):
            raise WalletError(f"the round cannot be read: {response}")
        return RoundTimes(round_id, base64.b64decode(fields["ea_pk"]), created_at, int(fields["vote_end_time"]))

    async def cast_votes(self, round_: RoundTimes, choices: Sequence[tuple[int, int, int]]) -> list[tuple[Ballot, int]]:
        """Delegate and vote. A choice is a proposal, an option and a weight.

        Several votes are cast in one batch if the chain has batches, otherwise one after another. Returns each
        vote with the position of its commitment.
        """
        ballots = [
            await asyncio.to_thread(
                seal_ballot,
                round_id=round_.round_id,
                ea_pk=round_.ea_pk,
                proposal_id=proposal,
                vote_decision=decision,
                weight=weight,
                rng=self._rng,
            )
            for proposal, decision, weight in choices
        ]
        delegation = delegation_body(round_.round_id)
        await self._transact("delegate-vote", delegation, [base64.b64decode(delegation["van_cmx"])], round_.round_id)
        positions = await self._cast_batch(round_.round_id, ballots) if len(ballots) > 1 else None
        if positions is None:
            positions = [await self._cast_vote(ballot) for ballot in ballots]
        return list(zip(ballots, positions, strict=True))

    async def post_transaction(self, route: str, body: Mapping[str, Any]) -> ChainReply:
        """POST a transaction: up to three attempts, which end with the first definite response."""
        content = json.dumps(body).encode()
        if len(content) > MAX_CHAIN_BODY_BYTES:
            raise WalletError(f"{route}: {len(content)} bytes are too many")
        replies: list[ChainReply] = []
        for wait in (*CHAIN_WAITS, None):
            token = secrets.token_hex(32)
            response = await self._http.post(self._url, route, content, CHAIN_SECONDS, {ATTEMPT_HEADER: token})
            reply = classify_chain_response(response, token, is_batch=route.endswith("-batch"))
            self._http.attempts.append(Attempt(route, self._url, response.status, reply.outcome))
            if reply.outcome not in (ChainOutcome.UNKNOWN, ChainOutcome.NOT_STARTED):
                # After an attempt that may have had its effect, a refusal may be caused by that effect.
                was_unknown = ChainOutcome.UNKNOWN in (earlier.outcome for earlier in replies)
                is_certain = reply.outcome is ChainOutcome.ACCEPTED or not was_unknown
                return reply if is_certain else ChainReply(ChainOutcome.UNKNOWN, log=reply.log)
            replies.append(reply)
            if wait is not None:
                await asyncio.sleep(wait)
        outcomes = {reply.outcome for reply in replies}
        return replies[-1] if len(outcomes) == 1 else ChainReply(ChainOutcome.UNKNOWN)

    async def _cast_vote(self, ballot: Ballot) -> int:
        height = await self._newest_root_height(ballot.round_id)
        body = cast_vote_body(ballot.round_id, ballot.commitment, proposal_id=ballot.proposal_id, anchor_height=height)
        (position,) = await self._transact("cast-vote", body, [ballot.commitment], ballot.round_id)
        return position

    async def _cast_batch(self, round_id: bytes, ballots: Sequence[Ballot]) -> list[int] | None:
        """Cast votes in one batch. Returns the positions of their commitments; None if the chain has no batches."""
        votes = [(ballot.commitment, ballot.proposal_id) for ballot in ballots]
        body = batch_body(round_id, votes, anchor_height=await self._newest_root_height(round_id))
        try:
            return await self._transact(BATCH_CAST, body, [commitment for commitment, _ in votes], round_id)
        except _NoRouteError:
            return None

    async def _transact(
        self, route: str, body: Mapping[str, Any], leaves: Sequence[bytes], round_id: bytes
    ) -> list[int]:
        """POST a transaction and wait until it is in a block. Returns the positions of its leaves."""
        reply = await self.post_transaction(route, body)
        if reply.outcome is ChainOutcome.NO_ROUTE:
            raise _NoRouteError(route)
        if reply.outcome is ChainOutcome.REFUSED:
            raise WalletError(f"{route}: refused: {reply.log}")
        if reply.outcome is ChainOutcome.ACCEPTED:
            included = await self._track(reply.tx_hash)
            if included.state is TxState.FAILED:
                raise WalletError(f"{route}: failed in its block: {included.log}")
            if included.state is TxState.SUCCEEDED and (positions := _event_positions(included)) is not None:
                return positions[-len(leaves) :]
        return await self._find_leaves(route, round_id, leaves)

    async def _track(self, tx_hash: str) -> TxReply:
        """Ask for a transaction until its result is known, for at most 90 s."""
        loop = asyncio.get_running_loop()
        end = loop.time() + TX_TRACK_SECONDS
        while True:
            reply = classify_tx_response(await self._http.get(self._url, f"tx/{tx_hash}", TX_SECONDS))
            is_known = reply.state in (TxState.SUCCEEDED, TxState.FAILED)
            if is_known or loop.time() + TX_POLL_SECONDS > end:
                return reply
            await asyncio.sleep(TX_POLL_SECONDS)

    async def _find_leaves(self, route: str, round_id: bytes, leaves: Sequence[bytes]) -> list[int]:
        """Find the positions of leaves in the commitment tree, page by page."""
        positions: dict[bytes, int] = {}
        first, last = 1, await self._newest_root_height(round_id)
        while first:
            path = f"commitment-tree/{round_id.hex()}/leaves?from_height={first}&to_height={last}"
            page = (await self._http.get(self._url, path, TREE_SECONDS, MAX_PAGE_BYTES)).json_object()
            for block in page.get("blocks", []):
                for number, leaf in enumerate(block["leaves"]):
                    positions[base64.b64decode(leaf)] = block.get("start_index", 0) + number
            first = page.get("next_from_height", 0)
        if not positions.keys() >= set(leaves):
            raise WalletError(f"{route}: not in the commitment tree")
        return [positions[leaf] for leaf in leaves]

    async def _newest_root_height(self, round_id: bytes) -> int:
        response = await self._http.get(self._url, f"commitment-tree/{round_id.hex()}/latest", TREE_SECONDS)
        height = response.json_object().get("tree", {}).get("height")
        if height is None:
            raise WalletError(f"the commitment tree cannot be read: {response}")
        return int(height)


class _NoRouteError(WalletError):
    """The chain has no such route."""


def _event_positions(included: TxReply) -> list[int] | None:
    """The positions of the leaves that a transaction appended, from its events; None if they are not in these."""
    batch, vote = included.events.get("cast_vote_batch"), included.events.get("cast_vote")
    try:
        if batch is not None:
            return [int(index) for index in batch["vote_commitment_leaf_indices"].split(",")]
        if vote is not None:
            return [int(index) for index in vote["leaf_index"].split(",")]
        return [int(included.events["delegate_vote"]["leaf_index"])]
    except (KeyError, ValueError):
        return None
