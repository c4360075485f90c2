"""What a campaign is, and what it reports: figures, and goals that each figure held or broke."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.support.postgres import Cluster

T = TypeVar("T")
FigureValue = float | int | str


@dataclass(frozen=True, slots=True)
class CampaignRun:
    """One run of a campaign.

    Attributes:
        seed: what all dice of the run are seeded with.
        is_quick: the short form, as CI runs it.
        folder: an empty folder of the run's own.
        cluster: the PostgreSQL server of the run's own that helpers keep their queues in, None where they have files.
    """

    seed: int
    is_quick: bool
    folder: Path
    cluster: Cluster | None = None

    def scale(self, full: T, quick: T) -> T:
        """A length: of the whole campaign or of its short form."""
        return quick if self.is_quick else full

    def seeded_random(self, purpose: str) -> random.Random:
        """Dice for one purpose; other purposes' throws do not change theirs."""
        return random.Random(f"{self.seed} {purpose}")


@dataclass(frozen=True, slots=True)
class Goal:
    """One promise: the figure, what was promised of it, and whether it held."""

    figure: FigureValue
    promise: str
    is_held: bool


@dataclass(slots=True)
class Findings:
    """What a run found. A campaign without a goal has shown nothing: it counts as broken."""

    figures: dict[str, FigureValue] = field(default_factory=dict)
    goals: dict[str, Goal] = field(default_factory=dict)

    def record_figure(self, name: str, value: FigureValue) -> None:
        """Tell a figure about which nothing is promised."""
        self.figures[name] = _round_figure(value)

    def require_at_most(self, name: str, value: float, bound: float) -> None:
        """Promise an upper bound."""
        self._record_goal(name, value, f"≤ {bound:g}", value <= bound)

    def require_at_least(self, name: str, value: float, bound: float) -> None:
        """Promise a lower bound."""
        self._record_goal(name, value, f"≥ {bound:g}", value >= bound)

    def require_equal(self, name: str, value: FigureValue, expected: FigureValue) -> None:
        """Promise a value."""
        self._record_goal(name, value, f"= {expected}", value == expected)

    @property
    def is_held(self) -> bool:
        """Whether every goal held, and there was one."""
        return bool(self.goals) and all(goal.is_held for goal in self.goals.values())

    @property
    def broken_goals(self) -> list[str]:
        """The goals that did not hold, in words."""
        return [f"{name}: {goal.figure} ({goal.promise})" for name, goal in self.goals.items() if not goal.is_held]

    def merge(self, other: Findings, part: str) -> None:
        """Take over what a part of the campaign found, under that part's name."""
        self.figures |= {f"{part}: {name}": value for name, value in other.figures.items()}
        self.goals |= {f"{part}: {name}": goal for name, goal in other.goals.items()}

    def _record_goal(self, name: str, value: FigureValue, promise: str, is_held: bool) -> None:
        # The same goal may be looked at many times in a run: what counts is the worst.
        previous = self.goals.get(name)
        if previous is None or previous.is_held:
            self.goals[name] = Goal(_round_figure(value), promise, is_held)

    def as_json(self) -> dict[str, Any]:
        """As `build/campaign.json` has it."""
        return {
            "held": self.is_held,
            "figures": self.figures,
            "goals": {
                name: {"figure": goal.figure, "promise": goal.promise, "held": goal.is_held}
                for name, goal in self.goals.items()
            },
        }


@dataclass(frozen=True, slots=True)
class Campaign:
    """A campaign by its name: what it does stands in its module's docstring."""

    name: str
    run: Callable[[CampaignRun], Awaitable[Findings]]


def _round_figure(value: FigureValue) -> FigureValue:
    return round(value, 4) if isinstance(value, float) else value
