"""The queue at one time, and the documents that are created of it.

Metrics and `doctor` read the fields of `QueueSnapshot`. The page and `queue watch` get an `Overview`, `queue stats`
gets `QueueStats`. Only the references of damaged rows concern single shares.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, Literal

import structlog

from helper.chain.chain_data import ENDED_STATUSES, Round
from helper.core.json_records import HEX_32, fact
from helper.core.load_forecast import DrainResult, Outlook, ProofRate, forecast_work, simulate_drain
from helper.core.share import ShareState
from helper.errors import HelperError
from helper.observability.service_state import ServiceState, StatusSource, TimingSummary
from helper.store.models import (
    MINUTES_AHEAD,
    DueForecast,
    FailedShares,
    PurgedShares,
    QueueFilter,
    RetryingShares,
    StoredRound,
)

if TYPE_CHECKING:  # commands import this module, and do not need the database
    from helper.chain.round_registry import RoundRegistry
    from helper.clock import Clock
    from helper.store.queue_reader import QueueReader
    from helper.store.store import Store

log = structlog.get_logger("helper.observability")

Source = Literal["daemon", "file"]
SOURCE: Final = "Source of the data: the running helper or the database file."
"""Description of the field `source`."""

MAX_FAILURE_GROUPS: Final = 100
"""Maximum number of failure groups of `queue stats` and `queue list`."""
MAX_SHOWN_FAILURES: Final = 20
"""Maximum number of failure groups on the page."""
STORE_TIMEOUT_SECONDS: Final = 2.0
"""Timeout in seconds for reads of the store, so that a scrape succeeds even if the disk hangs."""


# ---------------------------------------------------------------- the snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareCounts:
    """Number of shares by state."""

    total: int = fact("Total number of shares.", default=0)
    received: int = fact("Number of shares waiting for their due time.", default=0)
    witnessed: int = fact("Number of shares being proven.", default=0)
    submitted: int = fact("Number of confirmed shares.", default=0)
    failed: int = fact("Number of failed shares.", default=0)
    broadcast: int = fact("Number of shares that may have been sent and are not confirmed.", default=0)

    @classmethod
    def of(cls, states: Mapping[ShareState, int]) -> ShareCounts:
        """Create the counts from those of the store."""
        return cls(total=sum(states.values()), **{state.json_name: number for state, number in states.items()})

    @property
    def unproven(self) -> int:
        """Number of shares that wait for a proof or are being proven."""
        return self.received + self.witnessed

    def by_state(self) -> dict[str, int]:
        """Return the counts without the total, by name of the state."""
        return {state.json_name: getattr(self, state.json_name) for state in ShareState}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSnapshot:
    """Shares of a round, and when they are due.

    Attributes:
        round_id: hex.
        status: the chain's number, 0 while the round is not known.
        vote_end_time: Unix seconds, 0 while the round is not known.
        due_per_minute: waiting shares due in each of the next 60 minutes; the first includes overdue shares.
        later: waiting shares due after that.
    """

    round_id: str
    status: int = 0
    vote_end_time: int = 0
    counts: ShareCounts = ShareCounts()
    due_per_minute: tuple[int, ...] = (0,) * MINUTES_AHEAD
    later: int = 0

    def has_ended(self, now: float) -> bool:
        """Report whether no more reveals count. `now` is in Unix seconds."""
        return self.status > 0 and (self.status in ENDED_STATUSES or self.vote_end_time <= now)


@dataclass(frozen=True, slots=True)
class DamagedRow:
    """A damaged row that is quarantined."""

    ref: str = fact("Reference of the share, as far as it is readable.")
    round: str = fact("Round id, as far as it is readable.")
    state: str = fact("State in the damaged row.")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """The queue at one time.

    Groups are empty if `read_snapshot` was not asked for them. What only a running helper knows has its default
    otherwise.
    """

    at: float = fact("Time in Unix seconds; 0 without due times.")
    total: ShareCounts = fact("Number of shares by state.", default=ShareCounts())
    rounds: Sequence[RoundSnapshot] = fact("Known rounds, and rounds with shares.", default=())
    damaged: Sequence[DamagedRow] = fact(
        "Damaged database rows that were quarantined.", metric="helper_damaged_rows", default=()
    )
    failed: Sequence[FailedShares] = fact("Permanent failures, by stage and reason.", default=())
    purged: Sequence[PurgedShares] = fact("Failures in purged rounds, for as long as they are kept.", default=())
    retries: Sequence[RetryingShares] = fact("Shares that wait for a retry.", default=())
    oldest_due_seconds: float = fact(
        "Time since the due time of the oldest due share.", metric="helper_oldest_due_seconds", default=0.0
    )
    wal_bytes: int = fact("Size of the write-ahead log of the database file.", metric="helper_wal_bytes", default=0)
    erasure_pending_seconds: float = fact(
        "Time for which deleted witnesses have not been erased from the database file.",
        metric="helper_erasure_pending_seconds",
        default=0.0,
    )

    @property
    def known_rounds(self) -> list[RoundSnapshot]:
        """The rounds of which the end is known, the latest end first."""
        known = [row for row in self.rounds if row.status]
        return sorted(known, key=lambda row: -row.vote_end_time)


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperSnapshot:
    """A running helper at one time: the response to `GET /snapshot`, and what a scrape reads.

    Attributes:
        service: state of the service; None without a queue.
        queue: state of its queue; None if the store could not be read.
    """

    service: ServiceState | None = None
    queue: QueueSnapshot | None = None


async def read_snapshot(
    queue: QueueReader,
    rounds: Iterable[Round | StoredRound] = (),
    *,
    now: float | None = None,
    max_failures: int = 0,
    with_retries: bool = False,
    for_overview: bool = False,
) -> QueueSnapshot:
    """Read the queue.

    Args:
        now: Unix seconds; None reads no due times, which takes long for a million waiting shares.
        max_failures: maximum number of failure groups; 0 reads no failures.
        for_overview: do not read what no `Overview` contains, damaged rows and purged failures; read each second.

    Raises:
        StoreError: the queue cannot be read.
    """
    known = {each.round_id: each for each in rounds}
    counts = await queue.count_shares()
    damaged = () if for_overview else await queue.list_damaged()
    ahead = {} if now is None else await queue.count_due_ahead(now=now)
    failed = await queue.list_matching_failures(QueueFilter(), limit=max_failures) if max_failures else ()
    purged = await queue.list_purged_failures() if max_failures and not for_overview else ()
    retries = await queue.list_retries(now=now) if with_retries and now is not None else ()
    total: Counter[ShareState] = Counter()
    for states in counts.values():
        total.update(states)
    return QueueSnapshot(
        at=now or 0.0,
        total=ShareCounts.of(total),
        rounds=[
            _create_round(round_id, known.get(round_id), counts.get(round_id, {}), ahead.get(round_id))
            for round_id in {**known, **counts}
        ],
        damaged=[DamagedRow(row.ref, row.round_id.hex(), enum_name(ShareState, row.state)) for row in damaged],
        failed=failed,
        purged=purged,
        retries=retries,
    )


def _create_round(
    round_id: bytes, known: Round | StoredRound | None, counts: Mapping[ShareState, int], ahead: DueForecast | None
) -> RoundSnapshot:
    row = RoundSnapshot(round_id=round_id.hex(), counts=ShareCounts.of(counts))
    if known is not None:
        row = replace(row, status=int(known.status), vote_end_time=known.vote_end_time)
    return row if ahead is None else replace(row, due_per_minute=ahead.minutes, later=ahead.later)


def enum_name(kind: type[IntEnum], number: int) -> str:
    """Return the name of a state or a status in lower case; an unknown number as digits."""
    try:
        return kind(number).name.lower()
    except ValueError:
        return str(number)


# ---------------------------------------------------------------- the forecast


def measured_rate(service: ServiceState) -> ProofRate:
    """Return the rate of the provers: the median time of recent proofs, before the first that of the self-test."""
    median_ms = service.proof.p50_ms
    seconds = service.provers.self_test_seconds if median_ms is None else median_ms / 1000
    return ProofRate(seconds, service.provers.workers)


def forecast_rounds(rounds: Collection[RoundSnapshot], rate: ProofRate, now: float) -> dict[str, DrainResult]:
    """Return when the waiting shares of each of these rounds are revealed, by id of the round.

    Args:
        rounds: rounds with a known end.
        rate: of this host. Without a measured proof, only the capacity of blocks limits it.
        now: Unix seconds.
    """
    work = [forecast_work(row.vote_end_time, row.counts.unproven, row.due_per_minute, row.later, now) for row in rounds]
    results = simulate_drain(work, rate.per_second, now)
    return {row.round_id: result for row, result in zip(rounds, results, strict=True)}


# ---------------------------------------------------------------- page and `queue watch`


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles in milliseconds; null without samples."""

    p50: float | None
    p99: float | None

    @classmethod
    def of(cls, timing: TimingSummary) -> Percentiles:
        """Create them from a timing."""
        return cls(timing.p50_ms, timing.p99_ms)


