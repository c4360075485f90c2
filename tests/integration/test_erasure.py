"""After confirmation nothing on disk joins a public reveal with a wallet's share: every byte is looked at."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
from pathlib import Path

import pytest

from devnet import ballot
from devnet.tx import Reveal, decode
from tests.support.devnet import Chain
from tests.support.erasure_check import elsewhere, public_of, rows_with
from tests.support.harness import STAND_IN, Helper, cast_vote, running, soon
from tests.support.secrets import secrets_of, told_in

FAR = 70_000
"""Leaves before the vote, so that its position takes three bytes and can be looked for in a file."""


@pytest.mark.anyio
@pytest.mark.rule("R14")
async def test_after_confirmation_the_files_hold_tombstones_and_nothing_else(tmp_path: Path) -> None:
    async with running(tmp_path, "--stand-in-proofs", program=STAND_IN) as (chain, helper):
        round_id = await chain.open_round()
        await chain.delegate(round_id, FAR)
        await helper.knows_leaf(round_id, FAR - 1)
        vote = await cast_vote(chain, helper, round_id, times=ballot.same_second(soon(3)))
        position = vote.position.to_bytes(3, "big")  # as SQLite writes a number of this size
        assert vote.position > FAR
        assert set(rows_with(helper, vote.position)) == {"shares.tree_position"}
        held = secrets_of(vote)
        waiting = helper.bytes_on_disk()
        assert all(held[f"blind {index}"] in waiting for index in range(16)), "the search finds what is there"
        assert len(elsewhere(waiting, position, public_of(helper))) >= 16, "and so does that for the position"

        await helper.confirmed(vote)
        sent = await messages_of(chain, round_id)
        assert len(sent) == 16
        for message, digest in sent.items():
            held |= {f"hash {digest.hex()}": digest, f"message {digest.hex()}": message[:200]}
            held |= {f"hash in hex {digest.hex()}": digest.hex().encode(), "in capitals": digest.hex().upper().encode()}
            held[f"proof {digest.hex()}"] = proof_of(message)
        assert await erased(helper, held, position) == []

        left = helper.bytes_on_disk()
        for share in vote.shares:
            assert left.count(share.nullifier) == 1, "once, among all spent ones"
            assert share.nullifier.hex().encode() not in left.lower()
        assert rows_with(helper, vote.position) == []
        assert helper.rows("SELECT count(*) FROM shares") == [(0,)]
        assert helper.rows("SELECT count(*) FROM reveals") == [(0,)]
        assert helper.rows("SELECT count(*), min(state), max(state) FROM tombstones") == [(16, 2, 2)]
        assert [row[1] for row in helper.rows("PRAGMA table_info(tombstones)")] == ["round_no", "mac", "state"]
        held |= {f"nullifier {share.index}": share.nullifier for share in vote.shares}
        assert told_in(helper.log.read_text(), held) == [], "nor does the log, at its most talkative"
        assert not re.search(rf"\b{vote.position}\b", helper.log.read_text())


async def messages_of(chain: Chain, round_id: bytes) -> dict[bytes, bytes]:
    """The bytes of every reveal that the chain has, and the hash it gives them."""
    found = await chain.transactions(round_id)
    return {base64.b64decode(tx["tx"]): bytes.fromhex(tx["hash"]) for tx in found}


def proof_of(message: bytes) -> bytes:
    """The first bytes of a message's proof."""
    reveal = decode(message)
    assert isinstance(reveal, Reveal)
    return reveal.proof[:64]


async def erased(helper: Helper, secrets: dict[str, bytes], position: bytes) -> list[str]:
    """Wait (a few seconds are promised) until none of these is in any file; what is left after that."""
    left = ["not looked yet"]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(8):
            while left:
                files = helper.bytes_on_disk()
                left = [name for name, secret in secrets.items() if secret in files]
                left += [f"position at {at}" for at in elsewhere(files, position, public_of(helper))]
                await asyncio.sleep(0.1)
    return left
