"""State of the running service, as operators see it, and its readiness checks. Fast to import.

`ServiceState` is the section `service` of `GET /stats`. Page, commands, metrics and `doctor` read its fields; `doctor`
parses the JSON into the same class. A field that another version does not report has its default.

The text of readiness checks, as in `/readyz?verbose`, is public: it contains no data of a single share and no name of
a node.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from helper.core.json_records import fact
from helper.runtime.process_security import ProcessLimits

_CHECK_LINE: Final = re.compile(r"\[([+-])\](\S+) (?:ok(?:: (.*))?|failed: (.*))")


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one readiness check."""

    name: str = fact("Name of the check.")
    problem: str | None = fact("Why it failed, null if it passed.", default=None)
    note: str | None = fact(
        "Information for operators on a check that passed, such as an unconfirmed change.", default=None
    )

    @property
    def has_passed(self) -> bool:
        """Whether the check passed."""
        return self.problem is None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingSummary:
    """Number of all samples, and percentiles and extremes of the recent ones in milliseconds; null without samples."""

    count: int = 0
    p50_ms: float | None = None
    p99_ms: float | None = None
    min_ms: float | None = None
    max_ms: float | None = None


@dataclass(frozen=True, slots=True)
class RecentFailure:
    """A failure by stage and reason."""

    stage: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """State of a node."""

    name: str = fact("Host and port of the node.", default="")
    reason: str | None = fact("Why the node is not used; null if it is.", default=None)
    height: int = fact("Height of its newest block.", default=0)
    block_age: float | None = fact("Age of that block in seconds.", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProverState:
    """The prover workers."""

    workers: int = fact("Maximum number of concurrent proofs.", metric="helper_prover_slots", default=0)
    pids: Sequence[int] = fact("Running prover workers.", metric="helper_provers_running", default=())
    deaths: Mapping[str, int] = fact("Unexpected exits of workers by reason.", default_factory=dict)
    self_test_seconds: float | None = fact("Time of one proof in seconds; null before the first.", default=None)
    timeout_seconds: float = fact("Timeout of a proof in seconds.", default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveState:
    """The archive."""

    through: int = fact("Height of the newest archived block.", default=0)
    behind: int | None = fact("Blocks not yet archived; null while unknown.", default=None)
    problem: str | None = fact("Current problem; null if there is none.", default=None)


_NO_TIMES: Final = TimingSummary()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """State of the running helper; absent if none is running. More properties may be added."""

    ready: bool = fact("Whether shares are accepted and revealed.", default=False)
    intake_paused: str | None = fact("Why no shares are accepted; null if they are.", default=None)
    checks: Sequence[Check] = fact("Readiness checks.", default=())
    process: ProcessLimits | None = fact("Limits of the process.", default=None)
    circuit: str | None = fact("Circuit in use.", default=None)
    chain_id: str | None = fact("Chain id.", default=None)
    clock_skew: float | None = fact(
        "Local clock minus a block's time on arrival.", metric="helper_clock_skew_seconds", default=None
    )
    block_age: float | None = fact(
        "Local clock minus the time of the newest block.", metric="helper_block_age_seconds", default=None
    )
    tree_lag: int | None = fact(
        "Blocks that the commitment trees are behind the newest block.", metric="helper_tree_lag_blocks", default=None
    )
    unread_blocks: int = fact("Older blocks that are not read yet.", default=0)
    endpoints: Sequence[NodeState] = fact("Chain nodes.", default=())
    provers: ProverState = fact("Prover workers.", default=ProverState())
    counts: Mapping[str, int] = fact("Counters since the start.", default_factory=dict)
    proving_seconds: float = fact("Time during which at least one proof was running.", default=0.0)
    lateness_start: TimingSummary = fact(
        "Time from a share's due time to the start of its proof.",
        metric="helper_start_lateness_seconds",
        default=_NO_TIMES,
    )
    lateness_broadcast: TimingSummary = fact(
        "Time from a share's due time to its broadcast.", metric="helper_broadcast_lateness_seconds", default=_NO_TIMES
    )
    proof: TimingSummary = fact("Duration of a proof.", metric="helper_proof_seconds", default=_NO_TIMES)
    queue_age: TimingSummary = fact(
        "Time since the due time of the oldest due share, at each claim.",
        metric="helper_queue_age_seconds",
        default=_NO_TIMES,
    )
    confirmation: TimingSummary = fact(
        "Time from broadcast to confirmation in a block.", metric="helper_confirmation_seconds", default=_NO_TIMES
    )
    recent_failures: Sequence[RecentFailure] = fact("The latest failures.", default=())
    paused: str | None = fact("Why dispatch is paused; null if it is not.", default=None)
    height: int | None = fact("Height of the newest processed block.", metric="helper_block_height", default=None)
    in_hand: int = fact(
        "Claimed shares: being proven or waiting for a prover.", metric="helper_shares_in_hand", default=0
    )
    role: str | None = fact("Role of this host; absent outside a cluster.", default=None)
    sends: bool | None = fact("Whether this host holds the sender lease.", metric="helper_sends", default=None)
    sender: str | None = fact('Host that holds the sender lease; "" for none, null while unknown.', default=None)
    database_skew: float | None = fact("Clock of a shared database minus the local one, in seconds.", default=None)
    archive: ArchiveState | None = fact("The archive; absent if none is configured.", default=None)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, without those of a cluster, a shared database and an archive if there is none."""
        values = asdict(self)
        absent = [name for name in ("role", "database_skew", "archive") if values[name] is None]
        if self.role is None:
            absent += ["sends", "sender"]
        return {name: value for name, value in values.items() if name not in absent}


StatusSource = Callable[[], ServiceState]
"""Returns the state of the running service."""


def all_passed(checks: Sequence[Check]) -> bool:
    """Return whether all checks passed."""
    return all(check.has_passed for check in checks)


def format_checks(checks: Sequence[Check]) -> str:
    """Format checks as text, one line per check and a summary line."""
    lines = [_format_check(check) for check in checks]
    return "\n".join([*lines, f"readyz check {'passed' if all_passed(checks) else 'failed'}", ""])


def _format_check(check: Check) -> str:
    if not check.has_passed:
        return f"[-]{check.name} failed: {check.problem}"
    return f"[+]{check.name} ok" + (f": {check.note}" if check.note else "")


def parse_checks(text: str) -> list[Check]:
    """Parse the text form. Other lines are ignored."""
    matches = (_CHECK_LINE.fullmatch(line) for line in text.splitlines())
    return [
        Check(match[2], None, match[3]) if match[1] == "+" else Check(match[2], match[4] or "unknown reason")
        for match in matches
        if match
    ]
