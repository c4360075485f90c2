"""The chain's state machine: transactions in, blocks out. No I/O and no clock.

`Chain.apply_block` is deterministic: the same transactions at the same heights and times give the same state. The
journal uses this to restore a chain after a kill. Proofs are verified earlier (`admission`); all other checks run both
there and here, in the real chain's order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import proofs
from devnet import tx as txs
from devnet.rounds import ACTIVE, FINALIZED, PENDING, STATUS_NAMES, TALLYING, Round

Event = tuple[str, dict[str, str]]
Totals = dict[bytes, dict[tuple[int, int], int]]
_NAMES = {
    txs.Reveal: "MsgRevealShare",
    txs.Delegation: "MsgDelegateVote",
    txs.Cast: "MsgCastVote",
    txs.CastBatch: "MsgCastVoteBatch",
    txs.Contribution: "MsgContributeDKG",
    txs.PartialDecryption: "MsgSubmitPartialDecryption",
    txs.Tally: "MsgSubmitTally",
    txs.EndRound: "MsgEndRound",
    txs.EndTimeChange: "MsgChangeEnd",
}


class RefusedError(Exception):
    """The chain refuses a transaction, with a code and log."""

    def __init__(self, code: int, log: str) -> None:
        super().__init__(log)
        self.code, self.log = code, log


@dataclass(frozen=True, slots=True)
class TxResult:
    """The result of a transaction in its block."""

    tx: bytes
    hash: bytes
    height: int
    index: int
    code: int
    log: str
    action: str
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A block with its results. Hashes are 32 bytes, `time_ns` is in Unix nanoseconds."""

    height: int
    time_ns: int
    hash: bytes
    last_hash: bytes
    app_hash: bytes
    last_results_hash: bytes
    results: tuple[TxResult, ...]
    events: tuple[Event, ...]

    @property
    def time(self) -> int:
        """The block's time in whole Unix seconds, as used in the chain's checks."""
        return self.time_ns // 1_000_000_000


