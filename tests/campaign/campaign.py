"""A run of a campaign, and its findings: figures, and goals with their outcome."""

from __future__ import annotations

import contextlib
import operator
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from helper.observability.stats import percentile
from tests.support.devnet import DevChain
from tests.support.harness import STAND_IN_PROGRAM, HelperProcess, run_chain_and_helper
from tests.support.postgres import Cluster

T = TypeVar("T")
FigureValue = float | int | str


@dataclass(frozen=True, slots=True)
class CampaignRun:
    """One run of a campaign.

    Attributes:
        seed: seeds all random generators of the run.
        is_quick: whether this is the short form that CI runs.
        directory: an empty directory for this run.
        cluster: PostgreSQL server of this run that stores the helpers' queues; None with SQLite files.
    """

    seed: int
    is_quick: bool
    directory: Path
    cluster: Cluster | None = None

    def scale(self, full: T, quick: T) -> T:
        """Return the value for the full campaign or for its short form."""
        return quick if self.is_quick else full

    def run_helper(self, **sections: Any) -> AbstractAsyncContextManager[tuple[DevChain, HelperProcess]]:
        """Run a chain and a helper with fake proofs, both ready; kill them at the end."""
        return run_chain_and_helper(
            self.directory, "--stand-in-proofs", program=STAND_IN_PROGRAM, cluster=self.cluster, **sections
        )

    def seeded_random(self, purpose: str) -> random.Random:
        return random.Random(f"{self.seed} {purpose}")


@contextlib.contextmanager
def run_cluster(store: str) -> Iterator[Cluster | None]:
    """Run the PostgreSQL server that stores the helpers' queues, then remove it; None for SQLite files.

    Raises:
        ClusterError: PostgreSQL is not installed.
    """
    if store == "sqlite":
        yield None
        return
    cluster = Cluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.remove()


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal: the measured value, its bound, and whether it was met."""

    figure: FigureValue
    promise: str
    is_held: bool


@dataclass(slots=True)
class Findings:
    """Findings of a run. A run without goals proves nothing and counts as failed."""

    figures: dict[str, FigureValue] = field(default_factory=dict)
    goals: dict[str, Goal] = field(default_factory=dict)

    def record_figure(self, name: str, value: FigureValue) -> None:
        self.figures[name] = _round_figure(value)

    def require_at_most(self, name: str, value: float, bound: float) -> None:
        self._record_goal(name, value, f"≤ {bound:g}", value <= bound, is_worse=operator.gt)

    def require_at_least(self, name: str, value: float, bound: float) -> None:
        self._record_goal(name, value, f"≥ {bound:g}", value >= bound, is_worse=operator.lt)

    def require_percentile(self, name: str, seconds: list[float], rank: float, bound: float) -> None:
        """Require an upper bound of a percentile, and record the 99th; without a value it is a minute."""
        self.require_at_most(f"{name} p{rank * 100:g} s", percentile(seconds, rank) or 60.0, bound)
        self.record_figure(f"{name} p99 s", percentile(seconds, 0.99) or 60.0)

    def require_equal(self, name: str, value: FigureValue, expected: FigureValue) -> None:
        self._record_goal(name, value, f"= {expected}", value == expected)

    def require_none(self, name: str, found: Iterable[object]) -> None:
        self.require_equal(name, ", ".join(sorted(map(str, found))) or "none", "none")

    @property
    def is_held(self) -> bool:
        """Whether there is a goal and every goal was met."""
        return bool(self.goals) and all(goal.is_held for goal in self.goals.values())

    @property
    def broken_goals(self) -> list[str]:
        return [f"{name}: {goal.figure} ({goal.promise})" for name, goal in self.goals.items() if not goal.is_held]

    def merge(self, other: Findings, part: str) -> None:
        """Add the findings of a part of the campaign under that part's name."""
        self.figures |= {f"{part}: {name}": value for name, value in other.figures.items()}
        self.goals |= {f"{part}: {name}": goal for name, goal in other.goals.items()}

    def _record_goal(
        self,
        name: str,
        value: FigureValue,
        promise: str,
        is_held: bool,
        is_worse: Callable[[Any, Any], bool] = operator.ne,
    ) -> None:
        # A goal may be checked many times in a run: the worst value is reported.
        previous = self.goals.get(name)
        if previous is None or (previous.is_held and (not is_held or is_worse(value, previous.figure))):
            self.goals[name] = Goal(_round_figure(value), promise, is_held)

    def as_json(self) -> dict[str, Any]:
        """Return the findings in the format of `build/campaign.json`."""
        return {
            "held": self.is_held,
            "figures": self.figures,
            "goals": {
                name: {"figure": goal.figure, "promise": goal.promise, "held": goal.is_held}
                for name, goal in self.goals.items()
            },
        }


def _round_figure(value: FigureValue) -> FigureValue:
    return round(value, 4) if isinstance(value, float) else value
