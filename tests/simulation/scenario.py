"""Draws the scenario of a seed: block intervals, votes and faults.

Drawing is pure and precedes the run. Faults come as *episodes*, each with a start and an end. Before the end of a
round that requires all shares there is a calm of `Scenario.calm_seconds` seconds in which the service, its disk, its
clock, its provers and one node have no fault; the other nodes may. Every share that is due early enough must then be
counted.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from helper.chain.agreement import AGREEING_NODES
from tests.simulation.liar import SCRIPTED_LIES, Lie
from tests.simulation.node import FALSE_RESPONSE_FAULTS, SCRIPTED_FAULTS, NodeFault
from tests.simulation.prover import ProverFault


class ServiceFault(Enum):
    CRASH = "the service is killed"
    STOP = "the service is stopped"
    DISK_FULL = "the disk is full"
    DISK_ERROR = "the disk fails"
    SLOW_DISK = "the disk is slow"
    CLOCK = "the clock is wrong"
    CHAIN_HALTED = "the chain produces no blocks"
    OUTAGE = "all nodes are unreachable"
    CONGESTION = "reveals wait in the mempool"


@dataclass(frozen=True)
class FaultEpisode:
    """A fault with its start and end.

    Attributes:
        node: index of the faulty node; None if the fault is not of a node.
    """

    start: float
    end: float
    fault: NodeFault | ProverFault | ServiceFault
    node: int | None = None
    clock_offset: float = 0.0


@dataclass(frozen=True)
class LieEpisode:
    """A span in which a node tells lies, all of them at once."""

    start: float
    end: float
    node: int
    lies: tuple[Lie, ...]


@dataclass(frozen=True)
class LiarPlan:
    """Which lies one of the nodes tells.

    Attributes:
        lies: told at once; empty for one or two drawn anew for each episode.
    """

    lies: tuple[Lie, ...]
    nodes: int


@dataclass(frozen=True)
class RoundPlan:
    """A round: its begin and end, and whether all shares posted in time must be counted."""

    start: float
    end: int
    requires_all_shares: bool


@dataclass(frozen=True)
class PlannedPost:
    """One share of a vote: when it is posted and when it is due.

    Attributes:
        delay: seconds after the vote is on the chain.
        submit_at: loop second at which it is due; None for immediately.
        repost_delay: seconds after which the wallet posts it again without a due time; None for never.
        rival_delay: seconds after the due time at which another helper reveals it too; None for never.
    """

    index: int
    delay: float
    submit_at: int | None
    repost_delay: float | None
    rival_delay: float | None


@dataclass(frozen=True)
class PlannedVote:
    """One vote: its round, when it is cast, and its shares."""

    round_index: int
    cast_at: float
    posts: tuple[PlannedPost, ...]


@dataclass(frozen=True)
class Scenario:
    """Everything drawn before the run; by default one node, nothing that must end early, and no fault.

    Attributes:
        healthy_node: index of the node without a fault in the calm.
        calm_seconds: seconds of calm before the end of a round that requires all shares.
        circuits: (loop second, circuit that the chain verifies from then on).
        drain_seconds: seconds that all shares together may take.
    """

    duration: float
    poll_seconds: float
    block_interval: tuple[float, float]
    workers: int
    proof_seconds: float
    circuit_setting: str
    is_shuffled: bool
    nodes_with_rpc: tuple[bool, ...] = (True,)
    healthy_node: int = 0
    calm_seconds: float = 0.0
    drain_seconds: float = 0.0
    purge_after_seconds: float = 86_400.0
    has_chain_id: bool = True
    circuits: tuple[tuple[float, str], ...] = ((0.0, "k10"),)
    rounds: tuple[RoundPlan, ...] = ()
    votes: tuple[PlannedVote, ...] = ()
    episodes: tuple[FaultEpisode, ...] = ()
    lie_episodes: tuple[LieEpisode, ...] = ()


CHAIN_PACES = (
    # weight, duration, poll interval, minimum and maximum block interval
    (4, 1500.0, 3.0, (1.5, 6.0)),
    (4, 2600.0, 10.0, (5.0, 12.0)),
    (2, 5600.0, 25.0, (14.0, 28.0)),
)
KILL_TIMEOUT_SECONDS = 90.0
"""Maximum seconds a kill waits for its intended moment."""
SETTLING_SECONDS = 240.0
"""Seconds without faults at the end of a run."""
MAX_PURGE_SECONDS = 600.0
"""Maximum seconds after the end of the last round within which a run waits for its purge."""
LASTING_FAULTS = (
    NodeFault.LOST_REPLY,
    NodeFault.BAD_GATEWAY,
    NodeFault.DROPS_REVEALS,
    NodeFault.REVEALS_FAIL,
    NodeFault.NO_ANCHOR,
    NodeFault.BAD_PROOF,
    NodeFault.SLOW,
    NodeFault.ERRORS,
    NodeFault.REJECTS_BUSY,
)
"""Long faults of a node in how it handles reveals."""
CLOCK_OFFSETS = (-3600.0, 3600.0, 315_360_000.0, -80.0, 80.0, 150.0, -150.0, 30.0)


def draw_liar(seed: int) -> LiarPlan | None:
    """Draw whether one node of a seed lies, and how many nodes there are."""
    rng = random.Random(f"liar or not {seed}")
    return LiarPlan((), rng.choice((2, 3))) if rng.random() < 0.5 else None


def draw_scenario(seed: int, liar: LiarPlan | None = None) -> Scenario:
    rng = random.Random(f"plan {seed}")
    _, length, poll, interval = rng.choices(CHAIN_PACES, [pace[0] for pace in CHAIN_PACES])[0]
    nodes = rng.choices((1, 2, 3), (2, 5, 3))[0]
    workers, proof_seconds = rng.randint(1, 3), rng.choice((0.1, 0.4, 1.0))
    votes = rng.randint(6, 24)
    drain = votes * 4 * proof_seconds * 1.5 / workers + 13 * interval[1]
    first = rng.choice(("k10", "k11"))
    circuits: tuple[tuple[float, str], ...] = ((0.0, first),)
    changes_circuit = rng.random() < 0.2
    if changes_circuit:
        circuits += ((rng.uniform(60, length / 2), "k11" if first == "k10" else "k10"),)
    plan = Scenario(
        duration=length,
        poll_seconds=poll,
        block_interval=interval,
        nodes_with_rpc=tuple(rng.random() < 0.6 for _ in range(nodes)),
        healthy_node=rng.randrange(nodes),
        calm_seconds=330.0 + drain,
        drain_seconds=drain,
        workers=workers,
        proof_seconds=proof_seconds,
        purge_after_seconds=rng.choice((0.0, 120.0, 600.0, 86_400.0)),
        has_chain_id=rng.random() < 0.5,
        circuits=circuits,
        circuit_setting="auto" if changes_circuit or rng.random() < 0.85 else first,
        is_shuffled=rng.random() < 0.85,
    )
    rounds = _draw_rounds(rng, plan)
    plan = replace(plan, rounds=rounds, duration=_end_of_run(plan, rounds))
    plan = replace(plan, votes=tuple(_draw_vote(rng, plan, rounds) for _ in range(votes)))
    if liar is not None:
        plan = _add_liar(random.Random(f"liar {seed}"), plan, liar)
    episodes = _draw_episodes(rng, plan, plan.rounds)
    if liar is not None:
        kept = (e for e in episodes if e.node is None and e.fault is not ServiceFault.OUTAGE)
        episodes = (*plan.episodes, *(episode for episode in kept if not _exceeds_limits(episode, plan)))
    return replace(plan, episodes=episodes)


def _exceeds_limits(episode: FaultEpisode, plan: Scenario) -> bool:
    """Whether the clock or a restart, lies, and faults of another node break a promise at once, as is documented.

    If the clock agrees with a false node's times, the only node without a fault is outvoted: shares are sent early. If
    the service starts, or its clock is set, while the nodes with old blocks are the majority, it proves nothing.
    """
    is_restart, is_clock = episode.fault in (ServiceFault.CRASH, ServiceFault.STOP), episode.fault is ServiceFault.CLOCK
    end = episode.end + KILL_TIMEOUT_SECONDS * is_restart
    lying = [each for each in plan.lie_episodes if each.start < end and episode.start < each.end]
    faulty = [each for each in plan.episodes if each.start < end and episode.start < each.end]
    lies = {lie for each in lying for lie in each.lies}
    is_stale = any(each.fault in (NodeFault.STALE, NodeFault.MINUTES_BEHIND) for each in faulty)
    limited_nodes = {each.node for each in lying} | {each.node for each in faulty}
    is_outvoted = len(plan.nodes_with_rpc) - len(limited_nodes) < AGREEING_NODES
    return (is_clock and episode.clock_offset > 0 and Lie.FORGED_TIME in lies and is_outvoted) or (
        (is_clock or is_restart) and Lie.OLD_HEADS in lies and is_stale
    )


def _add_liar(rng: random.Random, plan: Scenario, liar: LiarPlan) -> Scenario:
    """Let one node tell lies until the run settles, and of three nodes another one have faults.

    Every share that is due early enough must be counted in the meantime.
    """
    # The first configured node gets most requests, and a lie at a round's first listing has nothing to contradict.
    node = rng.choice((0, rng.randrange(liar.nodes)))
    healthy = (node + rng.randrange(1, max(2, liar.nodes))) % liar.nodes
    drawn_lies = [lie for lie in Lie if lie not in SCRIPTED_LIES]
    drawn_faults = [fault for fault in NodeFault if fault not in FALSE_RESPONSE_FAULTS]
    lie_episodes = [
        LieEpisode(start, end, node, liar.lies or tuple(rng.sample(drawn_lies, rng.choice((1, 2)))))
        for start, end in _draw_spans(rng, plan)
    ]
    episodes = [
        FaultEpisode(start, end, rng.choice(drawn_faults), other)
        for other in set(range(liar.nodes)) - {node, healthy}
        for start, end in _draw_spans(rng, plan)
    ]
    return replace(
        plan,
        nodes_with_rpc=tuple(rng.random() < 0.6 for _ in range(liar.nodes)),
        healthy_node=healthy,
        rounds=tuple(replace(plan_round, requires_all_shares=True) for plan_round in plan.rounds),
        episodes=tuple(episodes),
        lie_episodes=tuple(lie_episodes),
    )


def _draw_spans(rng: random.Random, plan: Scenario) -> Iterator[tuple[float, float]]:
    """Draw starts and ends that leave few gaps until the run settles."""
    at, last = rng.choice((0.0, rng.uniform(0, 120))), plan.duration - SETTLING_SECONDS
    while at < last:
        lengths = (rng.uniform(10, 60), rng.uniform(60, 600), plan.duration, plan.duration)
        end = min(last, at + rng.choice(lengths))
        yield at, end
        at = end + rng.choice((0.0, rng.uniform(1, 60)))


def _draw_rounds(rng: random.Random, plan: Scenario) -> tuple[RoundPlan, ...]:
    last = plan.duration - SETTLING_SECONDS - 5 * plan.block_interval[1]
    round_plans = []
    for number in range(rng.choice((1, 1, 2))):
        start = 0.0 if number == 0 else rng.uniform(0, last / 3)
        end = int(rng.uniform(max(start + 200, last * 0.6), last))
        if rng.random() < 0.1:
            end = int(plan.duration + 3600)  # still open when the run ends
        round_plans.append(RoundPlan(start, end, requires_all_shares=rng.random() < 0.75))
    return tuple(round_plans)


def _end_of_run(plan: Scenario, rounds: tuple[RoundPlan, ...]) -> float:
    """The end of the run: once the last round has been closed and purged, little happens."""
    purge = plan.purge_after_seconds if plan.purge_after_seconds <= MAX_PURGE_SECONDS else 0.0
    last = max(plan_round.end for plan_round in rounds)
    return min(plan.duration, last + purge + SETTLING_SECONDS + 5 * plan.block_interval[1])


def _draw_vote(rng: random.Random, plan: Scenario, rounds: tuple[RoundPlan, ...]) -> PlannedVote:
    number = rng.randrange(len(rounds))
    round_plan = rounds[number]
    end = min(round_plan.end, plan.duration - SETTLING_SECONDS)
    at = rng.uniform(round_plan.start + 1, max(round_plan.start + 2, end - 1))
    if rng.random() < 0.6:
        at = rng.uniform(round_plan.start + 1, round_plan.start + 1 + (end - round_plan.start) / 3)
    common_due_time = int(rng.uniform(at, end))
    count = rng.choice((1, 2, 3, 4, 4))
    return PlannedVote(number, at, tuple(_draw_post(rng, index, at, end, common_due_time) for index in range(count)))


def _draw_post(rng: random.Random, index: int, at: float, end: float, common_due_time: int) -> PlannedPost:
    kind = rng.random()
    if kind < 0.2:
        submit = None
    elif kind < 0.4:
        submit = common_due_time
    elif kind < 0.85:
        submit = int(rng.uniform(at, end - 60 if end - 60 > at else end))
    elif kind < 0.95:
        submit = int(end - rng.uniform(0, 90))
    else:
        submit = int(end + rng.choice((0, 0, 1, 100)))
    return PlannedPost(
        index=index,
        delay=rng.choice((0.0, 0.0, rng.uniform(0, 5), rng.uniform(0, 120))),
        submit_at=submit,
        repost_delay=rng.uniform(1, 900) if rng.random() < 0.25 else None,
        rival_delay=rng.choice((0.0, rng.uniform(-2, 10), rng.uniform(0, 300))) if rng.random() < 0.25 else None,
    )


def _draw_episodes(rng: random.Random, plan: Scenario, rounds: tuple[RoundPlan, ...]) -> tuple[FaultEpisode, ...]:
    fault_rate = rng.choice((0.0, 1.0, 2.0, 3.0, 5.0))
    number = int(fault_rate * rng.uniform(4, 10))
    last = plan.duration - SETTLING_SECONDS
    calm_spans = [
        (plan_round.end - plan.calm_seconds - KILL_TIMEOUT_SECONDS, plan_round.end + 30.0)
        for plan_round in rounds
        if plan_round.requires_all_shares
    ]
    drawn = [
        FaultEpisode(rng.uniform(61, 120), rng.uniform(last / 3, last), rng.choice(LASTING_FAULTS), node)
        for node in range(len(plan.nodes_with_rpc))
        if fault_rate and rng.random() < 0.4
    ]
    drawn += [_draw_episode(rng, plan, last) for _ in range(number)]
    if fault_rate and rng.random() < 0.3:
        starts = [rng.uniform(60, last) for _ in range(rng.randint(4, 10))]
        drawn += [FaultEpisode(start, start + rng.choice((0.1, 2.0, 30.0)), ServiceFault.CRASH) for start in starts]
    accepted: list[FaultEpisode] = []
    for episode in drawn:
        spans = calm_spans if episode.node in (None, plan.healthy_node) else ()
        starts = [start for start, over in spans if episode.end > start and episode.start < over]
        shortened = replace(episode, end=min([episode.end, *starts]))
        if shortened.start < shortened.end and not any(_is_overlapping(shortened, other) for other in accepted):
            accepted.append(shortened)
    return tuple(sorted(accepted, key=lambda episode: episode.start))


def _draw_episode(rng: random.Random, plan: Scenario, last: float) -> FaultEpisode:
    start = rng.uniform(20 if plan.has_chain_id else 60, last)
    length = rng.choice((rng.uniform(1, 20), rng.uniform(10, 120), rng.uniform(60, 600)))
    kind = rng.random()
    node: int | None = None
    fault: NodeFault | ProverFault | ServiceFault
    if kind < 0.55:
        fault, node = (
            rng.choice([f for f in NodeFault if f not in SCRIPTED_FAULTS]),
            rng.randrange(len(plan.nodes_with_rpc)),
        )
    elif kind < 0.68:
        fault = rng.choice(list(ProverFault))
    else:
        fault = rng.choice([*ServiceFault, *[ServiceFault.CRASH] * 5, *[ServiceFault.STOP] * 2])
    if fault in (ServiceFault.CRASH, ServiceFault.STOP):
        length = rng.choice((0.1, 3.0, rng.uniform(1, 60), rng.uniform(1, 400)))
    return FaultEpisode(start, min(start + length, last), fault, node, rng.choice(CLOCK_OFFSETS))


def _is_overlapping(episode: FaultEpisode, other: FaultEpisode) -> bool:
    """Return whether two episodes affect the same part at the same time."""
    disjoint = episode.end <= other.start or other.end <= episode.start
    return not disjoint and _affected_part(episode) == _affected_part(other)


def _affected_part(episode: FaultEpisode) -> object:
    subjects = {
        ServiceFault.CRASH: "service",
        ServiceFault.STOP: "service",
        ServiceFault.DISK_FULL: "disk",
        ServiceFault.DISK_ERROR: "disk",
        ServiceFault.SLOW_DISK: "disk",
    }
    if isinstance(episode.fault, NodeFault):
        return episode.node
    return "provers" if isinstance(episode.fault, ProverFault) else subjects.get(episode.fault, episode.fault)
