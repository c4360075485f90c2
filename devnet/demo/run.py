"""Runs the demo."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from devnet.demo import plan, processes, report
from devnet.demo.progress import ProgressBars
from devnet.demo.votes import VoteResult, cast_all_votes
from devnet.tx import Reveal, decode

ROUND = "/shielded-vote/v1/round"
POLL_SECONDS = 0.25
TALLY_BLOCKS = 8
"""Blocks after the end of the round: partial decryptions, the tally, and a block after it."""
CHAIN_TIMEOUT_SECONDS = 90.0
"""Timeout in seconds for the chain to open a round, or to publish its tally after the end."""


Audit = Callable[[Mapping[str, Any], bytes], Awaitable[dict[str, Any]]]
"""Audits a finished round, given the chain's ready line and the round id. Returns what `audit --json` prints."""


class DemoError(RuntimeError):
    """The demo failed. The text states the step."""


class Demo:
    """The demo on a running chain and helper."""

    def __init__(
        self, options: plan.DemoOptions, chain: dict[str, Any], helper: dict[str, Any], *, audit: Audit
    ) -> None:
        self._options = options
        self._chain = chain
        self._audit = audit
        self._chain_url: str = chain["rest"]
        self._rpc_url: str = chain["rpc"]
        self._helper_urls: list[str] = helper["urls"]
        self._http = httpx.AsyncClient(timeout=30)
        self._sockets = [
            httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path), base_url="http://helper", timeout=30)
            for path in helper["sockets"]
        ]
        self._rng = random.Random(options.seed)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()
        for client in self._sockets:
            await client.aclose()

    async def run(self, bars: ProgressBars) -> dict[str, Any]:
        """Vote, wait for all reveals and the tally, and return the report."""
        began = time.monotonic()
        await self._publish_config()
        await self._wait_until_helper_ready()
        facts = await self._merged_stats()
        provers = facts["provers"]
        seconds = plan.round_seconds(self._options, provers["self_test_seconds"], provers["workers"])
        round_id, end = await self._open_round(seconds)
        bars.print_line(
            f"{self._options.voters} wallets vote on {len(plan.PROPOSALS)} proposals, 16 shares per vote; "
            f"{self._describe_copies()}circuit {self._options.circuit}; the round ends in {end - time.time():.0f} s"
        )
        voted = await self._cast_votes(round_id, end, bars)
        await self._end_round(end, bars)
        counted = await self._wait_for_tally(round_id, end)
        early = report.count_early_requests(
            voted, await self._find_transactions(round_id), await self._read_request_log()
        )
        facts = await self._merged_stats()
        bars.print_line("the round is tallied; its result is audited from the chain's public data")
        audit_began = time.monotonic()
        audited = await self._audit(self._chain, round_id)
        ended = time.monotonic()
        return report.build_result(
            self._options,
            voted,
            facts,
            counted=counted,
            early=early,
            audited={**audited, "seconds": round(ended - audit_began, 2)},
            seconds=ended - began,
        )

    async def _cast_votes(self, round_id: bytes, end: int, bars: ProgressBars) -> list[VoteResult]:
        """Cast and post all votes, and show progress until all shares are confirmed or the round has ended."""
        accepted_count = 0

        def accepted(number: int) -> None:
            nonlocal accepted_count
            accepted_count += number

        cast = plan.plan_votes(self._options, self._rng)
        voting = asyncio.create_task(
            cast_all_votes(
                self._chain_url,
                self._helper_urls,
                round_id,
                cast,
                helpers_per_share=self._options.helpers_per_share,
                plays_clients=self._options.plays_clients,
                spread=self._options.spread,
                rng=self._rng,
                on_accepted=accepted,
            )
        )
        while True:
            counts = (await self._merged_stats())["counts"]
            bars.update({**counts, "accepted": accepted_count})
            finished = (
                counts.get("confirmed", 0) >= self._options.copy_count or time.time() > end + CHAIN_TIMEOUT_SECONDS
            )
            if voting.done() and (finished or voting.exception() is not None):
                return voting.result()
            await asyncio.sleep(POLL_SECONDS)

    def _describe_copies(self) -> str:
        helpers, per_share = self._options.helpers, self._options.helpers_per_share
        return "" if helpers == 1 else f"each share goes to {per_share} of {helpers} helpers; "

    async def _publish_config(self) -> None:
        """Publish the voting configuration, which the page's network view shows."""
        label = "The demo's helper"
        servers = [
            {"url": url, "label": label if self._options.helpers == 1 else f"{label} {number}"}
            for number, url in enumerate(self._helper_urls, 1)
        ]
        config = {"version": "1", "vote_servers": servers}
        (await self._http.post(f"{self._chain_url}/devnet/voting-config", json=config)).raise_for_status()

    async def _wait_until_helper_ready(self) -> None:
        async with self._timeout("the helper to be ready", processes.START_TIMEOUT_SECONDS):
            while True:
                responses = [await self._http.get(f"{url}/shielded-vote/v1/status") for url in self._helper_urls]
                is_ready = all(response.status_code == 200 for response in responses)
                if is_ready and all(facts["ready"] for facts in await self._stats_of_hosts()):
                    return
                await asyncio.sleep(POLL_SECONDS)

    async def _open_round(self, seconds: float) -> tuple[bytes, int]:
        response = await self._http.post(
            f"{self._chain_url}/devnet/rounds",
            json={"proposals": list(plan.PROPOSALS), "seconds": seconds, "validators": plan.VALIDATOR_COUNT},
        )
        response.raise_for_status()
        created = response.json()
        round_id = bytes.fromhex(created["vote_round_id"])
        async with self._timeout("the round to open", CHAIN_TIMEOUT_SECONDS):
            while await self._round_status(round_id) != 1:
                await asyncio.sleep(POLL_SECONDS)
        # Voters delegate before they vote: positions are then larger than any height, and can be found in the log.
        delegations = {"round_id": round_id.hex(), "count": plan.DELEGATION_COUNT, "separate": True}
        (await self._http.post(f"{self._chain_url}/devnet/delegate", json=delegations)).raise_for_status()
        return round_id, int(created["vote_end_time"])

    async def _round_status(self, round_id: bytes) -> int | None:
        response = await self._http.get(f"{self._chain_url}{ROUND}/{round_id.hex()}")
        return int(response.json()["round"]["status"]) if response.status_code == 200 else None

    async def _end_round(self, end: int, bars: ProgressBars) -> None:
        """If all shares are confirmed, produce the blocks after the end of the round without waiting for it."""
        complete = (await self._merged_stats())["counts"].get("confirmed", 0) >= self._options.copy_count
        if not complete:
            bars.print_line("the round ends before every share is confirmed")
            return
        bars.print_line("every share is confirmed; the chain's time advances to the end, and it publishes the tally")
        # The timer is stopped, because a block with the current time must not be between these blocks.
        for route, body in (
            ("faults", {"halt_chain": True}),
            ("mine", {"blocks": TALLY_BLOCKS, "time": end + 1}),
            ("faults", {"halt_chain": False}),
        ):
            (await self._http.post(f"{self._chain_url}/devnet/{route}", json=body)).raise_for_status()

    async def _wait_for_tally(self, round_id: bytes, end: int) -> dict[tuple[int, int], int]:
        finalized = 3
        async with self._timeout("the tally", max(0.0, end - time.time()) + CHAIN_TIMEOUT_SECONDS):
            while await self._round_status(round_id) != finalized:
                await asyncio.sleep(POLL_SECONDS)
        response = await self._http.get(f"{self._chain_url}/shielded-vote/v1/tally-results/{round_id.hex()}")
        response.raise_for_status()
        return report.parse_tally(response.json())

    async def _merged_stats(self) -> dict[str, Any]:
        facts = await self._stats_of_hosts()
        return report.merge_host_stats(facts) if self._options.helpers == 1 else report.merge_fleet_stats(facts)

    async def _stats_of_hosts(self) -> list[dict[str, Any]]:
        """The facts of all hosts."""
        facts = []
        for client in self._sockets:
            response = await client.get("/stats")
            response.raise_for_status()
            facts.append(response.json()["service"])
        return facts

    async def _read_request_log(self) -> list[dict[str, Any]]:
        """The chain's entire request log."""
        entries: list[dict[str, Any]] = []
        while True:
            after = entries[-1]["seq"] if entries else 0
            response = await self._http.get(f"{self._chain_url}/devnet/requests", params={"after": after})
            page: list[dict[str, Any]] = response.json()["requests"]
            if not page:
                return entries
            entries += page

    async def _find_transactions(self, round_id: bytes) -> dict[str, bytes]:
        """The hash of the revealing transaction by nullifier (hex)."""
        page, hashes = 1, dict[str, bytes]()
        query = f"\"reveal_share.vote_round_id='{round_id.hex()}'\""
        while True:
            params = {"query": query, "per_page": "100", "page": str(page)}
            response = await self._http.get(f"{self._rpc_url}/tx_search", params=params)
            if response.status_code != 200:  # past the last page
                return hashes
            for tx in response.json()["result"]["txs"]:
                reveal = decode(base64.b64decode(tx["tx"]))
                if isinstance(reveal, Reveal):
                    hashes[reveal.nullifier.hex()] = bytes.fromhex(tx["hash"])
            page += 1

    @contextlib.asynccontextmanager
    async def _timeout(self, what: str, seconds: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise DemoError(f"waited {seconds:.0f} s for {what}") from None


async def run_demo(options: plan.DemoOptions, console: Console, *, audit: Audit) -> dict[str, Any]:
    """Start chain and helper, run the demo, and stop them; with `keep`, run until interrupted.

    Args:
        options: the options.
        console: shows progress.
        audit: audits the demo's round.

    Raises:
        DemoError: the demo failed.
        processes.StartError: the chain or the helper did not start.
        ClusterError: PostgreSQL is not installed or does not start.
    """
    with tempfile.TemporaryDirectory(prefix="svote-demo-") as name:
        directory = Path(name)
        shared = options.store == "postgres"
        parts = (
            "a database, and a helper for each role: api, prover, sender"
            if shared
            else "a helper"
            if options.helpers == 1
            else f"{options.helpers} helpers"
        )
        console.print(f"starting an embedded vote chain and {parts}", highlight=False)
        async with (
            processes.run_chain(directory, options.circuit) as chain,
            processes.run_hosts(directory, chain)
            if shared
            else processes.run_helper(directory, options.db or directory / "queue.db", chain)
            if options.helpers == 1
            else processes.run_fleet(directory, options.helpers, chain) as helper,
        ):
            demo = Demo(options, chain, helper, audit=audit)
            try:
                with ProgressBars(options.copy_count) as bars:
                    outcome = await demo.run(bars)
            finally:
                await demo.close()
            if options.keep:
                await _keep_running(options, outcome, chain, helper, console)
    return outcome


async def _keep_running(
    options: plan.DemoOptions, outcome: dict[str, Any], chain: dict[str, Any], helper: dict[str, Any], console: Console
) -> None:
    """Show the report and the URLs, then wait for Ctrl-C or SIGTERM."""
    if not options.json:
        report.print_report(outcome, console)
    for label, address in (
        ("helper and its page", helper["url"]),
        ("operator token, for the page's queue", helper["token"]),
        *(("helper's control socket", path) for path in helper["sockets"]),
        ("chain, REST", chain["rest"]),
        ("chain, consensus RPC", chain["rpc"]),
    ):
        console.print(f"{label}: {address}", highlight=False, soft_wrap=True)
    console.print("still running; stop with Ctrl-C", highlight=False)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
