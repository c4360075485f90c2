"""After confirmation no data on disk links a public reveal to a wallet's share."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
from pathlib import Path

import pytest

from devnet import ballot
from devnet.tx import Reveal, decode
from tests.support.devnet import DevChain, era_flags
from tests.support.erasure_check import columns_containing, find_outside_public, read_public_blobs
from tests.support.harness import STAND_IN_PROGRAM, HelperProcess, cast_vote, run_chain_and_helper, unix_time_in
from tests.support.secrets import collect_secrets, secrets_in_text

FAR_POSITION = 70_000
"""Leaves before the vote, so that its position takes three bytes and can be searched for in a file."""


@pytest.mark.rule("R14")
async def test_erasure_after_confirmation_leaves_only_tombstones(tmp_path: Path, era: str) -> None:
    flags = ("--stand-in-proofs", *era_flags(era))
    async with run_chain_and_helper(tmp_path, *flags, program=STAND_IN_PROGRAM) as (chain, helper):
        round_id = await chain.open_round()
        await chain.delegate(round_id, FAR_POSITION)
        await helper.wait_for_leaf(round_id, FAR_POSITION - 1)
        vote = await cast_vote(chain, helper, round_id, times=ballot.same_second_times(unix_time_in(3)))
        position = vote.position.to_bytes(3, "big")  # the end of its encoding in a witness
        assert vote.position > FAR_POSITION
        assert set(helper.query_rows("SELECT field(witness, 'tree_position') FROM shares")) == {(vote.position,)}
        held = collect_secrets(vote)
        waiting = helper.bytes_on_disk()
        assert all(held[f"blind {index}"] in waiting for index in range(16)), "the search finds existing data"
        assert len(find_outside_public(waiting, position, read_public_blobs(helper))) >= 16, (
            "the search finds the position"
        )

        await helper.wait_until_confirmed(vote)
        sent = await find_messages(chain, round_id)
        assert len(sent) == 16
        for message, digest in sent.items():
            held |= {f"hash {digest.hex()}": digest, f"message {digest.hex()}": message[:200]}
            held |= {
                f"hash in hex {digest.hex()}": digest.hex().encode(),
                "in upper case": digest.hex().upper().encode(),
            }
            held[f"proof {digest.hex()}"] = proof_prefix(message)
        assert await wait_for_erasure(helper, held, position) == []

        left = helper.bytes_on_disk()
        for share in vote.shares:
            assert left.count(share.nullifier) == 1, "exactly once, among all spent nullifiers"
            assert share.nullifier.hex().encode() not in left.lower()
        assert columns_containing(helper, vote.position) == []
        assert helper.query_rows("SELECT count(*) FROM shares") == [(0,)]
        assert helper.query_rows("SELECT count(*) FROM reveals") == [(0,)]
        assert helper.query_rows("SELECT count(*) FROM tombstones") == [(16,)]
        assert [row[1] for row in helper.query_rows("PRAGMA table_info(tombstones)")] == ["round_no", "mac"]
        held |= {f"nullifier {share.index}": share.nullifier for share in vote.shares}
        assert secrets_in_text(helper.log.read_text(), held) == [], "the debug log contains no secret"
        assert not re.search(rf"\b{vote.position}\b", helper.log.read_text())


async def find_messages(chain: DevChain, round_id: bytes) -> dict[bytes, bytes]:
    transactions = await chain.find_transactions(round_id)
    return {base64.b64decode(tx["tx"]): bytes.fromhex(tx["hash"]) for tx in transactions}


def proof_prefix(message: bytes) -> bytes:
    reveal = decode(message)
    assert isinstance(reveal, Reveal)
    return reveal.proof[:64]


async def wait_for_erasure(helper: HelperProcess, secrets: dict[str, bytes], position: bytes) -> list[str]:
    """Wait until no file contains any of the values. Returns the values that remain after the promised few seconds."""
    left = ["not searched yet"]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(8):
            while left:
                files = helper.bytes_on_disk()
                left = [name for name, secret in secrets.items() if secret in files]
                left += [f"position at {at}" for at in find_outside_public(files, position, read_public_blobs(helper))]
                await asyncio.sleep(0.1)
    return left