@dataclass(frozen=True, slots=True)
class Lateness:
    """Time since the due time of a share, at the start of its proof and at its broadcast."""

    start: Percentiles
    broadcast: Percentiles


@dataclass(frozen=True, slots=True)
class ProverOverview:
    """Number of provers, how many of them are busy, and the median time of a proof."""

    slots: int
    busy: int
    seconds_per_proof: float | None


@dataclass(frozen=True, slots=True)
class NodeOverview:
    """A node, and why it is not used."""

    name: str
    fresh: bool
    reason: str | None


@dataclass(frozen=True, slots=True)
class FailureOverview:
    """Permanent failures with one stage and reason; `at` is the latest."""

    at: float
    stage: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOverview:
    """State of a round.

    `seconds_needed` is the time to the end of the round minus the slack of `helper.core.load_forecast`: above the time
    that is left if the shares cannot be proven before the end. None while the time of a proof is not known.
    """

    round_id: str = fact("Round id, hex.", pattern=HEX_32)
    vote_end_time: int = fact("End of the round in Unix seconds.")
    status: int = fact("Status of the round on the chain.")
    waiting: int = fact("Number of shares waiting for their due time.")
    proving: int = fact("Number of shares being proven.")
    broadcast: int = fact("Number of shares that may have been sent and are not confirmed.")
    confirmed: int = fact("Number of confirmed shares.")
    failed: int = fact("Number of failed shares.")
    due_per_minute: Sequence[int] = fact("Shares due in each of the next 60 minutes; the first includes overdue ones.")
    later: int = fact("Shares due after that.")
    seconds_needed: float | None = fact("Time to reveal the waiting shares; null while the time of a proof is unknown.")
    outlook: Outlook | None = fact(
        "Whether the time is enough, tight or too short to reveal the waiting shares; null if none wait, or while the"
        " time of a proof is unknown.",
        default=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Totals of the whole queue, as on the web page. More properties may be added."""

    at: float = fact("Time in Unix seconds.")
    height: int | None = fact("Height of the newest processed block.")
    circuit: str | None = fact("Circuit in use.")
    ready: bool = fact("Whether shares are accepted and revealed.")
    paused: str | None = fact("Why shares are not accepted or not revealed; null if they are.")
    rounds: Sequence[RoundOverview] = fact("State of each round.")
    lateness_ms: Lateness = fact("Lateness of proofs and broadcasts.")
    provers: ProverOverview = fact("Provers.")
    endpoints: Sequence[NodeOverview] = fact("Chain nodes.")
    failures: Sequence[FailureOverview] = fact("Permanent failures, by stage and reason.")


def build_overview(queue: QueueSnapshot, service: ServiceState) -> Overview:
    """Build the data of an event `state`."""
    provers, median_ms = service.provers, service.proof.p50_ms
    rate = measured_rate(service)
    rounds = queue.known_rounds
    forecasts = {} if rate.seconds_per_proof is None else forecast_rounds(rounds, rate, queue.at)
    return Overview(
        at=queue.at,
        height=service.height,
        circuit=service.circuit,
        ready=service.ready,
        paused=service.intake_paused or service.paused,
        rounds=[_build_round(row, forecasts.get(row.round_id), queue.at) for row in rounds],
        lateness_ms=Lateness(Percentiles.of(service.lateness_start), Percentiles.of(service.lateness_broadcast)),
        provers=ProverOverview(
            slots=provers.workers,
            # The dispatcher claims more shares than there are provers, so that no prover is idle.
            busy=min(service.in_hand, provers.workers),
            seconds_per_proof=None if median_ms is None else median_ms / 1000,
        ),
        endpoints=[NodeOverview(node.name, node.reason is None, node.reason) for node in service.endpoints],
        failures=[FailureOverview(group.latest, group.stage, group.note, group.count) for group in queue.failed],
    )


def _build_round(row: RoundSnapshot, forecast: DrainResult | None, now: float) -> RoundOverview:
    counts, left = row.counts, row.vote_end_time - now
    return RoundOverview(
        round_id=row.round_id,
        vote_end_time=row.vote_end_time,
        status=row.status,
        waiting=counts.received,
        proving=counts.witnessed,
        broadcast=counts.broadcast,
        confirmed=counts.submitted,
        failed=counts.failed,
        due_per_minute=row.due_per_minute,
        later=row.later,
        seconds_needed=None if forecast is None else round(left - forecast.slack_seconds, 1),
        outlook=forecast.outlook(left) if forecast is not None and counts.unproven else None,
    )


# ---------------------------------------------------------------- `queue stats`


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """`queue stats`."""

    source: Source = fact(SOURCE)
    total: ShareCounts = fact("Number of shares by state.")
    rounds: Mapping[str, ShareCounts] = fact("Number of shares by state, by round id.")
    damaged: Sequence[DamagedRow] = fact("Damaged rows that are quarantined.")
    failed: Sequence[FailedShares] = fact("Permanent failures that are not purged yet, by stage and reason.")
    failed_before: Sequence[PurgedShares] = fact("Failures in purged rounds, for as long as they are kept.")


def stats_json(queue: QueueSnapshot, *, source: Source, service: ServiceState | None = None) -> dict[str, Any]:
    """Return `queue stats` as plain JSON values."""
    stats = QueueStats(
        source=source,
        total=queue.total,
        rounds={row.round_id: row.counts for row in queue.rounds if row.counts.total},
        damaged=queue.damaged,
        failed=queue.failed,
        failed_before=queue.purged,
    )
    return asdict(stats) | ({} if service is None else {"service": service.to_json()})


# ---------------------------------------------------------------- of a running helper


class QueueObserver:
    """Reads queue and service of a running helper."""

    def __init__(self, store: Store, round_registry: RoundRegistry, read_status: StatusSource, *, clock: Clock) -> None:
        self._store = store
        self._round_registry = round_registry
        self._read_status = read_status
        self._clock = clock

    async def read_overview(self) -> Overview:
        """Return what page and `queue watch` show.

        Raises:
            StoreError: the store cannot be read.
        """
        queue = await read_snapshot(
            self._store,
            self._round_registry.all_rounds(),
            now=self._clock.now(),
            max_failures=MAX_SHOWN_FAILURES,
            for_overview=True,
        )
        return build_overview(queue, self._read_status())

    async def read_helper(self) -> HelperSnapshot:
        """Return what `doctor` checks.

        Raises:
            StoreError: the store cannot be read.
        """
        return HelperSnapshot(service=self._read_status(), queue=await self._read_queue(with_retries=True))

    async def read_for_scrape(self) -> HelperSnapshot:
        """Return what the metrics show, without the queue if the store cannot be read."""
        queue = None
        try:
            async with asyncio.timeout(STORE_TIMEOUT_SECONDS):
                queue = await self._read_queue()
        except (HelperError, TimeoutError) as error:
            log.warning("metrics_store_read_failed", error=str(error) or "timed out")
        return HelperSnapshot(service=self._read_status(), queue=queue)

    async def _read_queue(self, *, with_retries: bool = False) -> QueueSnapshot:
        rounds, now = self._round_registry.all_rounds(), self._clock.now()
        snapshot = await read_snapshot(self._store, rounds, now=now, with_retries=with_retries)
        due_ms = await self._store.next_due_ms([known.round_id for known in rounds])
        return replace(
            snapshot,
            oldest_due_seconds=0.0 if due_ms is None else max(0.0, now - due_ms / 1000),
            wal_bytes=self._store.wal_bytes,
            erasure_pending_seconds=self._store.erasure_pending_seconds,
        )
