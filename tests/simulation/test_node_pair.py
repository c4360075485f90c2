"""One of two nodes lags, is stopped, has no transaction index, or lies. Both respond 502 to many reveals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.chain import EPOCH
from tests.simulation.liar import Lie
from tests.simulation.node import NodeFault
from tests.simulation.rounds import BACKLOG_START, create_plan
from tests.simulation.run import create_world
from tests.simulation.scenario import FaultEpisode, LieEpisode

SHARES = 48
MAX_SECONDS = 20.0
"""Seconds from the due time until every share must be counted while nodes respond to each reveal."""
MAX_FAULT_SECONDS = 25.0
"""The same while they respond 502 to many reveals: of 1,440 shares of 30 seeds, the last one takes 21 s."""
LIE_SECONDS = 50.0
"""Seconds from the due time for which a node lies; it also drops all reveals."""
SEND_ERROR_RATE = 0.4
BLOCK_SECONDS = 1.0
OUTAGE_SECONDS = 3600.0
CONFIRMATION_SECONDS = 60.0
"""Seconds after the end of an outage within which all counted shares are confirmed and erased."""


def simulate_pair(
    seed: int, *, fault: NodeFault | None = None, lies: tuple[Lie, ...] = ()
) -> tuple[list[float], list[str]]:
    """Run two nodes without RPC, the second with a fault, or with lies until `LIE_SECONDS` after the due time.

    Returns:
        The seconds from the due time until each share was counted, and the broken promises.
    """
    plan = create_plan(seed, {0: SHARES}, 60.0, {}, (0,), 0.0)
    start = BACKLOG_START - 150.0
    plan = replace(
        plan,
        nodes_with_rpc=(False, False),
        proof_seconds=0.1,
        block_interval=(BLOCK_SECONDS, BLOCK_SECONDS),
        episodes=() if fault is None else (FaultEpisode(start, plan.duration, fault, 1),),
        lie_episodes=(LieEpisode(start, BACKLOG_START + LIE_SECONDS, 1, lies),) if lies else (),
    )
    with create_world(seed, plan) as world:
        for node in world.nodes:
            node.send_error_rate = SEND_ERROR_RATE
        world.loop.run_until_complete(world.run())
    due_at = EPOCH + BACKLOG_START
    counted = sorted(world.chain.head(height).time - due_at for height in world.chain.confirmed.values())
    return counted, world.event_log.violations


@pytest.mark.parametrize("fault", [None, NodeFault.FAR_BEHIND, NodeFault.STOPPED, NodeFault.NO_INDEX])
def test_every_share_is_counted_in_time_if_one_of_two_honest_nodes_has_no_second_copy(fault: NodeFault | None) -> None:
    counted, violations = simulate_pair(1, fault=fault)
    assert (len(counted), [seconds for seconds in counted if seconds > MAX_FAULT_SECONDS]) == (SHARES, [])
    waiting = [violation for violation in violations if "a witness remains after confirmation" in violation]
    is_alone = fault in (NodeFault.STOPPED, NodeFault.NO_INDEX)
    assert violations == (waiting if is_alone else []), "no second node can tell what was counted"


LIES = (Lie.AHEAD, Lie.AHEAD_GROWING, Lie.FUTURE_BLOCKS, Lie.FORGED_TIME, Lie.DISPUTE, Lie.INVENTED_BLOCK)


@pytest.mark.parametrize("lie", LIES)
def test_honest_node_receives_every_share_while_the_other_lies(lie: Lie) -> None:
    counted, violations = simulate_pair(1, lies=(lie, Lie.SWALLOW))
    assert (len(counted), [seconds for seconds in counted if seconds > LIE_SECONDS]) == (SHARES, [])
    assert violations == []


def test_every_share_is_counted_while_one_of_two_nodes_is_unreachable_for_an_hour() -> None:
    """The shares become due one by one. They are confirmed and erased only after the node's return."""
    plan, end = create_plan(1, {0: SHARES}, OUTAGE_SECONDS / 0.75, {}, (), 0.0), BACKLOG_START + OUTAGE_SECONDS
    plan = replace(
        plan,
        duration=end + CONFIRMATION_SECONDS,
        poll_seconds=5.0,
        block_interval=(5.0, 5.0),
        nodes_with_rpc=(False, False),
        proof_seconds=0.1,
        episodes=(FaultEpisode(BACKLOG_START, end, NodeFault.UNREACHABLE, 1),),
    )
    rows_before_return: list[int] = []
    with create_world(1, plan) as world:
        disk = world.disk
        world.loop.call_at(end - 1.0, lambda: rows_before_return.append(len(disk.query_rows("SELECT id FROM shares"))))
        world.loop.run_until_complete(world.run())
    counted = {spent: world.chain.head(height).time for (_, spent), height in world.chain.confirmed.items()}
    late = [at - EPOCH - world.promise_checker.shares[spent].due_at for spent, at in counted.items()]
    assert (len(late), [seconds for seconds in late if seconds > MAX_SECONDS]) == (SHARES, [])
    assert (rows_before_return, world.event_log.violations) == ([SHARES], [])
