"""The simulated world of one seed, from the first block to the final check."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from dataclasses import replace
from functools import partial

from helper.app.service import Service
from helper.chain.chain_data import Proposal
from helper.chain.reveal_transaction import RevealMessage
from helper.core.refusals import TemporaryRefusal
from helper.errors import HelperError, ShareRefused
from helper.store.models import EnqueueResult
from tests.simulation.chain import EPOCH, SimChain, SimRound, prove_reveal
from tests.simulation.event_log import EventLog
from tests.simulation.fakes import Ballot
from tests.simulation.host import ServiceHost, UnreachableError
from tests.simulation.node import FALSE_RESPONSE_FAULTS, NodeFault, SimNode
from tests.simulation.promise_check import PromiseChecker, TrackedShare
from tests.simulation.prover import ProverFault, SimProvers
from tests.simulation.scenario import (
    KILL_TIMEOUT_SECONDS,
    SETTLING_SECONDS,
    FaultEpisode,
    LieEpisode,
    PlannedPost,
    PlannedVote,
    Scenario,
    ServiceFault,
)
from tests.simulation.store import USUAL_COMMIT_DELAY_SECONDS, SimDisk
from tests.simulation.virtual_loop import SimLoop
from tests.support.payloads import share_body
from tests.unit.store.fixtures import retry_as_operator

MAX_PASSES_PER_SECOND = 600.0
MONITOR_INTERVAL_SECONDS = 5.0
KILL_MOMENTS = ("now", "after commit", "before commit", "broadcast", "proof", "broadcast", "proof")
PROPOSALS = (Proposal(1, (0, 1)), Proposal(2, (0, 1, 2)))


class World:
    """The service with its chain, nodes, disk, provers, wallets and operators."""

    def __init__(self, seed: int, loop: SimLoop, plan: Scenario) -> None:
        self.plan = plan
        self.loop = loop
        self.event_log = EventLog(loop)
        self._rng = seeded_random(seed, "world")
        self._lie_rng = seeded_random(seed, "lies")
        self.chain = SimChain(
            seeded_random(seed, "chain"), self.event_log, interval=plan.block_interval, circuit=plan.circuits[0][1]
        )
        self.nodes = [
            SimNode(f"node{number}:1317", self.chain, seeded_random(seed, f"node {number}"), self.event_log)
            for number in range(len(plan.nodes_with_rpc))
        ]
        self.disk = SimDisk(seeded_random(seed, "disk"))
        self.provers = SimProvers(seeded_random(seed, "provers"), plan.proof_seconds)
        self.host = ServiceHost(loop, plan, self.event_log, self.nodes, self.disk, self.provers)
        self.promise_checker = PromiseChecker(plan, self.event_log, self.chain, self.host)
        self.provers.on_fault = self.promise_checker.on_prover_fault
        self.provers.on_proof_started = lambda: self._count_kill_moment("proof")
        for node in self.nodes:
            node.on_broadcast = self._on_broadcast
            node.on_false_refusal = self.promise_checker.on_false_refusal
            node.on_refusal = self.promise_checker.on_refusal
        self.rounds = [
            SimRound(self._rng.randbytes(32), int(EPOCH) + plan_round.end, PROPOSALS) for plan_round in plan.rounds
        ]
        self._pending_kill: tuple[str, int] | None = None
        self._killed = asyncio.Event()
        self._restart_lock = asyncio.Lock()
        self._false_refusals_until = 0.0
        self._spinning: asyncio.Future[None] = loop.create_future()
        self.disk.on_commit = lambda: self._count_kill_moment("after commit")
        self.disk.on_before_commit = lambda: self._count_kill_moment("before commit")

    async def run(self) -> None:
        self.chain.make_block()
        self.loop.report_passes(MONITOR_INTERVAL_SECONDS, self._check_pass_rate)
        coroutines = [self.chain.run()]
        coroutines += [self._begin_round(number) for number in range(len(self.rounds))]
        coroutines += [self._change_circuit(at, circuit) for at, circuit in self.plan.circuits[1:]]
        coroutines += [self._cast_vote(vote) for vote in self.plan.votes]
        coroutines += [self._run_episode(episode) for episode in self.plan.episodes]
        coroutines += [self._run_lies(lies) for lies in self.plan.lie_episodes]
        coroutines += [
            self._retry_shares(plan_round.end - self.plan.calm_seconds + 20) for plan_round in self.plan.rounds
        ]
        coroutines.append(self._retry_shares(self.plan.duration - SETTLING_SECONDS + 20))
        coroutines.append(self._retry_shares(self._rng.uniform(0, self.plan.duration)))
        tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
        self.host.start()
        await asyncio.wait([self._spinning], timeout=self.plan.duration)
        await self.host.stop()
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
        self.promise_checker.check_final_state()

    # The chain

    async def _begin_round(self, number: int) -> None:
        start = self.plan.rounds[number].start
        await asyncio.sleep(start)
        self.chain.new_rounds.append(self.rounds[number])
        if not start:
            self.chain.make_block()

    async def _change_circuit(self, at: float, circuit: str) -> None:
        await asyncio.sleep(at)
        self.event_log.record("the chain's circuit is now", circuit)
        self.chain.circuit = circuit

    # Wallets

    async def _cast_vote(self, vote: PlannedVote) -> None:
        await asyncio.sleep(vote.cast_at)
        round_ = self.rounds[vote.round_index]
        while not round_.created_height:
            await self.chain.new_block.wait()
        proposal = self._rng.choice(PROPOSALS)
        ballot = Ballot(self._rng, round_.round_id, proposal.id, self._rng.choice(proposal.options))
        position = await self.chain.cast_vote(round_, ballot.commitment)
        await asyncio.gather(*(self._post_share(vote, ballot, position, posting) for posting in vote.posts))

    async def _post_share(self, vote: PlannedVote, ballot: Ballot, position: int, posting: PlannedPost) -> None:
        submit = 0 if posting.submit_at is None else int(EPOCH) + posting.submit_at
        share = ballot.share(posting.index, position, submit)
        tracked = TrackedShare(share, ballot.nullifier(posting.index), self.plan.rounds[vote.round_index])
        self.promise_checker.shares[tracked.nullifier] = tracked
        committed_at = self.loop.time()
        other_reveal = None
        if posting.rival_delay is not None:
            at = max(self.loop.time(), (posting.submit_at or 0) + posting.rival_delay)
            other_reveal = asyncio.ensure_future(self._reveal_by_other_helper(tracked, at))
        await asyncio.sleep(posting.delay)
        await self._post_until_answered(tracked, committed_at)
        if posting.repost_delay is not None:
            await asyncio.sleep(posting.repost_delay)
            tracked.is_reposted = True
            reposted = TrackedShare(ballot.share(posting.index, position, 0), tracked.nullifier, tracked.plan)
            if tracked.acknowledged_at is None:
                # The first post was refused: only this one can be accepted.
                tracked.share, tracked.posted_at = reposted.share, self.loop.time()
            await self._post_until_answered(reposted, committed_at, original=tracked)
        if other_reveal is not None:
            await other_reveal

    async def _post_until_answered(
        self, tracked: TrackedShare, committed_at: float, *, original: TrackedShare | None = None
    ) -> None:
        """Post a share until it is acknowledged, permanently refused, or its round has ended."""
        wait = 0.2
        end = tracked.plan.end + 60.0
        first = original or tracked
        if first.posted_at is None:
            first.posted_at = self.loop.time()
        while self.loop.time() < end:
            posted = self.loop.time()
            try:
                outcome = await self.host.send_request(
                    lambda service: service.admission.admit(share_body(tracked.share))
                )
            except UnreachableError:
                outcome = None
            except TemporaryRefusal as refusal:
                self.event_log.record("refused", tracked.nullifier, refusal.situation.name, refusal)
                outcome = None
            except ShareRefused as refusal:
                self.event_log.record("refused", tracked.nullifier, refusal.status, refusal.field, refusal)
                self._check_refusal(tracked, refusal, posted, committed_at)
                first.is_refused = True
                return
            if outcome is not None:
                self._record_acknowledgment(tracked, outcome, original)
                return
            await asyncio.sleep(wait)
            wait = min(wait * 3, 30.0)

    def _record_acknowledgment(
        self, tracked: TrackedShare, outcome: EnqueueResult, original: TrackedShare | None
    ) -> None:
        self.event_log.record("acknowledged", tracked.nullifier, outcome.value, "due", tracked.share.submit_at - EPOCH)
        if original is not None and original.is_queued and outcome is EnqueueResult.QUEUED:
            sim_round = self.chain.rounds[tracked.share.round_id]
            if not sim_round.tallying_height:
                self.event_log.record_violation("a share was enqueued twice", tracked.nullifier)
        target = original or tracked
        target.is_queued |= outcome is EnqueueResult.QUEUED
        if target.acknowledged_at is None:
            target.acknowledged_at = self.loop.time()

    def _check_refusal(
        self, tracked: TrackedShare, refusal: ShareRefused, posted_at: float, committed_at: float
    ) -> None:
        """Check a 400: it must be right, because wallets do not retry it."""
        sim_round = self.chain.rounds[tracked.share.round_id]
        is_round_over = sim_round.tallying_height or self.chain.now() >= sim_round.vote_end_time - 1
        is_late = tracked.share.submit_at > sim_round.vote_end_time
        if (
            not is_round_over
            and not is_late
            and self.loop.time() > self._false_refusals_until
            and posted_at > committed_at
        ):
            self.event_log.record_violation("a valid share was refused", tracked.nullifier, refusal.field, refusal)

    async def _reveal_by_other_helper(self, tracked: TrackedShare, at: float) -> None:
        await asyncio.sleep(at - self.loop.time())
        sim_round = self.chain.rounds[tracked.share.round_id]
        state = sim_round.tree_at(self.chain.height)
        assert state is not None
        share = tracked.share
        message = RevealMessage(
            nullifier=tracked.nullifier,
            enc_share=share.c1 + share.c2,
            proposal_id=share.proposal_id,
            vote_decision=share.vote_decision,
            proof=b"",
            round_id=share.round_id,
            anchor_height=state.height,
        )
        message = prove_reveal(message, self.chain.circuit, state.root)
        message = replace(message, proof=message.proof + self._rng.randbytes(8))
        self.event_log.record("another helper reveals", tracked.nullifier)
        self.chain.submit_transaction(message.to_tx(), message)

    # Operators

    async def _retry_shares(self, at: float) -> None:
        """Retry every share that has failed or waits for a retry, as an operator does."""
        await asyncio.sleep(at)
        is_waiting = "state = 3 OR (state = 0 AND attempts > 0)"
        sql = f"SELECT id, field(witness, 'nullifier') FROM shares WHERE {is_waiting} ORDER BY id"
        for share_id, nullifier in self.disk.query_rows(sql):
            round_ = self.chain.rounds[self.promise_checker.shares[nullifier].share.round_id]
            service = self.host.service
            if service is None or round_.tallying_height:
                continue
            self.event_log.record("operator retries", nullifier)
            self.promise_checker.on_operator_retry(nullifier)
            try:
                await self.host.send_request(partial(_retry_share, share_id=share_id))
                service.dispatcher.wake()
            except (HelperError, UnreachableError) as error:
                self.event_log.record("retry failed", repr(error))

    # Faults

    async def _run_episode(self, episode: FaultEpisode) -> None:
        await asyncio.sleep(episode.start)
        name = self.nodes[episode.node].name if episode.node is not None else ""
        self.event_log.record(
            "-->", episode.fault.value, name, f"for {episode.end - episode.start:.1f} s", episode.clock_offset or ""
        )
        if episode.fault in (ServiceFault.CRASH, ServiceFault.STOP):
            await self._restart_service(episode)
            return
        self._set_fault(episode, is_active=True)
        await asyncio.sleep(episode.end - self.loop.time())
        self._set_fault(episode, is_active=False)
        self.event_log.record("<--", episode.fault.value, name)

    async def _run_lies(self, episode: LieEpisode) -> None:
        await asyncio.sleep(episode.start)
        node = self.nodes[episode.node]
        self.event_log.record("--> lies", node.name, *(lie.name for lie in episode.lies))
        node.liar.begin(episode.lies, node.height, self._lie_rng)
        await asyncio.sleep(episode.end - self.loop.time())
        self.event_log.record("<-- lies", node.name)
        node.liar.begin((), node.height, self._lie_rng)

    def _set_fault(self, episode: FaultEpisode, *, is_active: bool) -> None:
        what = episode.fault
        if isinstance(what, NodeFault):
            assert episode.node is not None
            self.nodes[episode.node].set_fault(what if is_active else None)
            if what in FALSE_RESPONSE_FAULTS:
                self._false_refusals_until = max(self._false_refusals_until, episode.end + 60)
        elif isinstance(what, ProverFault):
            self.provers.fault = what if is_active else None
        elif what in (ServiceFault.DISK_FULL, ServiceFault.DISK_ERROR):
            code = sqlite3.SQLITE_FULL if what is ServiceFault.DISK_FULL else sqlite3.SQLITE_IOERR
            self.disk.conn.set_commit_error(code if is_active else None)
        elif what is ServiceFault.SLOW_DISK:
            self.disk.max_commit_delay = 4.0 if is_active else USUAL_COMMIT_DELAY_SECONDS
        elif what is ServiceFault.CLOCK:
            self.host.clock.set_offset(episode.clock_offset if is_active else 0.0)
            self.promise_checker.clock_wrong_until = episode.end + 60
            self._false_refusals_until = max(self._false_refusals_until, episode.end + 60)
        elif what is ServiceFault.CHAIN_HALTED:
            self.chain.is_halted = is_active
        elif what is ServiceFault.CONGESTION:
            self.chain.max_mempool_delay = 60.0 if is_active else 0.0
        elif what is ServiceFault.OUTAGE:
            for node in self.nodes:
                node.set_fault(NodeFault.UNREACHABLE if is_active else None)

    async def _restart_service(self, episode: FaultEpisode) -> None:
        """Kill or stop the service at the drawn moment, and restart it."""
        async with self._restart_lock:
            if episode.fault is ServiceFault.STOP:
                await self.host.stop()
            else:
                await self._kill_at_moment()
            self.promise_checker.check_disk()
            await asyncio.sleep(max(0.0, episode.end - self.loop.time()))
            self.host.start()

    async def _kill_at_moment(self) -> None:
        moment = self._rng.choice(KILL_MOMENTS)
        self._pending_kill = (moment, self._rng.randint(1, 2 if moment in ("proof", "broadcast") else 6))
        self._killed.clear()
        if self._pending_kill[0] != "now":
            try:
                async with asyncio.timeout(KILL_TIMEOUT_SECONDS):
                    await self._killed.wait()
            except TimeoutError:
                pass
        self._pending_kill = None
        self.host.mark_killed()
        await self.host.clean_up()

    def _count_kill_moment(self, moment: str) -> None:
        """Count moments of a kind and kill the service at the n-th."""
        if self._pending_kill is None or self._pending_kill[0] != moment:
            return
        left = self._pending_kill[1] - 1
        self._pending_kill = (moment, left)
        if left == 0:
            self.event_log.record("kill", moment)
            self.host.mark_killed()
            self._killed.set()

    def _on_broadcast(self, message: RevealMessage, node: SimNode) -> None:
        self.promise_checker.on_broadcast(message, node)
        self._count_kill_moment("broadcast")

    def _check_pass_rate(self, passes: int) -> None:
        """End the seed with a violation if the dispatch loop spins."""
        self.promise_checker.counts["most passes"] = max(self.promise_checker.counts["most passes"], passes)
        if passes > MAX_PASSES_PER_SECOND * MONITOR_INTERVAL_SECONDS and not self._spinning.done():
            self.event_log.record_violation("busy loop", passes)
            self._spinning.set_result(None)


async def _retry_share(service: Service, share_id: int) -> None:
    await retry_as_operator(service.store, share_id)


def seeded_random(seed: int, purpose: str) -> random.Random:
    return random.Random(f"{seed} {purpose}")
