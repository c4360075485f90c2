"""A check of a helper, its result, and lists of checks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol

from conformance.session import Session

Level = Literal["must", "should"]
Verdict = Literal["passed", "failed", "skipped"]
Run = Callable[[Session], Awaitable[str]]
"""Runs a check. Returns the observation; raises CheckFailed or CheckSkipped."""


class Phase(Enum):
    """When a check runs. The phases run in this order, except that SLOW runs during all others.

    SLOW: takes up to 75 s, most of it waiting. QUICK: takes milliseconds. QUIET: needs a chain on which no share is
    due. REVEAL: waits for reveals. RESTART: restarts the helper. END: evaluates the whole run.
    """

    SLOW = "slow"
    QUICK = "quick"
    QUIET = "quiet"
    REVEAL = "reveal"
    RESTART = "restart"
    END = "end"


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        id: stable identifier, `TOPIC-NNN`.
        name: what the helper must or should do, in a few words.
        source: the clause that requires it.
        level: whether a failure fails the run.
        shares: number of new shares that it posts.
        needs_shares: whether it needs shares that the helper accepts.
    """

    id: str
    name: str
    source: str
    level: Level
    run: Run
    phase: Phase = Phase.QUICK
    shares: int = 0
    needs_shares: bool = False
    needs_chain: bool = False
    needs_restart: bool = False
    needs_token: bool = False


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The verdict of a check and the observation: request and response, or why it was skipped."""

    check: Check
    verdict: Verdict
    seen: str


class Case(Protocol):
    """One of several checks that differ in a few values. Its own `level` and `source` apply if it has them."""

    @property
    def number(self) -> int:
        """Number in the id."""

    @property
    def name(self) -> str:
        """What is special about it."""

    async def __call__(self, session: Session) -> str:
        """Run the check."""


class CheckList:
    """The checks of one topic, in order."""

    def __init__(self) -> None:
        self._checks: list[Check] = []

    def __iter__(self) -> Iterator[Check]:
        """All checks."""
        return iter(self._checks)

    def must(self, check_id: str, name: str, source: str, **needs: object) -> Callable[[Run], Run]:
        """Decorate the function of a check whose failure fails the run. `needs` are other attributes of `Check`."""
        return self.add("must", check_id, name, source, **needs)

    def should(self, check_id: str, name: str, source: str, **needs: object) -> Callable[[Run], Run]:
        """Decorate the function of a check whose failure is only shown."""
        return self.add("should", check_id, name, source, **needs)

    def add(self, level: Level, check_id: str, name: str, source: str, **needs: object) -> Callable[[Run], Run]:
        """Decorate the function of a check of this level."""

        def register(run: Run) -> Run:
            self._checks.append(Check(check_id, name, source, level, run, **needs))  # type: ignore[arg-type]
            return run

        return register

    def add_cases(self, topic: str, name: str, cases: Iterable[Case], source: str = "", **needs: object) -> None:
        """Add a check for each case. `{}` in `name` is the name of the case."""
        for case in cases:
            level: Level = getattr(case, "level", "must")
            clause = getattr(case, "source", source)
            self.add(level, f"{topic}-{case.number:03}", name.format(case.name), clause, **needs)(case)
