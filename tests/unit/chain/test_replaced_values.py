"""One value of a node's answer is replaced, whichever it is: nothing that is agreed changes, and no loop ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helper.errors import ChainError
from tests.unit.chain.fakes import ROUND_ID, FakeNode, json_response, read_recorded
from tests.unit.chain.test_unusual_responses import VALUES, paths, replace_value
from tests.unit.chain.tree_fixtures import TreeEnvironment


@st.composite
def replaced(draw: st.DrawFn, *names: str) -> tuple[str, Any]:
    """The name of a recorded exchange, and its response with one other value, or with one entry twice."""
    name = draw(st.sampled_from(names))
    document = read_recorded(name)["response"]
    path = draw(st.sampled_from(list(paths(document))))
    return name, replace_value(document, path, draw(VALUES))


PARTS = {"rounds": "/rounds", "tree, latest": "/latest", "leaves": "/leaves", "tree at a height with a root": "/84"}


def answer(document: Any) -> Callable[[httpx.Request], httpx.Response]:
    return lambda _request: json_response(200, document)


@pytest.mark.parametrize("hosts", [("liar", "honest"), ("honest", "liar"), ("liar", "honest", "other"), ("liar",)])
@settings(max_examples=25)
@given(lies=st.lists(replaced(*PARTS), min_size=1, max_size=3), first=st.booleans())
def test_false_answers_of_one_node_change_nothing_that_is_agreed(
    hosts: tuple[str, ...], lies: list[tuple[str, Any]], *, first: bool
) -> None:
    asyncio.run(lie(hosts, lies, is_first_start=first))


async def lie(hosts: tuple[str, ...], lies: list[tuple[str, Any]], *, is_first_start: bool) -> None:
    env = TreeEnvironment(*hosts)
    liar = env.nodes[hosts.index("liar")]
    if not is_first_start:
        await sync(env, liar, None)
    stored, leaves = dict(env.store.stored_rounds), await env.store.load_leaves(ROUND_ID)
    for name, document in lies:
        await sync(env, liar, (PARTS[name], document))
        if len(hosts) == 1:
            continue  # the word of the only node counts
        new = set(env.store.stored_rounds) - {ROUND_ID}
        assert new == set(), "no other round is stored"
        if not is_first_start:
            assert env.store.stored_rounds == stored
            assert await env.store.load_leaves(ROUND_ID) == leaves
            assert [known.round_id for known in env.rounds.active_rounds()] == [ROUND_ID]
        assert not {"honest:1317", "other:1317"} & set(env.nodes_in_backoff())
    env.clock.advance(60)
    for _ in range(3):
        await sync(env, liar, None)
        env.clock.advance(60)
    if len(hosts) > 1:
        assert [known.vote_end_time for known in env.rounds.open_rounds()] == [1795268195]
        assert env.trees.last_size(ROUND_ID) == 3
        assert env.trees.leaf(ROUND_ID, 2) is not None


async def sync(env: TreeEnvironment, liar: FakeNode, lie: tuple[str, Any] | None) -> None:
    """Synchronize until each node has been asked first. Only the errors that the loop expects may be raised."""
    liar.faults = {} if lie is None else {lie[0]: answer(lie[1])}
    await env.endpoints.probe_all()
    for _ in range(2 * len(env.nodes) - 1):
        for each in (env.rounds.sync, env.trees.sync):
            with suppress(ChainError):
                await each(100)
        env.clock.advance(1)
