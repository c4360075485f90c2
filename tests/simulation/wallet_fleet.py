"""All clients that post shares vote at once, over HTTP, against three helpers under virtual time.

One helper is killed, and later stopped, and comes back each time; one refuses requests for a while, as if there were
too many; the node of one lags behind. `python -m tests.simulation --wallets 1000` prints for each client how
many of its shares the chain counts, and how often its voter must act; with `--original`, as it would be with the
responses of the original helper.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from unittest.mock import patch

import httpx

from devnet.clients.client_wallet import ClientWallet, HelperState, SentShare
from devnet.clients.known_clients import CLIENTS, Client
from devnet.clients.schedule import draw_submit_at
from helper.app.service import Service
from helper.core.share import share_to_payload
from helper.ingest import admission
from helper.server import wallet_routes
from helper.server.connection_limits import ConnectionLimits
from helper.server.listening import Server
from helper.server.wallet_routes import create_wallet_edge
from tests.simulation.chain import EPOCH
from tests.simulation.fakes import Ballot
from tests.simulation.fleet import FleetWorld
from tests.simulation.fleet_plan import ROUND_STARTS_AT, FleetHelper, FleetPlan, FleetVote
from tests.simulation.host import ServiceHost
from tests.simulation.node import NodeFault
from tests.simulation.run import patch_environment
from tests.simulation.virtual_loop import SimLoop
from tests.simulation.world import seeded_random
from tests.support.wallets.network import WalletNetwork

BLOCK_SECONDS = 6.0
DOWN_SECONDS = 20.0
OVERLOAD_SECONDS = 60.0
MAX_START_SECONDS = 2.0
"""Maximum seconds from the block with a vote until its wallet begins to post the shares."""


@dataclass
class ClientResult:
    """The votes of a client.

    Attributes:
        shares: shares of all its votes.
        counted: shares that the chain counts.
        stopped: votes for which the voter must act.
        given_up: shares that it at first gives to no other helper.
    """

    shares: int = 0
    counted: int = 0
    stopped: int = 0
    given_up: int = 0


@dataclass
class _CastVote:
    client: Client
    wallet: ClientWallet
    shares: list[SentShare]
    given_up: int = 0


class _Servers(Mapping[str, Server]):
    """The servers of the helpers that run, by name."""

    def __init__(self, hosts: Mapping[str, ServiceHost]) -> None:
        self._hosts = hosts
        self._servers: dict[str, tuple[Service, Server]] = {}

    def __getitem__(self, name: str) -> Server:
        service = self._hosts[name].service
        if service is None:
            raise KeyError(name)
        if name not in self._servers or self._servers[name][0] is not service:
            server = Server(create_wallet_edge(service.wallet_api), ConnectionLimits())
            self._servers[name] = service, server
        return self._servers[name][1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    async def stop(self, name: str) -> None:
        """Stop a listener as at SIGTERM. It refuses connections until another service runs."""
        await self._servers[name][1].shutdown()

    async def reset(self, name: str) -> None:
        """Reset the connections of a helper that was killed."""
        if name in self._servers:
            server = self._servers.pop(name)[1]
            server.abort()
            for task in server.tasks:
                task.cancel()
            await server.wait_ended()


class _OriginalNetwork(WalletNetwork):
    """Connections to helpers with the responses of the original."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        headers = {name: value for name, value in response.headers.items() if name != "retry-after"}
        status = {202: 200, 429: 503}.get(response.status_code, response.status_code)
        if b"not in a known block" in response.content:
            status = 400
        return httpx.Response(status, headers=headers, content=response.content)


