"""Several helpers on one chain under virtual time, with wallets that give each share to several of them.

Each helper is the service itself, as in `world`, with its own database, provers and node. No fault is injected except
that helpers start late or die. The result counts what the fleet proved for what the chain counted.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass, replace

from helper.chain.chain_data import Proposal
from helper.chain.reveal_transaction import RevealMessage
from helper.core.load_forecast import MAX_REVEALS_PER_BLOCK
from helper.core.refusals import TemporaryRefusal
from helper.core.share import Share
from helper.errors import ShareRefused
from tests.simulation.chain import EPOCH, SimChain, SimRound
from tests.simulation.event_log import EventLog
from tests.simulation.fakes import Ballot
from tests.simulation.fleet_plan import (
    RECOVERY_SECONDS,
    FleetHelper,
    FleetPlan,
    FleetVote,
    choose_helpers,
    simulate_ideal_fleet,
)
from tests.simulation.host import ServiceHost, UnreachableError
from tests.simulation.node import SimNode
from tests.simulation.prover import SimProvers
from tests.simulation.run import patch_environment
from tests.simulation.scenario import Scenario
from tests.simulation.store import SimDisk
from tests.simulation.virtual_loop import SimLoop
from tests.simulation.world import seeded_random
from tests.support.payloads import share_body

MAX_DELIVERY_SECONDS = 1.0
"""Maximum seconds until a posted share arrives at one of its helpers."""
OLDEST_FIRST = {"helper": {"backlog_min_shares": 10_000, "backlog_after_seconds": 3600}}
"""Settings with which a helper proves by due time: shares that are due for less than an hour are no backlog."""


@dataclass(frozen=True)
class FleetResult:
    """Figures of a run. Seconds are virtual, except `wall_seconds`.

    Attributes:
        shares: shares that at least one helper acknowledged.
        counted: shares that the chain counted.
        lost: acknowledged shares that were not counted.
        feasible_lost: shares that an ideal fleet of the same provers would have revealed in time, minus `counted`.
        early: reveals sent before their due time.
        proofs: proofs begun by all helpers.
        proofs_per_reveal: `proofs` divided by `counted`.
        drained_seconds: seconds from the first prover's readiness until the last share was counted.
        ideal_seconds: the same for an ideal fleet: each share is proven once and no prover is idle.
        reveals_per_second: rate from the first prover's readiness until three quarters of all shares were counted.
            After that, the queues of single helpers may run empty.
    """

    shares: int
    counted: int
    lost: int
    feasible_lost: int
    early: int
    proofs: int
    proofs_per_reveal: float
    drained_seconds: float
    ideal_seconds: float
    reveals_per_second: float
    virtual_seconds: float
    wall_seconds: float

    def as_json(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in asdict(self).items()}


class FleetWorld:
    """The helpers, their chain and the wallets of a run."""

    def __init__(self, seed: int, loop: SimLoop, plan: FleetPlan) -> None:
        self._plan = plan
        self._loop = loop
        self._rng = seeded_random(seed, "fleet")
        self.event_log = EventLog(loop)
        interval = (plan.block_seconds, plan.block_seconds)
        self._chain = SimChain(seeded_random(seed, "chain"), self.event_log, interval=interval, circuit="k10")
        self._chain.max_block_reveals = MAX_REVEALS_PER_BLOCK
        self._round = SimRound(self._rng.randbytes(32), int(EPOCH) + plan.round_seconds, (Proposal(1, (0, 1)),))
        self._hosts = [self._create_host(seed, number, helper) for number, helper in enumerate(plan.helpers)]
        self._acknowledged: dict[bytes, float] = {}  # by nullifier: loop second from which the share is due
        self._due_times: dict[bytes, int] = {}
        self._remaining_posts = plan.share_count
        self._wallets: list[asyncio.Task[None]] = []
        self.proofs = 0
        self.early = 0

    def _create_host(self, seed: int, number: int, helper: FleetHelper) -> ServiceHost:
        plan = self._plan
        node = SimNode(f"node{number}:1317", self._chain, seeded_random(seed, f"node {number}"), self.event_log)
        node.on_broadcast = self._on_broadcast
        provers = SimProvers(seeded_random(seed, f"provers {number}"), plan.proof_seconds)
        provers.spread = (0.9, 1.1)
        provers.starts_at = helper.proves_from
        provers.on_proof_started = self._on_proof_started
        return ServiceHost(
            self._loop,
            _create_scenario(plan),
            self.event_log,
            [node],
            SimDisk(seeded_random(seed, f"disk {number}")),
            provers,
            name=f"helper {number}",
            settings=OLDEST_FIRST if helper.is_oldest_first else None,
        )

    async def run(self) -> None:
        """Run the plan until every share is counted, or until the round has ended."""
        self._chain.new_rounds.append(self._round)
        self._chain.make_block()
        coroutines = [self._chain.run()]
        coroutines += [
            self._run_helper(host, helper) for host, helper in zip(self._hosts, self._plan.helpers, strict=True)
        ]
        coroutines += [self._cast_vote(vote) for vote in self._plan.votes]
        tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
        while not self._round.tallying_height and (
            self._remaining_posts or len(self._chain.confirmed) < len(self._acknowledged)
        ):
            await self._chain.new_block.wait()
        for host in self._hosts:
            await host.kill()
            host.disk.close()
        tasks += self._wallets
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    async def _run_helper(self, host: ServiceHost, helper: FleetHelper) -> None:
        await asyncio.sleep(helper.starts_at)
        host.start()
        if helper.dies_at < self._plan.round_seconds:
            await asyncio.sleep(helper.dies_at - self._loop.time())
            await host.kill()

    # Wallets

    async def _cast_vote(self, vote: FleetVote) -> None:
        await asyncio.sleep(vote.cast_at)
        ballot = Ballot(self._rng, self._round.round_id, 1, self._rng.choice((0, 1)))
        position = await self._chain.cast_vote(self._round, ballot.commitment)
        running = self._running_hosts()
        chosen = choose_helpers(len(running), self._rng, per_share=min(self._plan.per_share, len(running)))
        for index, (post_at, submit_at) in enumerate(vote.posts):
            hosts = [running[number] for number in chosen[index]]
            share = ballot.share(index, position, 0 if submit_at is None else int(EPOCH) + submit_at)
            self._wallets.append(
                asyncio.ensure_future(self._post_share(share, ballot.nullifier(index), post_at, hosts))
            )

    def _running_hosts(self) -> list[ServiceHost]:
        return [host for host in self._hosts if host.service is not None]

    async def _post_share(self, share: Share, nullifier: bytes, post_at: float, hosts: list[ServiceHost]) -> None:
        """Give a share to its helpers, and later to another one if it is overdue."""
        await asyncio.sleep(max(0.0, post_at - self._loop.time()))
        self._due_times[nullifier] = share.submit_at
        tried = set(hosts)
        for is_accepted in await asyncio.gather(*(self._deliver(host, share, nullifier) for host in hosts)):
            if not is_accepted:
                await self._deliver_to_another(share, nullifier, tried)
        self._remaining_posts -= 1
        await self._recover(share, nullifier, tried)

    async def _recover(self, share: Share, nullifier: bytes, tried: set[ServiceHost]) -> None:
        """Give a share that is not counted long after its due time to one more helper."""
        now, end = self._loop.time(), float(self._plan.round_seconds)
        due = max(now, share.submit_at - EPOCH)
        shortest, longest = RECOVERY_SECONDS
        await asyncio.sleep(due + min(longest, max(shortest, (end - due) / 4)) - now)
        if (share.round_id, nullifier) not in self._chain.confirmed:
            # The due time has passed, so that this is not an early reveal.
            await self._deliver_to_another(replace(share, submit_at=0), nullifier, tried)

    async def _deliver_to_another(self, share: Share, nullifier: bytes, tried: set[ServiceHost]) -> None:
        untried = [host for host in self._running_hosts() if host not in tried]
        self._rng.shuffle(untried)
        for host in untried:
            tried.add(host)
            if await self._deliver(host, share, nullifier):
                return

    async def _deliver(self, host: ServiceHost, share: Share, nullifier: bytes) -> bool:
        """Post a share to a helper, as often as it asks for it. Returns whether it was accepted."""
        await asyncio.sleep(self._rng.random() * MAX_DELIVERY_SECONDS)
        body = share_body(share)
        while True:
            try:
                await host.send_request(lambda service: service.admission.admit(body))
            except UnreachableError:
                return False
            except TemporaryRefusal:
                await asyncio.sleep(1.0)
            except ShareRefused as refusal:  # wallets do not retry it
                self.event_log.record_violation("a valid share was refused", nullifier, refusal)
                return False
            else:
                self._acknowledged.setdefault(nullifier, max(self._loop.time(), share.submit_at - EPOCH))
                return True

    # Observations

    def _on_proof_started(self) -> None:
        self.proofs += 1

    def _on_broadcast(self, message: RevealMessage, node: SimNode) -> None:
        self.early += self._chain.now() < self._due_times[message.nullifier]

    def create_result(self, wall_seconds: float) -> FleetResult:
        """Return the figures after the run."""
        plan, chain = self._plan, self._chain
        counted = len(chain.confirmed)
        start = EPOCH + plan.proving_starts_at
        times = sorted(chain.head(height).time - start for height in chain.confirmed.values())
        most = times[: -(-3 * counted // 4)]
        ideal = simulate_ideal_fleet(plan, list(self._acknowledged.values()))
        lost = sum((self._round.round_id, nullifier) not in chain.confirmed for nullifier in self._acknowledged)
        return FleetResult(
            shares=len(self._acknowledged),
            counted=counted,
            lost=lost,
            feasible_lost=max(0, ideal.revealed - counted),
            early=self.early,
            proofs=self.proofs,
            proofs_per_reveal=self.proofs / max(1, counted),
            drained_seconds=times[-1] if times else 0.0,
            ideal_seconds=ideal.finished_at - plan.proving_starts_at,
            reveals_per_second=len(most) / most[-1] if most else 0.0,
            virtual_seconds=self._loop.time(),
            wall_seconds=wall_seconds,
        )


def _create_scenario(plan: FleetPlan) -> Scenario:
    """Return the settings of a helper and its node, without any fault."""
    return Scenario(
        duration=float(plan.round_seconds),
        poll_seconds=max(1.0, plan.block_seconds / 2),
        block_interval=(plan.block_seconds, plan.block_seconds),
        workers=plan.provers,
        proof_seconds=plan.proof_seconds,
        circuit_setting="auto",
        is_shuffled=False,
    )


def run_fleet(seed: int, plan: FleetPlan) -> tuple[FleetResult, list[str]]:
    """Run a fleet; return its figures and the unexpected errors of its helpers."""
    started_at = time.perf_counter()
    loop = SimLoop(seeded_random(seed, "loop"), shuffled=False)
    world = FleetWorld(seed, loop, plan)
    with patch_environment(seed, world.event_log):
        loop.run_until_complete(world.run())
    errors = [f"{fault.get('message')} {fault.get('exception')!r}" for fault in loop.unhandled_errors]
    result = world.create_result(time.perf_counter() - started_at)
    loop.close()
    return result, world.event_log.violations + errors
