"""Each lie changes exactly the answers that it names, and stays consistent with itself."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import cache
from itertools import combinations
from typing import Any, TypeVar

import pytest

from helper.chain.broadcast_outcome import Verdict
from helper.chain.reveal_transaction import RevealMessage
from helper.errors import ChainError
from tests.simulation.chain import EPOCH, SimChain, SimRound, prove_reveal
from tests.simulation.clients import ServiceRun, SimClient, SimRpc
from tests.simulation.event_log import EventLog
from tests.simulation.fakes import SimTree
from tests.simulation.liar import BRIEF_SECONDS, SCRIPTED_LIES, Lie
from tests.simulation.node import NodeFault, SimNode
from tests.simulation.run import run_seed
from tests.simulation.scenario import SETTLING_SECONDS, LiarPlan, ServiceFault, draw_scenario
from tests.simulation.virtual_loop import SimLoop
from tests.simulation.world import PROPOSALS, seeded_random

T = TypeVar("T")

Answers = dict[str, Any]

HEAD, BLOCK, TIME, FUTURE = "head", "block", "block time", "block above the head"
ROUNDS, TREE, SPENT, RESULT, SEND = "rounds", "tree", "spent", "result", "forwarded reveal"
CHANGED: dict[Lie, set[str]] = {
    Lie.AHEAD: {HEAD},
    Lie.AHEAD_BRIEFLY: {HEAD},
    Lie.AHEAD_GROWING: {HEAD},
    Lie.LOW: {HEAD},
    Lie.ONE_HEIGHT: {HEAD},
    Lie.EMPTY_BLOCKS: {BLOCK},
    Lie.FUTURE_BLOCKS: {HEAD, FUTURE},
    Lie.FORGED_TIME: {HEAD, TIME},
    Lie.OLD_HEADS: {HEAD},
    Lie.FALSE_END: {ROUNDS},
    Lie.FALSE_PROPOSALS: {ROUNDS},
    Lie.FALSE_CREATED: {ROUNDS},
    Lie.FALSE_STATUS: {ROUNDS},
    Lie.FALSE_TREE: {TREE},
    Lie.EXTENDED_TREE: {TREE},
    Lie.FALSE_SPENT: {SPENT, RESULT, SEND},
    Lie.FALSE_CIRCUIT: {SEND},
    Lie.ERROR_TEXTS: {BLOCK, TIME, FUTURE},
    Lie.INVENTED_BLOCK: {HEAD, FUTURE, SEND},
    Lie.NO_ROUNDS: {ROUNDS},
    Lie.EXTRA_ROUND: {ROUNDS},
    Lie.DISPUTE: {BLOCK},
    Lie.INDEX_GAPS: {RESULT},
    Lie.BAD_RESULTS: {RESULT},
    Lie.TWIN: {BLOCK, TREE, RESULT, SEND},
    Lie.SWALLOW: {SEND},
}
"""Which answers each lie changes."""


class Situation:
    """A chain with a round, votes and two counted reveals; a node begins to lie before the last vote and reveal."""

    def __init__(self, loop: SimLoop) -> None:
        self.rng = random.Random(7)
        self.event_log = EventLog(loop)
        self.chain = SimChain(random.Random(1), self.event_log, interval=(1.0, 1.0), circuit="k10")
        self.node = SimNode("node0:1317", self.chain, random.Random(2), self.event_log)
        self.client, self.rpc = SimClient(self.node, ServiceRun()), SimRpc(self.node, ServiceRun())
        self.round = SimRound(b"r" * 32, int(EPOCH) + 3600, PROPOSALS)
        even = (self.reveal(number) for number in range(2, 50, 2))
        self.counted = next(message for message in even if message.tx_hash()[0] % 2)

    def reveal(self, number: int) -> RevealMessage:
        return RevealMessage(bytes([number]) * 32, bytes(64), 1, 0, b"proof", self.round.round_id, 1)

    async def vote_and_count(self, message: RevealMessage) -> None:
        vote = asyncio.ensure_future(self.chain.cast_vote(self.round, self.rng.randbytes(32)))
        await asyncio.sleep(1)
        self.chain.submit_transaction(message.to_tx(), message, code=0)
        self.chain.make_block()
        await vote
        await asyncio.sleep(1)

    async def set_up(self, lies: tuple[Lie, ...]) -> None:
        self.chain.new_rounds.append(self.round)
        self.chain.make_block()
        await self.vote_and_count(self.reveal(3))
        self.node.liar.begin(lies, self.node.height, random.Random(3))
        await self.vote_and_count(self.counted)

    async def observe(self) -> Answers:
        chain, client, rpc = self.chain, self.client, self.rpc
        newest = chain.height
        sent = self.proven_reveal()
        await client.broadcast(sent)
        forwarded = sent.to_tx() in chain.mempool
        chain.mempool.clear()
        block = await answer(lambda: client.block(newest))
        results = await answer(lambda: rpc.block_results(newest))
        assert isinstance(block, str) or len(block.txs) == len(results), "REST and RPC tell the same lie"
        future = await answer(lambda: client.block(newest + 20))
        tree = await client.tree_latest(self.round.round_id)
        assert tree is not None
        leaves = await client.leaves(self.round.round_id, 1, tree.height)
        assert root_of([leaf.leaves for leaf in leaves]) == (tree.root, tree.size), "leaves match their root"
        return {
            HEAD: await client.latest_block(),
            BLOCK: block if isinstance(block, str) else block.txs,
            TIME: block if isinstance(block, str) else block.head.time,
            FUTURE: future,
            ROUNDS: (await client.rounds()).rounds,
            TREE: tree,
            SPENT: await rpc.is_spent(self.round.round_id, bytes(32)),
            RESULT: (await client.tx(self.counted.tx_hash()), await client.tx(bytes(32))),
            SEND: forwarded,
        }

    def proven_reveal(self) -> RevealMessage:
        state = self.round.tree_at(self.chain.height)
        assert state is not None
        message = RevealMessage(b"s" * 32, bytes(64), 1, 0, b"", self.round.round_id, state.height)
        return prove_reveal(message, "k10", state.root)


async def answer(request: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await request()
    except ChainError as error:
        return str(error)


def root_of(leaves: list[bytes]) -> tuple[bytes, int]:
    tree = SimTree()
    tree.append(b"".join(leaves))
    return tree.root(), len(tree)


def run_situation(lies: tuple[Lie, ...], use: Callable[[Situation], Awaitable[T]]) -> T:
    """Use the situation with a node that tells these lies, in virtual time."""
    loop = SimLoop(seeded_random(1, "loop"), shuffled=False)

    async def run() -> T:
        situation = Situation(loop)
        await situation.set_up(lies)
        return await use(situation)

    try:
        result: T = loop.run_until_complete(run())
        return result
    finally:
        loop.close()


@cache
def observe(*lies: Lie) -> Answers:
    return run_situation(lies, Situation.observe)


def changes(*lies: Lie) -> set[str]:
    truth, told = observe(), observe(*lies)
    return {name for name in truth if truth[name] != told[name]}


@pytest.mark.parametrize("lie", Lie, ids=lambda lie: lie.name)
def test_lie_changes_exactly_the_answers_that_it_names(lie: Lie) -> None:
    assert changes(lie) == CHANGED[lie]


def test_any_two_lies_at_once_change_nothing_else() -> None:
    for pair in combinations(Lie, 2):
        assert changes(*pair) <= CHANGED[pair[0]] | CHANGED[pair[1]], pair


def test_invented_block_contains_the_reveals_that_were_sent_to_the_node() -> None:
    async def check(situation: Situation) -> None:
        message = situation.proven_reveal()
        assert (await situation.client.broadcast(message)).verdict is Verdict.ACCEPTED
        height = (await situation.client.latest_block()).height + 1
        assert await situation.client.block(height) is None
        situation.chain.make_block()
        assert (await situation.client.latest_block()).height == height
        block, results = await situation.client.block(height), await situation.rpc.block_results(height)
        assert block is not None
        assert results is not None
        assert block.txs == (message.to_tx(),)
        assert results == [(message.round_id, message.nullifier)]
        assert await situation.client.tx(message.tx_hash()) is not None
        assert not situation.chain.confirmed.get((message.round_id, message.nullifier))

    run_situation((Lie.INVENTED_BLOCK,), check)


def test_false_heads_are_constant_brief_or_growing() -> None:
    async def check(situation: Situation) -> None:
        for lie, first, later in ((Lie.AHEAD, 60, 60), (Lie.AHEAD_BRIEFLY, 90, 0), (Lie.AHEAD_GROWING, 0, 10)):
            situation.node.liar.begin((lie,), situation.node.height, random.Random(1))
            heights = [situation.node.served_head().height]
            await asyncio.sleep(BRIEF_SECONDS)
            heights.append(situation.node.served_head().height)
            assert [height - situation.chain.height for height in heights] == [first, later], lie

    run_situation((), check)


@pytest.mark.parametrize("nodes", [2, 3])
def test_one_node_lies_until_the_run_settles_and_only_another_of_three_has_faults(nodes: int) -> None:
    drawn = set[tuple[Lie, ...]]()
    for seed in range(60):
        plan = draw_scenario(seed, LiarPlan((), nodes))
        assert len(plan.nodes_with_rpc) == nodes
        assert ServiceFault.OUTAGE not in {episode.fault for episode in plan.episodes}
        (liar,) = {episode.node for episode in plan.lie_episodes}
        faults = {(episode.node, isinstance(episode.fault, NodeFault)) for episode in plan.episodes}
        others = set(range(nodes)) - {liar, plan.healthy_node}
        assert len(others) == nodes - 2
        assert faults - {(None, False)} == {(other, True) for other in others}
        assert max(episode.end for episode in plan.lie_episodes) <= plan.duration - SETTLING_SECONDS
        drawn |= {episode.lies for episode in plan.lie_episodes}
    assert {lie for lies in drawn for lie in lies} == set(Lie) - SCRIPTED_LIES


def test_seed_with_liar_is_reproducible_and_differs_from_the_seed_without() -> None:
    liar = LiarPlan((Lie.SWALLOW, Lie.EMPTY_BLOCKS), 3)
    first, again = run_seed(44, liar=liar), run_seed(44, liar=liar)
    assert first.digest == again.digest
    assert first.digest != run_seed(44).digest
