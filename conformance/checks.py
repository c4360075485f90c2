"""A check of a helper, its result, and lists of checks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal

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
        run: runs the check.
        phase: when it runs.
        shares: number of new shares that it posts.
        needs_shares: whether it needs shares that the helper accepts.
        needs_chain: whether it needs a dev chain.
        needs_restart: whether it needs the command that restarts the helper.
        needs_token: whether it needs the helper's token.
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
