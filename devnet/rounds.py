"""A voting round: status from PENDING to FINALIZED, commitment tree, spent nullifiers and tally.

Heights are block heights; times are Unix seconds. State changes only in blocks and is stored as (height, value) pairs,
so that a node that lags behind can serve the round as it was.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import proofs
from devnet import tx as txs
from devnet.ceremony import Ceremony, address
from devnet.gojson import b64, omit_zero

ACTIVE, TALLYING, FINALIZED, PENDING = 1, 2, 3, 4
STATUS_NAMES = {
    ACTIVE: "SESSION_STATUS_ACTIVE",
    TALLYING: "SESSION_STATUS_TALLYING",
    FINALIZED: "SESSION_STATUS_FINALIZED",
    PENDING: "SESSION_STATUS_PENDING",
}
_MAX_TOTAL = 2**32
VALIDATOR_ADDRESS = "svvaloper1p2amg2qs5ze7h6hz85vqzwwg300sdunsy3l6em"
CREATOR_ADDRESS = "sv1my5xj4xn03jfr46a0qsur99c6v0ff5mx3vnhth"


@dataclass(slots=True)
class LeafBlock:
    """The leaves that one block appended: first index, count, and the resulting root."""

    height: int
    start: int
    count: int
    root: bytes = b""


@dataclass(slots=True)
class OptionTally:
    """The ciphertexts of one option: their count and their sum, which is computed on demand."""

    count: int = 0
    pending: list[bytes] = field(default_factory=list)
    partial_sum: bytes = bytes(64)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, ciphertext: bytes) -> None:
        """Add one 64-byte ciphertext."""
        with self.lock:
            self.count += 1
            self.pending.append(ciphertext)

    def compute_sum(self) -> bytes:
        """Return the component-wise sum of all ciphertexts (64 bytes). Thread-safe."""
        with self.lock:
            for ciphertext in self.pending:
                self.partial_sum = proofs.elgamal_add(self.partial_sum, ciphertext)
            self.pending.clear()
            return self.partial_sum


class Round:
    """The state of a round."""

    def __init__(self, fields: dict[str, Any], height: int, time: int) -> None:
        self.round_id = bytes.fromhex(fields["vote_round_id"])
        self.vote_end_time = int(fields["vote_end_time"])
        self.proposals = [_expand_proposal(entry, number) for number, entry in enumerate(fields["proposals"], 1)]
        self.created_at_height = height
        self.created_at = time
        self.dkg_at = time
        self.active_height = height + int(fields.get("pending_blocks", 2))
        self.tally_blocks = int(fields.get("tally_blocks", 3))
        self.ceremony = Ceremony.from_fields(fields["ceremony"]) if fields.get("ceremony") else None
        self.partials: dict[int, tuple[bytes, ...]] = {}
        self.ea_secret = bytes.fromhex(fields["ea_secret"]) if fields.get("ea_secret") else None
        self.ea_pk = bytes.fromhex(fields["ea_pk"])
        self.public_fields: dict[str, Any] = dict(fields.get("shown", {}))
        self.tally_started_at = 0
        self.is_ended_early = False
        self.status_history: list[tuple[int, int]] = [(height, PENDING)]
        self.tree = proofs.CommitmentTree()
        self.leaf_blocks: list[LeafBlock] = []
        self.nullifiers: dict[bytes, int] = {}
        self.option_tallies: dict[tuple[int, int], OptionTally] = {}
        self.totals: dict[tuple[int, int], int] = {}
        # The totals of a recorded round are given, because its key is not known.
        self._recorded_totals = {(row[0], row[1]): row[2] for row in fields.get("totals", [])}

    @property
    def status(self) -> int:
        """The current status: 1 ACTIVE, 2 TALLYING, 3 FINALIZED, 4 PENDING."""
        return self.status_history[-1][1]

    def status_at(self, height: int) -> int | None:
        """The status as of that height, None before the round existed."""
        at = bisect_right(self.status_history, height, key=lambda entry: entry[0])
        return self.status_history[at - 1][1] if at else None

    def set_status(self, height: int, status: int) -> None:
        """Record a change of status in the block at this height."""
        self.status_history.append((height, status))

    def option_count(self, proposal_id: int) -> int:
        """The number of options of a proposal; 0 if the proposal does not exist."""
        return next((len(entry["options"]) for entry in self.proposals if entry["id"] == proposal_id), 0)

    def append_leaves(self, height: int, leaves: tuple[bytes, ...]) -> int:
        """Append leaves in the block at this height. Returns the index of the first one."""
        start = len(self.tree)
        self.tree.append(b"".join(leaves))
        if self.leaf_blocks and self.leaf_blocks[-1].height == height:
            self.leaf_blocks[-1].count += len(leaves)
        else:
            self.leaf_blocks.append(LeafBlock(height, start, len(leaves)))
        return start

    def compute_block_root(self, height: int) -> bytes | None:
        """Compute the root of the block at this height if it appended leaves."""
        if not self.leaf_blocks or self.leaf_blocks[-1].height != height:
            return None
        block = self.leaf_blocks[-1]
        block.root = self.tree.root(block.start + block.count)
        return block.root

    def leaf_block_at(self, height: int) -> LeafBlock | None:
        """What the block of exactly that height appended."""
        block = self.latest_leaf_block(height)
        return block if block is not None and block.height == height else None

    def latest_leaf_block(self, height: int) -> LeafBlock | None:
        """The newest block up to that height that appended leaves."""
        at = bisect_right(self.leaf_blocks, height, key=lambda block: block.height)
        return self.leaf_blocks[at - 1] if at else None

    def add_to_tally(self, proposal_id: int, decision: int, ciphertext: bytes) -> None:
        """Add a revealed ciphertext to the tally."""
        self.option_tallies.setdefault((proposal_id, decision), OptionTally()).add(ciphertext)

    def decrypt_totals(self) -> dict[tuple[int, int], int]:
        """Decrypt the total of every option (a small discrete logarithm each)."""
        if self.ea_secret is None:
            return dict(self._recorded_totals)
        secret = self.ea_secret
        return {
            option: proofs.elgamal_decrypt(secret, ballot.compute_sum(), _MAX_TOTAL)
            for option, ballot in self.option_tallies.items()
        }

    def contribution_transactions(self) -> list[bytes]:
        """The transactions of the key ceremony."""
        ceremony = self.ceremony
        if ceremony is None:
            return []
        return [
            txs.encode(
                txs.Contribution(
                    address(index),
                    self.round_id,
                    ceremony.commitments_of(index),
                    tuple(txs.encode_entry(*payload) for payload in ceremony.payloads_of(index)),
                )
            )
            for index in range(1, ceremony.validators + 1)
        ]

    def partial_transactions(self) -> list[bytes]:
        """The transactions with the partial decryptions of all sums, one for each validator."""
        if self.ceremony is None or not self.option_tallies:
            return []
        sums = sorted((option, ballot.compute_sum()) for option, ballot in self.option_tallies.items())
        transactions = []
        for index in self.ceremony.decrypting:
            share = self.ceremony.share_of(index)
            entries = tuple(
                txs.encode_entry(*option, *proofs.decrypt_partially(share, total)) for option, total in sums
            )
            transactions.append(txs.encode(txs.PartialDecryption(self.round_id, address(index), index, entries)))
        return transactions

    def tally_transactions(self, totals: dict[tuple[int, int], int]) -> list[bytes]:
        """The transaction with the totals; none without reveals."""
        if self.ceremony is None or not totals:
            return []
        entries = tuple(txs.encode_entry(*option, total) for option, total in sorted(totals.items()))
        return [txs.encode(txs.Tally(self.round_id, address(self.ceremony.decrypting[0]), entries))]

    def to_json(self, status: int, *, started: int = 0) -> dict[str, Any]:
        """The round in the REST API's format with this status, without zero values."""
        pending = status == PENDING
        ea_pk = "" if pending else b64(self.ea_pk)
        node = {"validator_address": VALIDATOR_ADDRESS, "pallas_pk": self._placeholder("pallas_pk"), "shamir_index": 1}
        ack = {
            "validator_address": VALIDATOR_ADDRESS,
            "ack_signature": self._placeholder("ack_signature"),
            "ack_height": self.active_height,
        }
        fields = {
            "vote_round_id": b64(self.round_id),
            "snapshot_height": self.public_fields.get("snapshot_height", 42000),
            "snapshot_blockhash": self._placeholder("snapshot_blockhash"),
            "proposals_hash": self._placeholder("proposals_hash"),
            "vote_end_time": self.vote_end_time,
            "nullifier_imt_root": self._placeholder("nullifier_imt_root"),
            "nc_root": self._placeholder("nc_root"),
            "creator": self.public_fields.get("creator", CREATOR_ADDRESS),
            "status": status,
            "ea_pk": ea_pk,
            "proposals": [_proposal_json(entry) for entry in self.proposals],
            "created_at_height": self.created_at_height,
            "ceremony_status": 1 if pending else 3,
            "ceremony_validators": [node],
            "ceremony_acks": [] if pending else [ack],
            "ceremony_phase_start": self.created_at if pending else self.dkg_at,
            "ceremony_phase_timeout": 1800,
            "ceremony_log": self._ceremony_log(pending),
            "threshold": 0 if pending else 1,
            "feldman_commitments": [] if pending else [ea_pk],
        }
        if status in (TALLYING, FINALIZED):
            fields["tally_phase_start"] = started or self.tally_started_at
            fields["tally_phase_timeout"] = 21600
        if self.ceremony is not None:
            return omit_zero(fields | self.ceremony.to_json(pending=pending))
        if not pending:
            part = {"validator_address": VALIDATOR_ADDRESS, "feldman_commitments": [ea_pk]}
            fields["dkg_contributions"] = [part]
        return omit_zero(fields)

    def partials_json(self) -> dict[str, Any]:
        """The partial decryptions in the REST API's format."""
        names = ("proposal_id", "vote_decision", "partial_decrypt", "dleq_proof")
        entries = []
        for index, encoded in sorted(self.partials.items()):
            for entry in encoded:
                values = txs.decode_entry(entry)
                shown = {
                    name: b64(value) if isinstance(value, bytes) else value
                    for name, value in ((name, values.get(number, 0)) for number, name in enumerate(names, 1))
                }
                entries.append(omit_zero({"validator_index": index, **shown}))
        return omit_zero({"entries": entries})

    def summary_json(self, status: int) -> dict[str, Any]:
        """The round's vote summary: ballot counts by option and, once finalized, totals."""
        proposals = []
        for entry in self.proposals:
            shown = _proposal_json(entry)
            for index, option in enumerate(shown["options"]):
                ballot = self.option_tallies.get((entry["id"], index))
                total = self.totals.get((entry["id"], index), 0) if status == FINALIZED else 0
                option.update(omit_zero({"ballot_count": ballot.count if ballot else 0, "total_value": total}))
            proposals.append(shown)
        return omit_zero(
            {
                "vote_round_id": b64(self.round_id),
                "status": status,
                "vote_end_time": self.vote_end_time,
                "proposals": proposals,
            }
        )

    def _placeholder(self, name: str) -> str:
        """A 32-byte placeholder: as given at creation, else derived from the round id."""
        field = self.public_fields.get(name)
        return str(field) if field else b64(hashlib.sha256(name.encode() + self.round_id).digest())

    def _ceremony_log(self, pending: bool) -> list[str]:
        """The log of the key ceremony."""
        created, active = self.created_at_height, self.active_height
        log = [f"[height={created}] round created with 1 ceremony validators"]
        if not pending:
            key = self.ea_pk[:8].hex()
            log.append(f"[height={min(created + 1, active)}] DKG complete (1/1 contributions), ea_pk={key}")
            log.append(f"[height={active}] ack from {VALIDATOR_ADDRESS} (1/1 acked)")
            log.append(f"[height={active}] ceremony confirmed (1/1 acked), round ACTIVE")
        return log


def _expand_proposal(entry: dict[str, Any], number: int) -> dict[str, Any]:
    """Expand a proposal from the short form of the control route (options as labels)."""
    options = [option if isinstance(option, str) else option["label"] for option in entry["options"]]
    return {
        "id": int(entry.get("id", number)),
        "title": entry.get("title", f"Proposal {number}"),
        "description": entry.get("description", ""),
        "options": options,
    }


def _proposal_json(entry: dict[str, Any]) -> dict[str, Any]:
    """A proposal in the REST API's format."""
    options = [omit_zero({"index": index, "label": label}) for index, label in enumerate(entry["options"])]
    return omit_zero({**entry, "options": options})
