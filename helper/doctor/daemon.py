"""Queries the running helper over its control socket and evaluates its state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from helper.chain.chain_data import ENDED_STATUSES
from helper.doctor.backlog import WaitingShares
from helper.doctor.result import CheckResult, fail, ok, warn
from helper.observability.readiness_text import Check
from helper.observability.service_state import ArchiveState
from helper.runtime.process_security import ProcessLimits
from helper.server.control_client import (
    TIMEOUT_SECONDS,
    DaemonNotRunningError,
    DaemonUnresponsiveError,
    request_control_socket,
)
from helper.store.models import RetryGroup
from helper.store.sqlite.displacement import DATABASE_DISPLACED_TEXT, WAL_DISPLACED_TEXT

ADVICE_BY_CHECK: Final = {
    "store": "Free space on the disk of the database, and check the kernel log for disk errors; the helper's log has "
    "the error. The helper recovers automatically.",
    "moved store": "Move the helper's own file back to its path (see the log), and do not stop the helper before that. "
    "The helper recovers automatically.",
    "shared store": "Check whether PostgreSQL is running, accepts connections of this host, and lets its role write: "
    "see the check of the database and the log. The helper reconnects automatically.",
    "chain": "Fix a node, or add another to [chain] endpoints; see the node checks. The helper recovers automatically.",
    "clock": "Correct this machine's clock and run an NTP service. The helper recovers automatically.",
    "blocks": "Wait while the blocks are read. If no node has them, or two do not return them alike, add one with more "
    "history to [chain] endpoints.",
    "dispatch": "See the log. If it shows an error at each attempt, restart the helper: the shares are on disk.",
    "rounds": "The nodes report different data of the round than before: ask their operators, and add a second node.",
    "circuit": 'Set [prover] circuit = "auto" and restart. If it is already "auto", '
    "check whether the chain was upgraded.",
    "provers": "Check the kernel log for the out-of-memory killer; lower [helper] max_concurrent_proofs.",
    "queue": "Wait a few seconds after a start. If it persists, see the other checks.",
    "sender": "Check that the [sender] lease location is reachable; run only one of two copies of a queue.",
    "starting provers": "Wait: a prover creates its keys before it is ready, which takes seconds, on a busy machine up "
    "to a minute. If it persists, see its log.",
    "shared sender": "Start a host with that role, or one with the role all. If one runs, check its log.",
    "shared provers": "Start a host with that role, or one with the role all. If one runs, check its log.",
}
"""Advice for each of the helper's own health checks, by name; with a prefix that tells what a failure is about."""
_ADVICE_BY_NOTE: Final = {
    "store": "Check the disk for errors, and restart the helper. If its log has `database_damaged` again, restore the "
    "newest backup.",
    "chain": "List two different nodes in [chain] endpoints; see the node checks.",
    "blocks": "No action is needed. A round is closed once the blocks since its creation are read; a node with RPC "
    "([chain] rpc) makes that faster.",
    "rounds": "Query your own node. A changed end time takes effect once two nodes report it. If the status is "
    "unknown, install a newer version.",
}
"""Advice for notes on health checks that passed, by name."""


@dataclass(frozen=True, slots=True)
class ServiceReport:
    """State of the running helper (`helper.observability.service_state.ServiceState`).

    A field that the helper does not report is None or the default: the helper may have another version, or could not be
    queried.

    Attributes:
        paused: why processing is paused, None if it is not.
        workers: number of prover workers.
        prover_exits: number of unexpected exits of prover workers.
        proofs: number of proofs made; `p50_ms` and `p99_ms` are percentiles of the recent proving times.
        self_test_seconds: time of one proof in the self-test.
        sends: whether this host holds the sender lease; `sender` is the holder, "" for none.
        shares_database: whether the database is shared between hosts.
    """

    ready: bool | None = None
    height: int | None = None
    circuit: str | None = None
    chain_id: str | None = None
    paused: str | None = None
    checks: tuple[Check, ...] = ()
    process: ProcessLimits | None = None
    workers: int = 1
    prover_exits: int = 0
    proofs: int = 0
    p50_ms: float | None = None
    p99_ms: float | None = None
    self_test_seconds: float | None = None
    role: str | None = None
    sends: bool | None = None
    sender: str | None = None
    shares_database: bool = False
    archive: ArchiveState | None = None

    @property
    def pid(self) -> int | None:
        """The helper's process id."""
        return None if self.process is None else self.process["pid"]