class Chain:
    """State of the chain at its newest block."""

    def __init__(self, chain_id: str) -> None:
        self.chain_id = chain_id
        self.blocks: list[Block] = []
        self.rounds: dict[bytes, Round] = {}
        self.transactions: dict[bytes, TxResult] = {}
        self.reveals: dict[bytes, list[TxResult]] = {}

    @property
    def height(self) -> int:
        """The newest block's height, 0 before the first."""
        return len(self.blocks)

    @property
    def time(self) -> int:
        """The newest block's time in Unix seconds."""
        return self.blocks[-1].time if self.blocks else 0

    def check_reveal(self, reveal: txs.Reveal, *, time: int, height: int) -> Round:
        """Check a reveal except root and proof, in the real chain's order. Returns its round.

        Raises:
            RefusedError: a check failed.
        """
        round_ = self._require_votable_round(reveal.round_id, time, height)
        spent_at = round_.nullifiers.get(reveal.nullifier)
        if spent_at is not None and spent_at <= height:
            raise RefusedError(1, f"nullifier already spent: {reveal.nullifier.hex()}")
        options = round_.option_count(reveal.proposal_id)
        if not options:
            raise RefusedError(1, f"invalid proposal ID: {reveal.proposal_id}")
        if reveal.vote_decision >= options:
            raise RefusedError(1, f"invalid vote decision: {reveal.vote_decision} is not below {options}")
        return round_

    def anchor_root(self, round_: Round, anchor_height: int, max_height: int) -> bytes:
        """Return the root at an anchor height up to `max_height`; raises RefusedError if there is none."""
        block = round_.leaf_block_at(anchor_height)
        if block is None or block.height > max_height:
            raise RefusedError(1, f"invalid zero-knowledge proof: no commitment tree root at height {anchor_height}")
        return block.root

    def apply_block(self, time_ns: int, transactions: Sequence[bytes], totals: Totals | None = None) -> Block:
        """Produce the next block. `totals` are precomputed decryptions; missing ones are computed here."""
        height, time = self.height + 1, time_ns // 1_000_000_000
        last = self.blocks[-1] if self.blocks else None
        results = tuple(self._deliver_tx(raw, height, time, index) for index, raw in enumerate(transactions))
        events = tuple(self._end_block(height, time, totals or {}))
        data = hashlib.sha256(b"".join(result.hash for result in results)).digest()
        head = f"{self.chain_id}/{height}/{time_ns}/".encode() + (last.hash if last else b"") + data
        block = Block(
            height=height,
            time_ns=time_ns,
            hash=hashlib.sha256(head).digest(),
            last_hash=last.hash if last else b"",
            app_hash=hashlib.sha256((last.app_hash if last else b"") + data + repr(events).encode()).digest(),
            last_results_hash=_results_hash(last.results if last else ()),
            results=results,
            events=events,
        )
        self.blocks.append(block)
        return block

    def rounds_to_finalize(self) -> list[Round]:
        """The rounds whose tally the next block publishes."""
        height = self.height + 1
        return [round_ for round_ in self.rounds.values() if _is_tally_due(round_, height)]

    def _require_votable_round(self, round_id: bytes, time: int, height: int) -> Round:
        """Return the round if it accepts votes and reveals at this block time and height, else raise RefusedError."""
        round_ = self.rounds.get(round_id)
        status = round_.status_at(height) if round_ else None
        if round_ is None or status is None:
            raise RefusedError(3, "vote round not found")
        if status != ACTIVE:
            raise RefusedError(1, f"vote round is not active: status is {STATUS_NAMES[status]}")
        if time >= round_.vote_end_time:
            end = round_.vote_end_time
            raise RefusedError(1, f"vote round is not active: vote_end_time {end} <= block_time {time}")
        return round_

    def _deliver_tx(self, raw: bytes, height: int, time: int, index: int) -> TxResult:
        """Execute one transaction in the new block."""
        code, log, action = 0, "", "MsgCreateVotingSession"
        events: tuple[Event, ...] = ()
        try:
            message = txs.decode(raw)
            action = _NAMES.get(type(message), action)
            if isinstance(message, txs.CastBatch) and message.delegated_nullifiers:
                action = "MsgDelegateAndCastVoteBatch"
            if isinstance(message, txs.CeremonyMessage):
                events = (self._execute_ceremony(message),)
            else:
                events = self._execute(message, height, time)
        except RefusedError as refused:
            code, log = refused.code, refused.log
        except (txs.TxError, proofs.ProofsError) as error:
            code, log = 2, str(error)
        result = TxResult(raw, txs.tx_hash(raw), height, index, code, log, action, events)
        self.transactions.setdefault(result.hash, result)
        if action == "MsgRevealShare" and code == 0:
            self.reveals.setdefault(bytes.fromhex(events[0][1]["vote_round_id"]), []).append(result)
        return result

    def _execute(self, message: txs.UserMessage, height: int, time: int) -> tuple[Event, ...]:
        """Apply one message to the state. Returns its events."""
        match message:
            case txs.Reveal():
                round_ = self.check_reveal(message, time=time, height=height)
                round_.nullifiers[message.nullifier] = height
                round_.add_to_tally(message.proposal_id, message.vote_decision, message.enc_share)
                return (("reveal_share", reveal_attributes(message)),)
            case txs.Delegation(round_id, leaves, _):
                start = self._require_votable_round(round_id, time, height).append_leaves(height, leaves)
                index = str(start) if len(leaves) == 1 else f"{start}..{start + len(leaves) - 1}"
                values = {"vote_round_id": round_id.hex(), "leaf_index": index, "nullifier_count": "5"}
                return (("delegate_vote", values),)
            case txs.Cast() | txs.CastBatch():
                round_ = self._require_votable_round(message.round_id, time, height)
                start = round_.append_leaves(height, (message.authority_note, *message.vote_commitments))
                return (_vote_event(message, start),)
            case txs.EndRound(round_id):
                self._require_votable_round(round_id, time, height).is_ended_early = True
                return ()
            case txs.NewRound(fields):
                round_ = Round(fields, height, time)
                if round_.round_id in self.rounds:
                    raise RefusedError(1, "vote round already exists")
                self.rounds[round_.round_id] = round_
                return (("create_voting_session", {"vote_round_id": round_.round_id.hex()}),)
            case txs.EndTimeChange(round_id, end):
                self._require_votable_round(round_id, time, height).vote_end_time = end
                return (("change_vote_end_time", {"vote_round_id": round_id.hex(), "vote_end_time": str(end)}),)

    def proposer_transactions(self, totals: Totals) -> list[bytes]:
        """The transactions of key ceremonies and tallies that the proposer adds to the next block.

        Args:
            totals: the decrypted totals of the rounds whose tally is due.
        """
        height = self.height + 1
        transactions: list[bytes] = []
        for round_ in self.rounds.values():
            if round_.ceremony is None:
                continue
            if height == round_.created_at_height + 1:
                transactions += round_.contribution_transactions()
            if round_.status == TALLYING and height == round_.status_history[-1][0] + 1:
                transactions += round_.partial_transactions()
            if _is_tally_due(round_, height):
                transactions += round_.tally_transactions(totals[round_.round_id])
        return transactions

    def _execute_ceremony(self, message: txs.CeremonyMessage) -> Event:
        """Apply a message of a key ceremony or a tally. Only the proposer makes them, so they are not checked."""
        round_ = self.rounds.get(message.round_id)
        if round_ is None or round_.ceremony is None:
            raise RefusedError(3, "vote round not found")
        values = {"vote_round_id": message.round_id.hex()}
        if isinstance(message, txs.Contribution):
            return ("contribute_dkg", {**values, "validator_address": message.creator})
        values["creator"] = message.creator
        if isinstance(message, txs.Tally):
            return ("submit_tally", {**values, "finalized_entries": str(len(message.entries))})
        round_.partials[message.validator_index] = message.entries
        index, count = str(message.validator_index), str(len(message.entries))
        return ("submit_partial_decryption", {**values, "validator_index": index, "entry_count": count})

    def _end_block(self, height: int, time: int, totals: Totals) -> list[Event]:
        """Compute the block's roots and advance the rounds. Returns the block events."""
        events: list[Event] = []
        for round_ in self.rounds.values():
            root = round_.compute_block_root(height)
            if root is not None:
                values = {
                    "vote_round_id": round_.round_id.hex(),
                    "tree_root": root.hex(),
                    "block_height": str(height),
                }
                events.append(("commitment_tree_root", values))
            if height == min(round_.created_at_height + 1, round_.active_height):
                round_.dkg_at = time
            before, after = round_.status, self._next_status(round_, height, time)
            if after == before:
                continue
            if after == TALLYING:
                round_.tally_started_at = time
            elif after == FINALIZED:
                known = totals.get(round_.round_id)
                round_.totals = round_.decrypt_totals() if known is None else known
            round_.set_status(height, after)
            values = {
                "vote_round_id": round_.round_id.hex(),
                "old_status": STATUS_NAMES[before],
                "new_status": STATUS_NAMES[after],
            }
            events.append(("round_status_change", values))
        return events

    def _next_status(self, round_: Round, height: int, time: int) -> int:
        """The round's status after the block of this height and time."""
        if round_.status == PENDING and height >= round_.active_height:
            return ACTIVE
        if round_.status == ACTIVE and (round_.is_ended_early or time >= round_.vote_end_time):
            return TALLYING
        if _is_tally_due(round_, height):
            return FINALIZED
        return round_.status


