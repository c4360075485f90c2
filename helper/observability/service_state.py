"""State of the running service: JSON keys and types, as reported to operators.

`ServiceState` is the section `service` of `GET /stats`; the overview and the metrics are created from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NotRequired, TypedDict

if TYPE_CHECKING:  # commands import this module and must not load ctypes, which is slow to import
    from helper.runtime.process_security import ProcessLimits


class TimingSummary(TypedDict):
    """Number of all samples, and percentiles and extremes of the recent ones in milliseconds; None without samples."""

    count: int
    p50_ms: float | None
    p99_ms: float | None
    min_ms: float | None
    max_ms: float | None


class RecentFailure(TypedDict):
    """A failure by stage and reason."""

    stage: str
    reason: str


class StatsSummary(TypedDict):
    """Counters and timings since the start (`helper.observability.stats.Stats`)."""

    counts: dict[str, int]
    proving_seconds: float
    lateness_start: TimingSummary
    lateness_broadcast: TimingSummary
    proof: TimingSummary
    queue_age: TimingSummary
    confirmation: TimingSummary
    recent_failures: list[RecentFailure]


class CheckState(TypedDict):
    """A readiness check (`helper.observability.readiness_text.Check`)."""

    name: str
    problem: str | None
    note: str | None


class NodeState(TypedDict):
    """State of a node: problem (None if it is used), newest block, and age of that block in seconds."""

    name: str
    reason: str | None
    height: int
    block_age: float | None


class ProverState(TypedDict):
    """The prover workers. `self_test_seconds` is the time of one proof, None before the first."""

    workers: int
    pids: list[int]
    deaths: dict[str, int]
    self_test_seconds: float | None
    timeout_seconds: float


class HealthState(StatsSummary):
    """Health, timings and pauses (`helper.app.health.ServiceHealth`)."""

    ready: bool
    intake_paused: str | None
    checks: list[CheckState]
    process: ProcessLimits
    circuit: str
    chain_id: str | None
    clock_skew: float | None
    block_age: float | None
    tree_lag: int | None
    unread_blocks: int
    endpoints: list[NodeState]
    provers: ProverState


class ClusterState(TypedDict):
    """The sender lease (`helper.cluster.membership.ClusterMember`).

    `sender` is the host that holds the sender lease, "" for none and None while it is unknown. `database_skew` is
    reported for a shared database only.
    """

    sends: bool
    sender: str | None
    database_skew: NotRequired[float]


class ArchiveState(TypedDict):
    """The archive: newest archived block, blocks not yet archived (None while unknown), and current problem."""

    through: int
    behind: int | None
    problem: str | None


class RunningState(HealthState):
    """State that every running service reports."""

    paused: str | None
    height: int | None
    in_hand: int


class ServiceState(RunningState):
    """State of the running service, with the optional keys for a cluster and an archive."""

    role: NotRequired[str]
    sends: NotRequired[bool]
    sender: NotRequired[str | None]
    database_skew: NotRequired[float]
    archive: NotRequired[ArchiveState]


StatusSource = Callable[[], ServiceState]
"""Returns the state of the running service."""