@dataclass(frozen=True, slots=True)
class DaemonReport:
    """State reported by the running helper.

    Attributes:
        is_running: whether a helper responds, or at least listens; True if this user lacks permission.
        problem: why it could not be queried, None if it could.
        is_forbidden: whether this user lacks permission.
        service: its state.
        failed: number of failed shares; None if unknown.
        failed_in_ended: number of these in rounds that have ended.
        damaged: number of damaged rows.
        waiting: waiting shares; None if unknown.
        retries: shares of `waiting` that wait for a retry.
    """

    is_running: bool
    problem: str | None = None
    is_forbidden: bool = False
    service: ServiceReport = field(default_factory=ServiceReport)
    failed: int | None = None
    failed_in_ended: int = 0
    damaged: int = 0
    waiting: tuple[WaitingShares, ...] | None = None
    retries: tuple[RetryGroup, ...] = ()


def query_daemon(socket: Path) -> DaemonReport:
    """Query the helper's stats and overview. Never raises."""
    try:
        return parse_daemon(_query(socket, "/stats"), _query(socket, "/overview"), _query_retries(socket))
    except DaemonNotRunningError:
        return DaemonReport(False)
    except PermissionError:
        return DaemonReport(True, problem=f"no permission to use {socket}", is_forbidden=True)
    except (DaemonUnresponsiveError, ValueError) as error:
        return DaemonReport(True, problem=str(error))
    except (AttributeError, LookupError, TypeError) as error:
        return DaemonReport(True, problem=f"unexpected response: {error!r}")


def _query_retries(socket: Path) -> Mapping[str, Any]:
    """Return the response to `/retries`; empty from a helper of an earlier version, which does not have it."""
    try:
        return _query(socket, "/retries")
    except ValueError:
        return {}


def parse_daemon(
    stats: Mapping[str, Any], overview: Mapping[str, Any], retries: Mapping[str, Any] | None = None
) -> DaemonReport:
    """Parse the responses to `/stats`, `/overview` and `/retries`."""
    return DaemonReport(
        is_running=True,
        service=parse_service(stats.get("service") or {}),
        failed=int(stats["total"].get("failed", 0)),
        failed_in_ended=sum(
            int(row["failed"])
            for row in overview.get("rounds", ())
            if row["status"] in ENDED_STATUSES or row["vote_end_time"] <= overview["at"]
        ),
        damaged=len(stats["damaged"]),
        waiting=tuple(waiting_shares_from_overview(overview)),
        retries=tuple(
            RetryGroup(
                round_id=bytes.fromhex(row["round"]),
                stage=str(row["stage"]),
                note=str(row["reason"]),
                minute=int(row["minute"]),
                count=int(row["count"]),
                next_ms=round(row["next"] * 1000),
            )
            for row in (retries or {}).get("retries", ())
        ),
    )


def parse_service(state: Mapping[str, Any]) -> ServiceReport:
    """Parse the section `service` of `GET /stats`.

    Raises:
        TypeError, AttributeError: a value is not of the expected type.
        KeyError: a check has no name.
    """
    provers, proof = state.get("provers") or {}, state.get("proof") or {}
    return ServiceReport(
        ready=state.get("ready"),
        height=state.get("height"),
        circuit=state.get("circuit"),
        chain_id=state.get("chain_id"),
        paused=state.get("paused"),
        checks=tuple(
            Check(str(check["name"]), check.get("problem"), check.get("note")) for check in state.get("checks") or ()
        ),
        process=cast("ProcessLimits | None", state.get("process")),
        workers=provers.get("workers", 1),
        prover_exits=sum((provers.get("deaths") or {}).values()),
        proofs=proof.get("count") or 0,
        p50_ms=proof.get("p50_ms"),
        p99_ms=proof.get("p99_ms"),
        self_test_seconds=provers.get("self_test_seconds"),
        role=state.get("role"),
        sends=state.get("sends"),
        sender=state.get("sender"),
        shares_database="database_skew" in state,
        archive=cast("ArchiveState | None", state.get("archive")),
    )


def _query(socket: Path, target: str) -> dict[str, Any]:
    status, body = request_control_socket(socket, target, timeout=TIMEOUT_SECONDS)
    try:
        reported = json.loads(body)
    except ValueError:
        reported = None
    if status != 200 or not isinstance(reported, dict):
        reason = reported.get("error") if isinstance(reported, dict) else "unexpected response"
        raise ValueError(f"{target}: HTTP {status} {reason}")
    return reported


