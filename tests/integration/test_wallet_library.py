"""A wallet of library version 5.3.0 votes over slow links, while nodes of the chain are warming up and failing."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import proofs
from devnet.clients.client_wallet import HelperState
from devnet.clients.responses import ChainOutcome, ChainReply, ShareOutcome
from devnet.clients.wallet_http import Attempt
from devnet.eras import BATCH_CAST, BATCH_DELEGATE
from devnet.leak_check import find_leaks
from devnet.vote_submission import batch_body, delegation_body
from devnet.wallet import CastShare, CastVote
from tests.support.devnet import DevChain, era_flags
from tests.support.harness import REAL_PROGRAM, STAND_IN_PROGRAM, HelperProcess, run_chain
from tests.support.secrets import LEAVES_BEYOND_HEIGHTS, sensitive_values
from tests.support.slow_link import run_slow_link
from tests.support.wallets.library import LibraryShare, LibraryWallet

ERAS = ("0.5", "1.6")
BYTES_PER_SECOND = 20_000
DELAY_SECONDS = 1.0
"""Delay of a link in each direction: an answer arrives at least 2 s after its request."""
ROUND_SECONDS = 300
"""Length of a round as the wallet knows it. Half of it has passed, and 40 % are the last-moment window: shares of votes
that are cast within 30 s get times in these 30 s, and wallets have two minutes left to watch them.
"""
REMAINING_SECONDS = ROUND_SECONDS / 2
BATCH_VOTES = 50
BATCH_BYTES = 785_000
PROOF_BYTES = 11_460
"""Length of each proof in a batch, for `BATCH_BYTES`."""
DISABLED = {"disable": True}
POLLING = {"poll_seconds": 0.5}
CHAIN_FLAGS = ("--block-seconds", "1", "--stand-in-proofs", "--extra-nodes", "1")


@dataclass
class Service:
    """Two helpers and a gateway, the URLs of a slow link to each, and of a second link to the gateway."""

    helpers: list[HelperProcess]
    gateway: HelperProcess
    helper_links: list[str]
    gateway_link: str
    batch_link: str

    def create_wallet(self) -> LibraryWallet:
        return LibraryWallet(self.gateway_link, self.helper_links, rng=random.Random(7))


@dataclass
class LargeBatch:
    """Result of a large batch: the reply, the attempts, the bytes of its body, and its duration in seconds."""

    reply: ChainReply
    attempts: list[Attempt]
    size: int
    seconds: float


async def start_service(stack: AsyncExitStack, directory: Path, chain: DevChain) -> Service:
    """Start the processes and their links; `stack` ends them."""
    helper_sections: dict[str, Any] = {"helper": {"max_concurrent_proofs": 1}}
    gateway_sections: dict[str, Any] = {"helper": DISABLED, "admin": DISABLED, "gateway": {"enable": True}}
    processes = []
    hosts = ((STAND_IN_PROGRAM, helper_sections), (STAND_IN_PROGRAM, helper_sections), (REAL_PROGRAM, gateway_sections))
    for number, (program, sections) in enumerate(hosts):
        home = directory / f"host{number}"
        process = HelperProcess(home, chain.http, chain, program=program, nodes=2, chain=POLLING, **sections)
        process.spawn()
        stack.push_async_callback(process.kill)
        processes.append(process)
    for process in processes:
        await process.wait_until_listening()
    *helpers, gateway = processes
    for helper in helpers:
        await helper.wait_until_ready()
    await gateway.wait_for_response("/shielded-vote/v1/rounds", 200)
    links = [
        await stack.enter_async_context(run_slow_link(url, bytes_per_second=BYTES_PER_SECOND, delay=DELAY_SECONDS))
        for url in (*(helper.url for helper in helpers), gateway.url, gateway.url)
    ]
    return Service(helpers, gateway, links[:2], links[2], links[3])


async def end_refusals(chain: DevChain) -> None:
    """Let the first node finish its keys, once reveals have met it and the failing node."""
    async with asyncio.timeout(REMAINING_SECONDS):
        while not {entry["status"] for entry in await chain.broadcasts()} >= {502, 503}:
            await asyncio.sleep(0.2)
    await chain.clear_faults(node=0)


async def post_large_batch(service: Service, chain: DevChain) -> LargeBatch:
    """POST a delegation and 50 votes in one batch, in a round of its own and over its own link."""
    round_id = await chain.open_round(proposals=[{"options": ["Support", "Oppose"]}] * BATCH_VOTES)
    votes = [(proofs.random_field(), number + 1) for number in range(BATCH_VOTES)]
    body = batch_body(round_id, votes, anchor_height=1, proof_bytes=PROOF_BYTES)
    body["delegation"] = {name: value for name, value in delegation_body(round_id).items() if name != "vote_round_id"}
    async with LibraryWallet(service.batch_link, [], rng=random.Random(8)) as wallet:
        started_at = time.monotonic()
        reply = await wallet.chain.post_transaction(BATCH_DELEGATE, body)
        return LargeBatch(reply, wallet.attempts, len(json.dumps(body)), time.monotonic() - started_at)


async def read_tally(chain: DevChain, round_id: bytes) -> dict[tuple[int, int], int]:
    """End the round. Returns the published results."""
    await chain.post("/devnet/rounds/end", {"round_id": round_id.hex()})
    await chain.mine(6)
    response = await chain.get(f"/shielded-vote/v1/tally-results/{round_id.hex()}")
    return {(row["proposal_id"], row.get("vote_decision", 0)): row["total_value"] for row in response["results"]}


async def vote_in_era(era: str, directory: Path) -> None:
    """Vote on a chain of this era, and check that every share is counted once, at its time, without doubt.

    The first node warms its keys until reveals have met it. The second loses one response to the vote, which makes its
    outcome unknown: neither gateway nor helper can know what happened. It also refuses three reveals.
    """
    directory.mkdir()
    has_batches = era == "1.6"
    choices = [(1, 1, 700), (2, 0, 90)] if has_batches else [(1, 1, 700)]
    vote_route = BATCH_CAST if has_batches else "cast-vote"
    async with AsyncExitStack() as stack:
        chain = await stack.enter_async_context(run_chain(directory, *CHAIN_FLAGS, *era_flags(era)))
        service = await start_service(stack, directory, chain)
        wallet = await stack.enter_async_context(service.create_wallet())
        created_at = int(time.time() - ROUND_SECONDS / 2)
        round_id = await chain.open_round(REMAINING_SECONDS)
        await chain.delegate(round_id, LEAVES_BEYOND_HEIGHTS)
        await chain.set_faults(node=0, keys="warming")
        await chain.set_faults(node=1, routes=[vote_route], status_502_after=1, times=1)
        await chain.set_faults(node=1, routes=["reveal-share"], status_502=1, times=3)
        batch = asyncio.create_task(post_large_batch(service, chain))
        stack.callback(batch.cancel)

        _, round_ = await asyncio.gather(
            wallet.rank_helpers(), wallet.chain.load_round(round_id, created_at=created_at)
        )
        shares = await wallet.cast_votes(round_, choices)
        refusals = asyncio.create_task(end_refusals(chain))
        stack.callback(refusals.cancel)
        await wallet.deliver(shares)
        confirmed = await asyncio.gather(*(wallet.watch(sent, round_.end) for sent in shares))
        await refusals

        assert all(confirmed)
        # Each share was given to one helper, and both say that it is counted.
        assert all(sent.confirmed_by == set(wallet.helper_urls) for sent in shares)
        assert all(sent.with_state(HelperState.ACCEPTED) for sent in shares)
        outcomes = {attempt.outcome for attempt in wallet.attempts if attempt.route == "shares"}
        assert outcomes <= {ShareOutcome.ACCEPTED, ShareOutcome.REPEATABLE}
        requests = await chain.request_log()
        lost = [(entry["route"], entry["node"]) for entry in requests if "status_502_after" in entry["faults"]]
        assert lost == [(vote_route, chain.nodes[1]["name"])]
        assert [attempt.route for attempt in wallet.attempts if attempt.is_unknown] == [vote_route]

        assert await chain.spent_nullifiers(round_id) == {sent.share.nullifier.hex(): 1 for sent in shares}
        votes = group_by_vote(shares)
        secret = sensitive_values(votes, await chain.transaction_hashes(round_id))
        sent_by_helpers = [entry for entry in requests if entry["route"] != vote_route]
        assert find_leaks(sent_by_helpers, secret) == []
        for helper in service.helpers:
            assert (await helper.service_counts()).get("failures", 0) == 0
        assert (
            await chain.http.post(f"{service.gateway.url}/shielded-vote/v1/reveal-share", json={})
        ).status_code == 404
        assert (await service.gateway.post_share({})).status_code == 404, "it has no queue"
        gateway_log = service.gateway.log.read_text()
        assert not [text for text in (vote_route, votes[0].ballot.commitment.hex()) if text in gateway_log]
        assert await read_tally(chain, round_id) == {choice[:2]: choice[2] for choice in choices}

        large = await batch
        assert large.size >= BATCH_BYTES
        assert large.seconds >= BATCH_BYTES / BYTES_PER_SECOND
        assert large.reply.outcome is (ChainOutcome.ACCEPTED if has_batches else ChainOutcome.NO_ROUTE)
        assert len(large.attempts) == 1


def group_by_vote(shares: Sequence[LibraryShare]) -> list[CastVote]:
    """The shares as votes of the dev chain's wallet."""
    votes: dict[int, list[LibraryShare]] = defaultdict(list)
    for sent in shares:
        votes[sent.position].append(sent)
    return [
        CastVote(
            group[0].ballot,
            position,
            tuple(CastShare(sent.share.index, sent.share.nullifier, sent.submit_at, ()) for sent in group),
        )
        for position, group in votes.items()
    ]


@pytest.mark.rule("N7", "N16", "N17", "N30", "W14")
async def test_library_wallet_votes_over_slow_links_in_every_era(tmp_path: Path) -> None:
    # All eras at once, because the wallets spend almost all of the time waiting.
    async with asyncio.TaskGroup() as group:
        for era in ERAS:
            group.create_task(vote_in_era(era, tmp_path / era), name=era)
