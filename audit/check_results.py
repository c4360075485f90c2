"""The checks of an audit and their verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from audit.own_shares import OwnShares
from helper.core.json_records import HEX_32, fact, to_json

CHECKS: Final = {
    "A1": "all blocks of the vote were read, and contain the published number of reveals per option",
    "A2": "every nullifier is canonical and was counted once",
    "A3": "every reveal has a valid proof against the commitment tree",
    "A4": "every reveal is for an option of the round, in time, with an earlier anchor",
    "A5": "no proposal has more than 16 reveals per cast vote",
    "B1": "the revealed ciphertexts add up to the published sums",
    "B2": "the options with reveals are those with a published sum",
    "C1": "the election key, threshold and validator indices belong together",
    "C2": "the contributions to the key ceremony add up to the key's commitments",
    "C3": "every partial decryption has a valid proof for the recomputed sum",
    "C4": "the partial decryptions of each option give the published total",
    "C5": "the totals are possible amounts",
    "C6": "results, summary and tally transaction have the same totals",
    "C7": "the tally took place after the end of voting",
    "D1": "every leaf of the commitment tree comes from a transaction",
    "D2": "the published roots match the leaves",
    "D3": "the round id is the hash of the round's fields",
    "D4": "votes have delegations, and no delegation or vote was used twice",
    "E": "several nodes report the same block and state, and the same key, titles and labels of the round",
}
"""What each check shows if it passes, by id, in the order of the report."""

_MAX_SHOWN_PROBLEMS: Final = 3
_MAX_SHOWN_REASONS: Final = 5


class Verdict(StrEnum):
    """Verdict of one check or of an audit."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_CHECKED = "not_checked"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check."""

    id: str = fact("Identifier of the check, a key of `CHECKS`.")
    verdict: Verdict = fact("The verdict.")
    why: str = fact("What failed, or why it could not be checked; empty if the check passed.")
    count: int = fact("Number of items that were checked.")


@dataclass(slots=True)
class Findings:
    """What one check has found so far.

    A problem makes the check fail. Missing data makes it "not checked" unless there is a problem.

    Attributes:
        count: number of items that were checked.
        problems: the first problems, which are shown.
        problem_count: number of all problems.
        missing: reasons why data could not be checked.
    """

    count: int = 0
    problems: list[str] = field(default_factory=list)
    problem_count: int = 0
    missing: list[str] = field(default_factory=list)

    def add_problem(self, problem: str) -> None:
        """Record a violation."""
        self.problem_count += 1
        if len(self.problems) < _MAX_SHOWN_PROBLEMS:
            self.problems.append(problem)

    def add_missing(self, reason: str) -> None:
        """Record data that could not be checked."""
        if reason not in self.missing and len(self.missing) < _MAX_SHOWN_REASONS:
            self.missing.append(reason)

    def result(self, check_id: str) -> CheckResult:
        """Return the verdict."""
        if self.problems:
            shown = "; ".join(self.problems)
            hidden = self.problem_count - len(self.problems)
            why = f"{shown}; and {hidden} more" if hidden > 0 else shown
            return CheckResult(check_id, Verdict.FAILED, why, self.count)
        if self.missing:
            return CheckResult(check_id, Verdict.NOT_CHECKED, "; ".join(self.missing), self.count)
        return CheckResult(check_id, Verdict.PASSED, "", self.count)


def summarize(checks: Iterable[CheckResult]) -> str:
    """Return how many checks passed, and which others failed or were not checked, with the reasons."""
    of_verdict: dict[Verdict, list[CheckResult]] = {verdict: [] for verdict in Verdict}
    for check in checks:
        of_verdict[check.verdict].append(check)
    total = sum(map(len, of_verdict.values()))
    parts = [f"{len(of_verdict[Verdict.PASSED])} of {total} checks passed"]
    for verdict, text in ((Verdict.FAILED, "failed"), (Verdict.NOT_CHECKED, "not checked")):
        by_reason: dict[str, list[str]] = {}
        for check in of_verdict[verdict]:
            by_reason.setdefault(check.why, []).append(check.id)
        if by_reason:
            parts.append(f"{text}: " + ", ".join(f"{', '.join(ids)} ({why})" for why, ids in by_reason.items()))
    return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class AuditResult:
    """Result of an audit, with one entry for each check."""

    round_id: bytes
    checks: tuple[CheckResult, ...]

    @property
    def verdict(self) -> Verdict:
        """Failed if a check failed, else not checked if one was not, else passed."""
        verdicts = {check.verdict for check in self.checks}
        return next(
            (verdict for verdict in (Verdict.FAILED, Verdict.NOT_CHECKED) if verdict in verdicts), Verdict.PASSED
        )

    def to_json(self, own: OwnShares | None = None) -> dict[str, Any]:
        """Return the value that `audit --json` prints. `own`: the shares of `--mine`."""
        return to_json(AuditDocument(round=self.round_id.hex(), verdict=self.verdict, checks=self.checks, mine=own))


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditDocument:
    """`audit`."""

    round: str = fact("Round id, hex.", pattern=HEX_32)
    verdict: Verdict = fact("failed if a check failed, else not_checked if one could not be run, else passed.")
    checks: Sequence[CheckResult] = fact("All checks, in a fixed order. Their meaning is in docs/audit.md.")
    mine: OwnShares | None = fact("With --mine: the voter's own shares.", optional=True)