def evaluate_daemon(daemon: DaemonReport, socket: Path, *, shares_database: bool = False) -> list[CheckResult]:
    """Evaluate whether the helper runs and is ready; one result for each failed health check.

    Args:
        daemon: the response of the helper.
        socket: its control socket.
        shares_database: whether its queue is in a shared database, according to the settings.
    """
    if not daemon.is_running:
        return [
            warn(
                "helper",
                f"not running: no helper is listening on {socket}",
                "Start it with `svote-helper serve` or its systemd unit.",
            )
        ]
    if daemon.is_forbidden:
        return [warn("helper", f"unknown whether it runs: {daemon.problem}", "Run doctor as the helper's user.")]
    if daemon.problem is not None:
        advice = (
            "See the check of the database: the helper does not respond while the database is unreachable."
            if shares_database
            else "If it persists, check its log and restart it: the shares are on disk."
        )
        return [fail("helper", f"it accepts connections but does not respond: {daemon.problem}", advice)]
    service = daemon.service
    problems = {check.name: check.problem for check in service.checks if check.problem}
    results = [
        fail(f"helper: {name}", problem, ADVICE_BY_CHECK.get(_advice_name(name, problem, service), "See its log."))
        for name, problem in problems.items()
    ]
    results += [
        warn(
            f"helper: {check.name}",
            check.note,
            _ADVICE_BY_NOTE.get(check.name, _ADVICE_BY_NOTE["rounds"]),
        )
        for check in service.checks
        if check.note
    ]
    if service.paused and service.paused not in problems.values():
        advice = "See the other checks and the log."
        results.append(fail("helper: dispatch", f"dispatch is paused: {service.paused}", advice))
    if results:
        return results
    reported = {"pid": service.pid, "ready": service.ready, "height": service.height}
    return [ok("helper", f"running (pid {service.pid}), ready at height {service.height}", **reported)]


def _advice_name(check: str, problem: str, service: ServiceReport) -> str:
    if problem in {DATABASE_DISPLACED_TEXT, WAL_DISPLACED_TEXT}:
        return "moved store"
    if check == "provers" and service.role != "api" and not service.prover_exits:
        return "starting provers"
    shared = {"store", "sender", "provers"} if service.role == "api" else {"store", "sender"}
    return f"shared {check}" if check in shared and service.shares_database else check


def evaluate_sender(daemon: DaemonReport) -> list[CheckResult]:
    """Evaluate which host holds the sender lease; no result for a single host, or if unknown."""
    service = daemon.service
    reported = {"role": service.role, "sends": service.sends, "sender": service.sender}
    if service.sends:
        return [ok("sender", f"this host holds the sender lease (role {service.role})", **reported)]
    if service.sender:
        return [
            ok(
                "sender",
                f"host {service.sender!r} holds the sender lease; the role of this host is {service.role}",
                **reported,
            )
        ]
    if not service.shares_database or service.sender is None:
        return []  # lease problems are reported by the helper's own health checks
    return [
        warn(
            "sender",
            "no host holds the sender lease: proven shares are waiting",
            "Start a host with the role sender or all. A standby takes over within [store] lease_seconds; if this"
            " persists, check its log.",
            **reported,
        )
    ]


def evaluate_archive(daemon: DaemonReport) -> list[CheckResult]:
    """Evaluate the progress of the archive, if one is configured."""
    archive = daemon.service.archive
    if archive is None:
        return []
    where = (
        f"complete up to block {archive['through']}, {archive['behind']} behind"
        if archive["through"]
        else "not started yet"
    )
    if archive["problem"]:
        advice = "It is retried, and nothing else depends on it. Check the log, and the section [s3]."
        return [warn("archive", f"{archive['problem']}; {where}", advice, **archive)]
    return [ok("archive", where, **archive)]


def evaluate_failures(failed: int, damaged: int, *, in_ended: int) -> list[CheckResult]:
    """Report the numbers of failed shares and damaged rows.

    Args:
        failed: number of failed shares.
        damaged: number of damaged rows.
        in_ended: number of the failed shares in rounds that have ended.
    """
    results = []
    if failed > in_ended:
        advice = (
            "See `svote-helper queue list --state failed`. `queue retry` retries them while a round is open, those "
            "moved to another helper only with --stage moved."
        )
        open_ = failed - in_ended
        results.append(warn("failed shares", f"{open_} shares failed", advice, failed=open_))
    if in_ended:
        text = f"{in_ended} shares failed in rounds that have ended, and can no longer count"
        advice = "See `svote-helper queue list --state failed` for the reasons. They are deleted with their round."
        results.append(warn("lost shares", text, advice, failed=in_ended))
    if damaged:
        advice = "Copy the database and check the disk for errors; restore a backup if many rows are damaged."
        results.append(fail("damaged rows", f"{damaged} rows were quarantined and are not used", advice, rows=damaged))
    return results


def waiting_shares_from_overview(overview: Mapping[str, Any]) -> list[WaitingShares]:
    """Waiting shares according to the helper's overview."""
    return [
        WaitingShares(
            round_id=str(row["round_id"]),
            end=float(row["vote_end_time"]),
            unproven=int(row["waiting"]) + int(row["proving"]),
            unconfirmed=int(row["broadcast"]),
            minutes=tuple(row["due_per_minute"]),
            later=int(row["later"]),
        )
        for row in overview.get("rounds", ())
    ]
