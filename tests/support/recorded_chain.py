"""Replays the recorded round on a dev chain, block by block, so that its exchanges can be repeated.

Blocks between the recorded ones are empty, with interpolated times. Data that the recording lacks (messages of other
validators, hashes of other blocks) is generated as for any dev chain. Proofs are not verified: the recorded
transactions are included directly.
"""

from __future__ import annotations

import base64
from itertools import pairwise
from typing import Any

from devnet.network import DevNet, Options
from devnet.tx import Cast, Delegation, NewRound, Reveal, encode
from tests.conftest import read_recorded_lines
from tests.support.payloads import reveal_fields

CREATED_HEIGHT, ACTIVE_HEIGHT, ALL_REVEALED_HEIGHT, CLOSED_HEIGHT, NEWEST_HEIGHT = 55, 57, 118, 463, 1283
# Heights with a recorded time; other times are interpolated.
_RECORDED_TIMES = (
    (1, 1795267877_526504605),
    (55, 1795267930_500000000),
    (56, 1795267931_500000000),
    (106, 1795268003_562910317),
    (463, 1795268515_104453803),
    (1283, 1795270528_636958766),
)


class RecordedRound:
    """A dev chain that replays the recording up to a height."""

    def __init__(self) -> None:
        options = Options(chain_id="svote-1", circuit="k11", version="", block_seconds=0)
        self.devnet = DevNet(options)
        exchanges = {row["name"]: row["response"] for row in read_recorded_lines("exchanges.jsonl")}
        for record in exchanges["validators"]["validators"]:
            self.devnet.set_validator(record)
        self._blocks = _transactions_by_height(exchanges, read_recorded_lines("reveals.jsonl"))
        self._reveals = {raw for height in (106, 107, 117, 118) for raw in self._blocks.get(height, [])}

    async def advance(self, height: int) -> None:
        for next_height in range(self.devnet.chain.height + 1, height + 1):
            for raw in self._blocks.get(next_height, []):
                self.devnet.admission.submit_message(raw)
                if raw in self._reveals:
                    self.devnet.admission.cache_included(raw)
            await self.devnet.producer.mine(time_ns=_block_time_ns(next_height))

    async def close(self) -> None:
        await self.devnet.close()


def _transactions_by_height(exchanges: dict[str, Any], reveals: list[dict[str, Any]]) -> dict[int, list[bytes]]:
    closed = exchanges["round, finalized"]["round"]
    blocks: dict[int, list[bytes]] = {CREATED_HEIGHT: [encode(NewRound(_round_fields(closed, exchanges)))]}
    round_id = base64.b64decode(closed["vote_round_id"])
    delegated, voted = exchanges["leaves"]["blocks"]
    (van,) = (base64.b64decode(leaf) for leaf in delegated["leaves"])
    note, commitment = (base64.b64decode(leaf) for leaf in voted["leaves"])
    blocks[delegated["height"]] = [encode(Delegation(round_id, (van,)))]
    blocks[voted["height"]] = [encode(Cast(round_id, note, (commitment,)))]
    for row in reveals:
        blocks.setdefault(int(row["tx"]["height"]), []).append(encode(Reveal(**reveal_fields(row["request"]))))
    return blocks


def _round_fields(round_json: dict[str, Any], exchanges: dict[str, Any]) -> dict[str, Any]:
    """The fields of the round's creation, with the values that only its validator could create."""
    totals = [
        [row["proposal_id"], row["vote_decision"], row["total_value"]] for row in exchanges["tally results"]["results"]
    ]
    return {
        "vote_round_id": base64.b64decode(round_json["vote_round_id"]).hex(),
        "vote_end_time": round_json["vote_end_time"],
        "proposals": round_json["proposals"],
        "ea_pk": base64.b64decode(round_json["ea_pk"]).hex(),
        "totals": totals,
        "shown": {
            "snapshot_height": round_json["snapshot_height"],
            "snapshot_blockhash": round_json["snapshot_blockhash"],
            "proposals_hash": round_json["proposals_hash"],
            "nullifier_imt_root": round_json["nullifier_imt_root"],
            "nc_root": round_json["nc_root"],
            "creator": round_json["creator"],
            "pallas_pk": round_json["ceremony_validators"][0]["pallas_pk"],
            "ack_signature": round_json["ceremony_acks"][0]["ack_signature"],
        },
    }


def _block_time_ns(height: int) -> int:
    for (low, start), (high, end) in pairwise(_RECORDED_TIMES):
        if height <= high:
            return start + (end - start) * (height - low) // (high - low)
    raise ValueError(f"the recording ends at height {NEWEST_HEIGHT}")