class WalletFleet(FleetWorld):
    """The helpers, their chain and the wallets of a run, whose votes are of each client in turn."""

    def __init__(self, seed: int, loop: SimLoop, plan: FleetPlan, *, is_original: bool) -> None:
        super().__init__(seed, loop, plan)
        self._remaining_posts = 1  # the run ends with the round
        self._clients = itertools.cycle(CLIENTS)
        self._names = {f"helper{number}": host for number, host in enumerate(self._hosts)}
        self._running = _Servers(self._names)
        self._network = _OriginalNetwork if is_original else WalletNetwork
        self._votes: list[_CastVote] = []

    async def _run_helper(self, host: ServiceHost, helper: FleetHelper) -> None:
        host.start()
        number, length = self._hosts.index(host), self._plan.round_seconds
        name = f"helper{number}"
        if number == 0:
            await asyncio.sleep(0.3 * length)
            await host.kill()
            await self._running.reset(name)
            await asyncio.sleep(DOWN_SECONDS)
            host.start()
            await asyncio.sleep(0.3 * length)
            await self._running.stop(name)
            await host.stop()
            await asyncio.sleep(DOWN_SECONDS)
            host.start()
        elif number == 1:
            await asyncio.sleep(0.4 * length)
            assert host.service is not None
            host.service.admission._in_flight += admission.MAX_IN_FLIGHT
            await asyncio.sleep(OVERLOAD_SECONDS)
            host.service.admission._in_flight -= admission.MAX_IN_FLIGHT
        else:
            host._nodes[0].set_fault(NodeFault.LAGGING)

    async def _cast_vote(self, vote: FleetVote) -> None:
        client, loop, end = next(self._clients), self._loop, int(EPOCH) + self._plan.round_seconds
        await asyncio.sleep(vote.cast_at)
        ballot = Ballot(self._rng, self._round.round_id, 1, self._rng.choice((0, 1)))
        position = await self._chain.cast_vote(self._round, ballot.commitment)
        await asyncio.sleep(self._rng.random() * MAX_START_SECONDS)
        urls = [f"http://{name}" for name in self._names]
        now = int(EPOCH + loop.time())
        shares = []
        for index in range(16):
            submit_at = draw_submit_at(now, created_at=int(EPOCH), end=end, rng=self._rng)
            fields = {**share_to_payload(ballot.share(index, position, 0)), "share_index": index}
            helpers = dict.fromkeys(urls, HelperState.UNTRIED)
            shares.append(SentShare(fields, ballot.nullifier(index), submit_at, helpers))
            first_due = 0 if client.sends_first_alone and index == 0 else submit_at
            self._due_times[shares[-1].nullifier] = first_due
        earliest = min(sent.submit_at for sent in shares) or float(now)
        network = self._network(
            self._running,
            keeps_connections=client.keeps_connections,
            connections=client.connections,
            connect_seconds=0.1 + self._rng.random(),
        )
        wallet = ClientWallet(client, urls, rng=self._rng, now=lambda: EPOCH + loop.time(), transport=network)
        async with wallet:
            cast = _CastVote(client, wallet, shares)
            self._votes.append(cast)
            await wallet.deliver(shares)
            cast.given_up = sum(sent.is_given_up for sent in shares)
            if client.confirmations and cast.given_up < len(shares):
                watched = [sent for sent in shares if wallet.is_delivered(sent) or sent.is_given_up]
                await asyncio.gather(*(wallet.watch(sent, end, earliest=earliest) for sent in watched))

    async def run(self) -> None:
        """Run the round."""
        try:
            await super().run()
        finally:
            for name in self._names:
                await self._running.reset(name)

    def results(self) -> dict[str, ClientResult]:
        """The results by client."""
        results = {client.name: ClientResult() for client in CLIENTS}
        for vote in self._votes:
            result = results[vote.client.name]
            result.shares += len(vote.shares)
            result.counted += sum(
                (self._round.round_id, sent.nullifier) in self._chain.confirmed for sent in vote.shares
            )
            result.stopped += bool(vote.wallet.failure)
            result.given_up += vote.given_up
        return results


def run_wallet_fleet(
    seed: int, votes: int, *, round_seconds: int, is_original: bool = False
) -> tuple[dict[str, ClientResult], list[str]]:
    """Run a round; return the results by client, and the broken promises and unexpected errors."""
    rng = seeded_random(seed, "wallet fleet")
    plan = FleetPlan(
        helpers=(FleetHelper(), FleetHelper(), FleetHelper()),
        per_share=2,
        provers=2,
        proof_seconds=0.42,
        block_seconds=BLOCK_SECONDS,
        round_seconds=round_seconds,
        votes=tuple(FleetVote(rng.uniform(ROUND_STARTS_AT, 0.7 * round_seconds), ()) for _ in range(votes)),
    )
    loop = SimLoop(seeded_random(seed, "loop"), shuffled=False)
    world = WalletFleet(seed, loop, plan, is_original=is_original)
    hold = patch.object(wallet_routes, "longest_wait", lambda _: 0.0) if is_original else nullcontext()
    with patch_environment(seed, world.event_log), hold:
        loop.run_until_complete(world.run())
    errors = [f"{fault.get('message')} {fault.get('exception')!r}" for fault in loop.unhandled_errors]
    if world.early:
        errors.append(f"{world.early} reveals were sent before their due time")
    results = world.results()
    loop.close()
    return results, world.event_log.violations + errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    group = parser.add_argument_group("wallets", "all clients against three helpers, instead of seeds")
    group.add_argument("--wallets", type=int, metavar="VOTES", help="number of votes, of each client in turn")
    group.add_argument("--original", action="store_true", help="with the responses of the original helper")


def run_wallets_command(options: argparse.Namespace) -> int:
    """Run the round and print the results; the exit status is 1 if a promise was broken."""
    seconds = max(1200, 3 * options.wallets)
    results, violations = run_wallet_fleet(
        options.seed or 1, options.wallets, round_seconds=seconds, is_original=options.original
    )
    print(*violations, sep="\n", end="\n" if violations else "", file=sys.stderr)
    print(json.dumps({name: asdict(result) for name, result in results.items()}))
    return 1 if violations else 0
