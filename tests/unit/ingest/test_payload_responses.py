"""Responses of `POST /shares` equal the recorded ones, byte for byte, for valid and invalid bodies.

After an intended change of a response: `python -m tests.unit.ingest.test_payload_responses` records them again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import anyio

import proofs
from tests.unit.ingest.admission_fixtures import POSITION, ROUND_ID, create_body
from tests.unit.ingest.payload_bodies import all_bodies
from tests.unit.server.wallet_fixtures import SHARES_PATH, WalletApp

RECORDED = Path(__file__).with_name("payload_responses.json")

Response = list[str | int]
"""Digest of the body, status and text of the response."""


async def post_all(bodies: Iterable[tuple[str, bytes]]) -> dict[str, Response]:
    """Post each body to a helper without shares that knows the recorded round and leaf."""
    (valid,) = proofs.read_shares([create_body()])
    assert isinstance(valid, proofs.ReadShare)
    wallets = WalletApp(leaves={(ROUND_ID, POSITION): valid.vote_commitment}, native=proofs)
    store, responses = wallets.store, dict[str, Response]()
    async with wallets.create_client() as client:
        for name, posted in bodies:
            assert name not in responses
            response = await client.post(SHARES_PATH, content=posted)
            responses[name] = [hashlib.sha256(posted).hexdigest()[:16], response.status_code, response.text]
            assert len(store.shares) == (response.text == '{"status":"queued"}')
            store.shares.clear()
            store.known_keys.clear()
    return responses


async def test_shares_responses_equal_recorded_ones() -> None:
    recorded = json.loads(RECORDED.read_text())
    responses = await post_all(all_bodies())
    assert responses.keys() == recorded.keys()
    assert {name: response for name, response in responses.items() if response != recorded[name]} == {}


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(answer)}" for name, answer in anyio.run(post_all, all_bodies()).items()]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