def _is_tally_due(round_: Round, height: int) -> bool:
    """Return whether the block of this height publishes the round's tally."""
    return round_.status == TALLYING and height >= round_.status_history[-1][0] + round_.tally_blocks


def reveal_attributes(reveal: txs.Reveal) -> dict[str, str]:
    """Event attributes of a confirmed reveal."""
    return {
        "vote_round_id": reveal.round_id.hex(),
        "proposal_id": str(reveal.proposal_id),
        "vote_decision": str(reveal.vote_decision),
        "share_nullifier": reveal.nullifier.hex(),
    }


def _vote_event(vote: txs.Cast | txs.CastBatch, start: int) -> Event:
    """Event of a vote or a batch of votes whose first leaf is at index `start`."""
    count = len(vote.vote_commitments)
    if isinstance(vote, txs.Cast):
        index = ",".join(str(start + number) for number in range(count + 1))
        return ("cast_vote", {"vote_round_id": vote.round_id.hex(), "leaf_index": index})
    values = {
        "vote_round_id": vote.round_id.hex(),
        "batch_digest": vote.digest.hex(),
        "batch_size": str(count),
        "final_van_leaf_index": str(start),
        "vote_commitment_leaf_indices": ",".join(str(start + 1 + number) for number in range(count)),
        "proposal_ids": ",".join(map(str, vote.proposal_ids)),
        "van_nullifiers": ",".join(nullifier.hex() for nullifier in vote.van_nullifiers),
    }
    if not vote.delegated_nullifiers:
        return ("cast_vote_batch", values)
    return ("delegate_and_cast_vote_batch", {**values, "nullifier_count": str(vote.delegated_nullifiers)})


def _results_hash(results: Sequence[TxResult]) -> bytes:
    """A digest of a block's results. Without results it is the SHA-256 of the empty string, as on the real chain."""
    return hashlib.sha256(b"".join(bytes([r.code]) + r.hash for r in results)).digest()


def state_counts(chain: Chain) -> dict[str, Any]:
    """Statistics of the chain's state."""
    rounds = chain.rounds.values()
    return {
        "height": chain.height,
        "rounds": len(chain.rounds),
        "leaves": sum(len(round_.tree) for round_ in rounds),
        "reveals_counted": sum(len(round_.nullifiers) for round_ in rounds),
        "transactions": len(chain.transactions),
        "transactions_failed": sum(result.code != 0 for result in chain.transactions.values()),
    }
