"""One seed, from the first block to the verdict."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from functools import partial

from helper.app.service import Service
from helper.chain.models import Proposal
from helper.chain.reveal_transaction import RevealMessage
from helper.errors import HelperError, ShareRefused
from helper.store.rows import Enqueued
from tests.simulation.chain import EPOCH, SimChain, SimRound, statement_of
from tests.simulation.event_log import Story
from tests.simulation.fakes import Ballot, prove
from tests.simulation.host import Host, UnreachableError
from tests.simulation.node import LIES, Fault, SimNode
from tests.simulation.promise_check import PromiseChecker, Tracked
from tests.simulation.prover import Ill, Provers
from tests.simulation.scenario import KILL_PATIENCE, SETTLING, Episode, Plan, Posting, Upset, Vote
from tests.simulation.store import USUAL_DELAY, Disk
from tests.simulation.virtual_loop import SimLoop
from tests.support.payloads import share_body
from tests.unit.store.fixtures import operator_retry

PASSES_A_SECOND = 600.0
MONITOR_SECONDS = 5.0
MOMENTS = ("now", "after commit", "before commit", "broadcast", "proof", "broadcast", "proof")
PROPOSALS = (Proposal(1, (0, 1)), Proposal(2, (0, 1, 2)))


class World:
    """Everything around the service, and the service."""

    def __init__(self, seed: int, loop: SimLoop, plan: Plan) -> None:
        self.plan = plan
        self.loop = loop
        self.story = Story(loop)
        self._dice = stream(seed, "world")
        self.chain = SimChain(stream(seed, "chain"), self.story, interval=plan.interval, circuit=plan.circuits[0][1])
        self.nodes = [
            SimNode(f"node{number}:1317", self.chain, stream(seed, f"node {number}"), self.story)
            for number in range(len(plan.rpcs))
        ]
        self.disk = Disk(stream(seed, "disk"))
        self.provers = Provers(stream(seed, "provers"), plan.proof_seconds)
        self.host = Host(loop, plan, self.story, self.nodes, self.disk, self.provers)
        self.judge = PromiseChecker(plan, self.story, self.chain, self.host)
        self.provers.on_sin = self.judge.on_sin
        self.provers.on_begin = lambda: self._count_down("proof")
        for node in self.nodes:
            node.on_broadcast = self._on_broadcast
            node.on_lie = self.judge.on_lie
            node.on_refusal = self.judge.on_refusal
        self.rounds = [SimRound(self._dice.randbytes(32), int(EPOCH) + one.end, PROPOSALS) for one in plan.rounds]
        self._armed: tuple[str, int] | None = None
        self._shot = asyncio.Event()
        self._down = asyncio.Lock()
        self._lied_until = 0.0
        self._spins: asyncio.Future[None] = loop.create_future()
        self.disk.on_commit = lambda: self._count_down("after commit")
        self.disk.before_commit = lambda: self._count_down("before commit")

    async def run(self) -> None:
        """From the first block to the verdict."""
        self.chain.make_block()
        self.loop.watch(MONITOR_SECONDS, self._monitor)
        works = [self.chain.run()]
        works += [self._begin_round(number) for number in range(len(self.rounds))]
        works += [self._change_circuit(at, circuit) for at, circuit in self.plan.circuits[1:]]
        works += [self._vote(vote) for vote in self.plan.votes]
        works += [self._episode(one) for one in self.plan.episodes]
        works += [self._operate(one.end - self.plan.calm + 20) for one in self.plan.rounds]
        works.append(self._operate(self.plan.length - SETTLING + 20))
        works.append(self._operate(self._dice.uniform(0, self.plan.length)))
        tasks = [asyncio.ensure_future(work) for work in works]
        self.host.start()
        await asyncio.wait([self._spins], timeout=self.plan.length)
        await self.host.stop()
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
        self.judge.at_the_end()

    # The chain

    async def _begin_round(self, number: int) -> None:
        begin = self.plan.rounds[number].begin
        await asyncio.sleep(begin)
        self.chain.new_rounds.append(self.rounds[number])
        if not begin:
            self.chain.make_block()

    async def _change_circuit(self, at: float, circuit: str) -> None:
        await asyncio.sleep(at)
        self.story.tell("the chain's circuit is now", circuit)
        self.chain.circuit = circuit

    # Wallets

    async def _vote(self, vote: Vote) -> None:
        await asyncio.sleep(vote.at)
        one = self.rounds[vote.round]
        while not one.created:
            await self.chain.new_block.wait()
        proposal = self._dice.choice(PROPOSALS)
        ballot = Ballot(self._dice, one.round_id, proposal.id, self._dice.choice(proposal.options))
        position = await self.chain.cast(one, ballot.commitment)
        await asyncio.gather(*(self._share(vote, ballot, position, posting) for posting in vote.postings))

    async def _share(self, vote: Vote, ballot: Ballot, position: int, posting: Posting) -> None:
        submit = 0 if posting.submit is None else int(EPOCH) + posting.submit
        share = ballot.share(posting.index, position, submit)
        known = Tracked(share, ballot.nullifier(posting.index), self.plan.rounds[vote.round])
        self.judge.shares[known.nullifier] = known
        committed = self.loop.time()
        rival = None
        if posting.rival is not None:
            at = max(self.loop.time(), (posting.submit or 0) + posting.rival)
            rival = asyncio.ensure_future(self._rival(known, at))
        await asyncio.sleep(posting.wait)
        await self._post(known, committed)
        if posting.again is not None:
            await asyncio.sleep(posting.again)
            late = Tracked(ballot.share(posting.index, position, 0), known.nullifier, known.plan)
            if known.acknowledged is None:
                known.share = late.share  # it was refused: only this one can be taken
            await self._post(late, committed, first=known)
        if rival is not None:
            await rival

    async def _post(self, known: Tracked, committed: float, *, first: Tracked | None = None) -> None:
        """Post a share until it is acknowledged or refused for good, or its round is over."""
        wait = 0.2
        end = known.plan.end + 60.0
        while self.loop.time() < end:
            posted = self.loop.time()
            try:
                outcome = await self.host.ask(lambda service: service.intake.take(share_body(known.share)))
            except UnreachableError:
                outcome = None
            except ShareRefused as refusal:
                self.story.tell("refused", known.nullifier, refusal.status, refusal.field, refusal)
                if refusal.status == 400:
                    self._judge_refusal(known, refusal, posted, committed)
                    return
                outcome = None
            if outcome is not None:
                self._acknowledged(known, outcome, first)
                return
            await asyncio.sleep(wait)
            wait = min(wait * 3, 30.0)

    def _acknowledged(self, known: Tracked, outcome: Enqueued, first: Tracked | None) -> None:
        self.story.tell("acknowledged", known.nullifier, outcome.value, "due", known.share.submit_at - EPOCH)
        if first is not None and first.queued and outcome is Enqueued.QUEUED:
            one = self.chain.rounds[known.share.round_id]
            if not one.tallying:
                self.story.fail("a share was taken twice", known.nullifier)
        mine = first or known
        mine.queued |= outcome is Enqueued.QUEUED
        if mine.acknowledged is None:
            mine.acknowledged = self.loop.time()

    def _judge_refusal(self, known: Tracked, refusal: ShareRefused, posted: float, committed: float) -> None:
        """A wallet never posts again after a 400: it must be right."""
        one = self.chain.rounds[known.share.round_id]
        over = one.tallying or self.chain.now() >= one.vote_end_time - 1
        late = known.share.submit_at > one.vote_end_time
        if not over and not late and self.loop.time() > self._lied_until and posted > committed:
            self.story.fail("a good share was refused", known.nullifier, refusal.field, refusal)

    async def _rival(self, known: Tracked, at: float) -> None:
        """Another helper reveals the share too."""
        await asyncio.sleep(at - self.loop.time())
        one = self.chain.rounds[known.share.round_id]
        state = one.tree_at(self.chain.height)
        assert state is not None
        share = known.share
        message = RevealMessage(
            nullifier=known.nullifier,
            enc_share=share.c1 + share.c2,
            proposal_id=share.proposal_id,
            vote_decision=share.vote_decision,
            proof=b"",
            round_id=share.round_id,
            anchor_height=state.height,
        )
        proof = prove(self.chain.circuit, statement_of(message, state.root)) + self._dice.randbytes(8)
        message = RevealMessage(**{**{name: getattr(message, name) for name in message.__slots__}, "proof": proof})
        self.story.tell("another helper reveals", known.nullifier)
        self.chain.submit(message.to_tx(), message)

    # Operators

    async def _operate(self, at: float) -> None:
        """An operator has every failed share tried again."""
        await asyncio.sleep(at)
        for share_id, spent in self.disk.rows("SELECT id, nullifier FROM shares WHERE state = 3 ORDER BY id"):
            one = self.chain.rounds[self.judge.shares[spent].share.round_id]
            service = self.host.service
            if service is None or one.tallying:
                continue
            self.story.tell("operator tries again", spent)
            self.judge.on_pardon(spent)
            try:
                await self.host.ask(partial(_requeue, share_id=share_id))
                service.processor.wake()
            except (HelperError, UnreachableError) as error:
                self.story.tell("not tried again", repr(error))

    # What goes wrong

    async def _episode(self, one: Episode) -> None:
        await asyncio.sleep(one.start)
        name = self.nodes[one.node].name if one.node is not None else ""
        self.story.tell("-->", one.what.value, name, f"for {one.end - one.start:.1f} s", one.amount or "")
        if one.what in (Upset.CRASH, Upset.STOP):
            await self._take_down(one)
            return
        self._set(one, on=True)
        await asyncio.sleep(one.end - self.loop.time())
        self._set(one, on=False)
        self.story.tell("<--", one.what.value, name)

    def _set(self, one: Episode, *, on: bool) -> None:
        what = one.what
        if isinstance(what, Fault):
            assert one.node is not None
            self.nodes[one.node].set_fault(what if on else None)
            if what in LIES:
                self._lied_until = max(self._lied_until, one.end + 60)
            if on and what is Fault.RESET and len(self.nodes) == 1:
                self.judge.heights_wrong.append((one.start, one.end))
        elif isinstance(what, Ill):
            self.provers.ill = what if on else None
        elif what in (Upset.FULL, Upset.IO):
            code = sqlite3.SQLITE_FULL if what is Upset.FULL else sqlite3.SQLITE_IOERR
            self.disk.conn.trouble_with(code if on else None)
        elif what is Upset.SLOW_DISK:
            self.disk.delay = 4.0 if on else USUAL_DELAY
        elif what is Upset.CLOCK:
            self.host.clock.set(one.amount if on else 0.0)
            self.judge.clock_wrong_until = one.end + 60
            self._lied_until = max(self._lied_until, one.end + 60)
        elif what is Upset.HALT:
            self.chain.halted = on
        elif what is Upset.CONGESTION:
            self.chain.delay = 60.0 if on else 0.0
        elif what is Upset.OUTAGE:
            for node in self.nodes:
                node.set_fault(Fault.AWAY if on else None)

    async def _take_down(self, one: Episode) -> None:
        """Kill or stop the service at a moment of its own, and start it again."""
        async with self._down:
            if one.what is Upset.STOP:
                await self.host.stop()
            else:
                await self._crash()
            self.judge.look_at_disk()
            await asyncio.sleep(max(0.0, one.end - self.loop.time()))
            self.host.start()

    async def _crash(self) -> None:
        moment = self._dice.choice(MOMENTS)
        self._armed = (moment, self._dice.randint(1, 2 if moment in ("proof", "broadcast") else 6))
        self._shot.clear()
        if self._armed[0] != "now":
            try:
                async with asyncio.timeout(KILL_PATIENCE):
                    await self._shot.wait()
            except TimeoutError:
                pass
        self._armed = None
        self.host.die()
        await self.host.bury()

    def _count_down(self, moment: str) -> None:
        """Kill the service at the n-th such moment."""
        if self._armed is None or self._armed[0] != moment:
            return
        left = self._armed[1] - 1
        self._armed = (moment, left)
        if left == 0:
            self.story.tell("the kill comes", moment)
            self.host.die()
            self._shot.set()

    def _on_broadcast(self, message: RevealMessage, node: SimNode) -> None:
        self.judge.on_broadcast(message, node)
        self._count_down("broadcast")

    def _monitor(self, passes: int) -> None:
        """The queue's loop does not spin; the seed ends when it does."""
        self.judge.counts["most passes"] = max(self.judge.counts["most passes"], passes)
        if passes > PASSES_A_SECOND * MONITOR_SECONDS and not self._spins.done():
            self.story.fail("somebody spins", passes)
            self._spins.set_result(None)


async def _requeue(service: Service, share_id: int) -> None:
    await operator_retry(service.store, share_id)


def stream(seed: int, purpose: str) -> random.Random:
    """Dice of their own for each purpose: what one draws changes nothing for the others."""
    return random.Random(f"{seed} {purpose}")
