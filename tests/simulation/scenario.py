"""What a seed holds in store: the chain's pace, the votes, and what goes wrong when. Pure: drawn before anything runs.

Faults come as *episodes*: something is wrong from one second to another. Before the end of a *demanding* round there is
a calm of `Plan.calm` seconds in which the service, its disk, its clock, its provers and one node are well; the other
nodes go on as badly as before. Every share that is due early enough must then be counted.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from enum import Enum

from tests.simulation.node import Fault
from tests.simulation.prover import Ill


class Upset(Enum):
    """What may go wrong beside nodes and provers."""

    CRASH = "the service is killed"
    STOP = "the service is stopped"
    FULL = "the disk is full"
    IO = "the disk fails"
    SLOW_DISK = "the disk is slow"
    CLOCK = "the clock is wrong"
    HALT = "the chain stands still"
    OUTAGE = "all nodes are away"
    CONGESTION = "reveals wait in the mempool"


@dataclass(frozen=True)
class Episode:
    """Something is wrong from one second to another.

    Attributes:
        what: what it is.
        node: which node has it; None for what is no node's.
        amount: seconds by which the clock is wrong.
    """

    start: float
    end: float
    what: Fault | Ill | Upset
    node: int | None = None
    amount: float = 0.0


@dataclass(frozen=True)
class RoundPlan:
    """A round: when it begins and ends, and whether all shares in time must be counted."""

    begin: float
    end: int
    demanding: bool


@dataclass(frozen=True)
class Posting:
    """One share of a vote: when it is posted, and its time.

    Attributes:
        index: of the share.
        wait: seconds after the vote is on the chain.
        submit: loop second at which it is to be revealed; None for at once.
        again: seconds after which the wallet posts it again, with no time; None for never.
        rival: seconds after its time at which another helper reveals it too; None for never.
    """

    index: int
    wait: float
    submit: int | None
    again: float | None
    rival: float | None


@dataclass(frozen=True)
class Vote:
    """One vote: its round, when it is cast, and its shares."""

    round: int
    at: float
    postings: tuple[Posting, ...]


@dataclass(frozen=True)
class Plan:
    """Everything that is drawn beforehand.

    Attributes:
        length: seconds until everything ends.
        poll: the service's setting.
        interval: least and greatest seconds between blocks.
        good: the node that is well in the calm.
        calm: seconds of calm before a demanding round's end.
        circuits: what the chain verifies from which second on.
        drain: seconds that all shares together may take.
    """

    length: float
    poll: float
    interval: tuple[float, float]
    rpcs: tuple[bool, ...]
    good: int
    calm: float
    drain: float
    workers: int
    proof_seconds: float
    purge_after: float
    chain_id_set: bool
    circuits: tuple[tuple[float, str], ...]
    setting: str
    shuffled: bool
    rounds: tuple[RoundPlan, ...] = ()
    votes: tuple[Vote, ...] = ()
    episodes: tuple[Episode, ...] = field(default=())


PACES = (
    # weight, length, poll, least and greatest interval of blocks
    (4, 1500.0, 3.0, (1.5, 6.0)),
    (4, 3600.0, 10.0, (5.0, 12.0)),
    (2, 8000.0, 25.0, (14.0, 28.0)),
)
KILL_PATIENCE = 90.0
"""Seconds that a kill may wait for the moment that it is meant for."""
SETTLING = 240.0
"""Seconds at the end in which nothing is wrong any more."""
BAD_HABITS = (
    Fault.LOST_REPLY,
    Fault.BAD_GATEWAY,
    Fault.SWALLOWS,
    Fault.FAILS,
    Fault.NO_ANCHOR,
    Fault.BAD_PROOF,
    Fault.SLOW,
    Fault.ERRORS,
    Fault.BUSY,
)
CLOCKS = (-3600.0, 3600.0, 315_360_000.0, -80.0, 80.0, 150.0, -150.0, 30.0)


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    dice = random.Random(f"plan {seed}")
    _, length, poll, interval = dice.choices(PACES, [pace[0] for pace in PACES])[0]
    nodes = dice.choices((1, 2, 3), (2, 5, 3))[0]
    workers, proof_seconds = dice.randint(1, 3), dice.choice((0.1, 0.4, 1.0))
    votes = dice.randint(6, 24)
    drain = votes * 4 * proof_seconds * 1.5 / workers + 13 * interval[1]
    first = dice.choice(("k10", "k11"))
    circuits: tuple[tuple[float, str], ...] = ((0.0, first),)
    change = dice.random() < 0.2
    if change:
        circuits += ((dice.uniform(60, length / 2), "k11" if first == "k10" else "k10"),)
    plan = Plan(
        length=length,
        poll=poll,
        interval=interval,
        rpcs=tuple(dice.random() < 0.6 for _ in range(nodes)),
        good=dice.randrange(nodes),
        calm=330.0 + drain,
        drain=drain,
        workers=workers,
        proof_seconds=proof_seconds,
        purge_after=dice.choice((0.0, 120.0, 600.0, 86_400.0)),
        chain_id_set=dice.random() < 0.5,
        circuits=circuits,
        setting="auto" if change or dice.random() < 0.85 else first,
        shuffled=dice.random() < 0.85,
    )
    rounds = _rounds(dice, plan)
    cast_votes = tuple(_vote(dice, plan, rounds) for _ in range(votes))
    return replace(plan, rounds=rounds, votes=cast_votes, episodes=_episodes(dice, plan, rounds))


def _rounds(dice: random.Random, plan: Plan) -> tuple[RoundPlan, ...]:
    last = plan.length - SETTLING - 5 * plan.interval[1]
    made = []
    for number in range(dice.choice((1, 1, 2))):
        begin = 0.0 if number == 0 else dice.uniform(0, last / 3)
        end = int(dice.uniform(max(begin + 200, last * 0.6), last))
        if dice.random() < 0.1:
            end = int(plan.length + 3600)  # still open when everything ends
        made.append(RoundPlan(begin, end, demanding=dice.random() < 0.75))
    return tuple(made)


def _vote(dice: random.Random, plan: Plan, rounds: tuple[RoundPlan, ...]) -> Vote:
    number = dice.randrange(len(rounds))
    one = rounds[number]
    end = min(one.end, plan.length - SETTLING)
    at = dice.uniform(one.begin + 1, max(one.begin + 2, end - 1))
    if dice.random() < 0.6:
        at = dice.uniform(one.begin + 1, one.begin + 1 + (end - one.begin) / 3)
    herd = int(dice.uniform(at, end))
    count = dice.choice((1, 2, 3, 4, 4))
    return Vote(number, at, tuple(_posting(dice, index, at, end, herd) for index in range(count)))


def _posting(dice: random.Random, index: int, at: float, end: float, herd: int) -> Posting:
    kind = dice.random()
    if kind < 0.2:
        submit = None
    elif kind < 0.4:
        submit = herd
    elif kind < 0.85:
        submit = int(dice.uniform(at, end - 60 if end - 60 > at else end))
    elif kind < 0.95:
        submit = int(end - dice.uniform(0, 90))
    else:
        submit = int(end + dice.choice((0, 0, 1, 100)))
    return Posting(
        index=index,
        wait=dice.choice((0.0, 0.0, dice.uniform(0, 5), dice.uniform(0, 120))),
        submit=submit,
        again=dice.uniform(1, 900) if dice.random() < 0.25 else None,
        rival=dice.choice((0.0, dice.uniform(-2, 10), dice.uniform(0, 300))) if dice.random() < 0.25 else None,
    )


def _episodes(dice: random.Random, plan: Plan, rounds: tuple[RoundPlan, ...]) -> tuple[Episode, ...]:
    wildness = dice.choice((0.0, 1.0, 2.0, 3.0, 5.0))
    number = int(wildness * dice.uniform(4, 10))
    last = plan.length - SETTLING
    calms = [(one.end - plan.calm - KILL_PATIENCE, one.end + 30.0) for one in rounds if one.demanding]
    drawn = [_habit(dice, node, last) for node in range(len(plan.rpcs)) if wildness and dice.random() < 0.4]
    drawn += [_episode(dice, plan, last) for _ in range(number)]
    if wildness and dice.random() < 0.3:
        starts = [dice.uniform(60, last) for _ in range(dice.randint(4, 10))]
        drawn += [Episode(start, start + dice.choice((0.1, 2.0, 30.0)), Upset.CRASH) for start in starts]
    found: list[Episode] = []
    for wished in drawn:
        one = wished if wished.node not in (None, plan.good) else _calmed(wished, calms)
        if one.start < one.end and not any(_clash(one, other) for other in found):
            found.append(one)
    return tuple(sorted(found, key=lambda one: one.start))


def _calmed(one: Episode, calms: list[tuple[float, float]]) -> Episode:
    """The episode, ended where a calm begins."""
    end = min([one.end, *(begin for begin, over in calms if one.end > begin and one.start < over)])
    return replace(one, end=end)


def _habit(dice: random.Random, node: int, last: float) -> Episode:
    """What is wrong with a node most of the time: it does badly with reveals."""
    return Episode(dice.uniform(61, 120), dice.uniform(last / 3, last), dice.choice(BAD_HABITS), node)


def _episode(dice: random.Random, plan: Plan, last: float) -> Episode:
    start = dice.uniform(20 if plan.chain_id_set else 60, last)
    length = dice.choice((dice.uniform(1, 20), dice.uniform(10, 120), dice.uniform(60, 600)))
    kind = dice.random()
    node: int | None = None
    what: Fault | Ill | Upset
    if kind < 0.55:
        what, node = dice.choice(list(Fault)), dice.randrange(len(plan.rpcs))
    elif kind < 0.68:
        what = dice.choice(list(Ill))
    else:
        what = dice.choice([*Upset, *[Upset.CRASH] * 5, *[Upset.STOP] * 2])
    if what in (Upset.CRASH, Upset.STOP):
        length = dice.choice((0.1, 3.0, dice.uniform(1, 60), dice.uniform(1, 400)))
    return Episode(start, min(start + length, last), what, node, dice.choice(CLOCKS))


def _clash(one: Episode, other: Episode) -> bool:
    """Whether two episodes are of the same thing at the same time."""
    apart = one.end <= other.start or other.end <= one.start
    return not apart and _subject(one) == _subject(other)


def _subject(one: Episode) -> object:
    subjects = {
        Upset.CRASH: "service",
        Upset.STOP: "service",
        Upset.FULL: "disk",
        Upset.IO: "disk",
        Upset.SLOW_DISK: "disk",
    }
    if isinstance(one.what, Fault):
        return one.node
    return "provers" if isinstance(one.what, Ill) else subjects.get(one.what, one.what)
