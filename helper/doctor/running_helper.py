"""Checks the running helper, which reports its state over its control socket, and its backlog of waiting shares.

Waiting shares are checked against the time left, by `helper.core.load_forecast`. Shares that wait for a retry are work,
but not late: the time of each retry is chosen, and the last one is near the end of the round.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from helper.core.json_records import first_error
from helper.core.load_forecast import (
    MAX_REVEALS_PER_BLOCK,
    DrainResult,
    ProofRate,
    RoundWork,
    find_slots,
    forecast_work,
    simulate_drain,
)
from helper.core.text_forms import format_duration
from helper.doctor import CheckResult, fail, ok, warn
from helper.errors import RESTORE_ADVICE
from helper.observability.queue_snapshot import HelperSnapshot, QueueSnapshot, RoundSnapshot
from helper.observability.service_state import ServiceState
from helper.server.control_client import (
    TIMEOUT_SECONDS,
    DaemonNotRunningError,
    DaemonUnresponsiveError,
    request_control_socket,
)
from helper.store.models import RetryingShares
from helper.store.sqlite.displacement import DATABASE_DISPLACED_TEXT, WAL_DISPLACED_TEXT

_TARGET: Final = "/snapshot"
_HELPER_SNAPSHOT: Final = TypeAdapter(HelperSnapshot)

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
    "store": "Check the disk for errors, and restart the helper. If its log has `database_damaged` again, "
    f"{RESTORE_ADVICE}",
    "chain": "List two different nodes in [chain] endpoints; see the node checks.",
    "blocks": "No action is needed. A round is closed once the blocks since its creation are read; a node with RPC "
    "([chain] rpc) makes that faster.",
    "rounds": "Query your own node. A changed end time takes effect once two nodes report it. If the status is "
    "unknown, install a newer version.",
}
"""Advice for notes on health checks that passed, by name."""


@dataclass(frozen=True, slots=True)
class DaemonReport:
    """State reported by the running helper.

    Attributes:
        is_running: whether a helper responds, or at least listens; True if this user lacks permission.
        problem: the result of the check if it could not be queried, None if it could.
        service: its state; without known values if it could not be queried.
        queue: its queue; None if it could not be queried.
    """

    is_running: bool
    problem: CheckResult | None = None
    service: ServiceState = field(default_factory=ServiceState)
    queue: QueueSnapshot | None = None


def query_daemon(socket: Path, *, shares_database: bool = False) -> DaemonReport:
    """Query the state of the helper and its queue. Never raises.

    `shares_database` is whether its queue is in a shared database, according to the settings.
    """
    try:
        status, body = request_control_socket(socket, _TARGET, timeout=TIMEOUT_SECONDS)
        if status == 404:
            text = "unknown whether it is ready: the running helper has another version than this command"
            return DaemonReport(True, warn("helper", text, "Restart it."))
        helper = _parse(status, body)
    except DaemonNotRunningError:
        advice = "Start it with `svote-helper serve` or its systemd unit."
        return DaemonReport(False, warn("helper", f"not running: no helper is listening on {socket}", advice))
    except PermissionError:
        text = f"unknown whether it runs: no permission to use {socket}"
        return DaemonReport(True, warn("helper", text, "Run doctor as the helper's user."))
    except ValidationError as error:
        reason = f"unexpected response: {': '.join(first_error(error))}"
    except (DaemonUnresponsiveError, ValueError) as error:
        reason = str(error)
    else:
        return DaemonReport(True, service=helper.service or ServiceState(), queue=helper.queue)
    advice = (
        "See the check of the database: the helper does not respond while the database is unreachable."
        if shares_database
        else "If it persists, check its log and restart it: the shares are on disk."
    )
    return DaemonReport(True, fail("helper", f"it accepts connections but does not respond: {reason}", advice))


def _parse(status: int, body: bytes) -> HelperSnapshot:
    try:
        reported = json.loads(body)
    except ValueError:
        reported = None
    if status != 200 or not isinstance(reported, dict):
        reason = reported.get("error") if isinstance(reported, dict) else "unexpected response"
        raise ValueError(f"{_TARGET}: HTTP {status} {reason}")
    return _HELPER_SNAPSHOT.validate_python(reported)


def evaluate_daemon(daemon: DaemonReport) -> list[CheckResult]:
    """Evaluate whether the helper runs and is ready; one result for each failed health check."""
    if daemon.problem is not None:
        return [daemon.problem]
    service = daemon.service
    problems = {check.name: check.problem for check in service.checks if check.problem}
    results = [
        fail(f"helper: {name}", problem, ADVICE_BY_CHECK.get(_advice_name(name, problem, service), "See its log."))
        for name, problem in problems.items()
    ]
    results += [
        warn(f"helper: {check.name}", check.note, _ADVICE_BY_NOTE.get(check.name, "See its log."))
        for check in service.checks
        if check.note
    ]
    if service.paused and service.paused not in problems.values():
        advice = "See the other checks and the log."
        results.append(fail("helper: dispatch", f"dispatch is paused: {service.paused}", advice))
    if results:
        return results
    pid = None if service.process is None else service.process.pid
    reported = {"pid": pid, "ready": service.ready, "height": service.height}
    return [ok("helper", f"running (pid {pid}), ready at height {service.height}", **reported)]


def _advice_name(check: str, problem: str, service: ServiceState) -> str:
    if problem in {DATABASE_DISPLACED_TEXT, WAL_DISPLACED_TEXT}:
        return "moved store"
    if check == "provers" and service.role != "api" and not sum(service.provers.deaths.values()):
        return "starting provers"
    shared = {"store", "sender", "provers"} if service.role == "api" else {"store", "sender"}
    return f"shared {check}" if check in shared and service.database_skew is not None else check


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
    if service.database_skew is None or service.sender is None:
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
    where = f"complete up to block {archive.through}, {archive.behind} behind" if archive.through else "not started yet"
    if archive.problem:
        advice = "It is retried, and nothing else depends on it. Check the log, and the section [s3]."
        return [warn("archive", f"{archive.problem}; {where}", advice, **asdict(archive))]
    return [ok("archive", where, **asdict(archive))]


def evaluate_failures(queue: QueueSnapshot) -> list[CheckResult]:
    """Report the numbers of failed shares and damaged rows."""
    results = []
    in_ended = sum(row.counts.failed for row in queue.rounds if row.has_ended(queue.at))
    if failed := queue.total.failed - in_ended:
        advice = (
            "See `svote-helper queue list --state failed`. `queue retry` retries them while a round is open, those "
            "moved to another helper only with --stage moved."
        )
        results.append(warn("failed shares", f"{failed} shares failed", advice, failed=failed))
    if in_ended:
        text = f"{in_ended} shares failed in rounds that have ended, and can no longer count"
        advice = "See `svote-helper queue list --state failed` for the reasons. They are deleted with their round."
        results.append(warn("lost shares", text, advice, failed=in_ended))
    if damaged := len(queue.damaged):
        advice = "Copy the database and check the disk for errors; restore a backup if many rows are damaged."
        results.append(fail("damaged rows", f"{damaged} rows were quarantined and are not used", advice, rows=damaged))
    return results


_OTHER_HELPERS: Final = "Wallets send each share to several helpers, so another helper may still reveal the rest."


def evaluate_backlog(queue: QueueSnapshot, proof_rate: ProofRate, now: float) -> list[CheckResult]:
    """Return one result for each round with waiting shares, in the order in which the rounds end.

    The queue must contain its retries. `now` is in Unix seconds.
    """
    rounds = [row for row in reversed(queue.known_rounds) if row.counts.unproven or row.counts.broadcast]
    groups = [[group for group in queue.retries if group.round == row.round_id] for row in rounds]
    work = [_forecast_without_retries(row, own, now) for row, own in zip(rounds, groups, strict=True)]
    drained = simulate_drain(work, proof_rate.per_second, now)
    results = []
    for number, (row, result) in enumerate(zip(rounds, drained, strict=True)):
        advice = _speed_advice(row.round_id, work[: number + 1], proof_rate, now)
        results.append(_evaluate_round(row, result, proof_rate, now, speed_advice=advice, retries=groups[number]))
    return results or [ok("backlog", "no shares are waiting")]


def _speed_advice(round_id: str, work: Sequence[RoundWork], proof_rate: ProofRate, now: float) -> str:
    """Return what to do so that the last of these rounds is finished in time."""
    needed = find_slots(work, proof_rate, now)
    if needed is None:
        more = f"More provers than the chain's {MAX_REVEALS_PER_BLOCK} reveals per block do not help."
        return f"Reduce other load on this machine. {more} {_OTHER_HELPERS}"
    slots = proof_rate.slots
    state = f"{needed} provers are needed, {slots} run." if needed > slots else f"{slots} provers are just enough."
    return (
        f"{state} Reduce other load on this machine. If it has cores for more provers, set [helper]"
        f" max_concurrent_proofs = {max(needed, slots + 1)} and restart. Otherwise give a second host a copy:"
        f" `svote-helper queue export --round {round_id} --output FILE`, and there `svote-helper queue import FILE`."
        f" {_OTHER_HELPERS}"
    )


def _evaluate_round(
    row: RoundSnapshot,
    drained: DrainResult,
    proof_rate: ProofRate,
    now: float,
    *,
    speed_advice: str,
    retries: Sequence[RetryingShares],
) -> CheckResult:
    subject, unproven, unconfirmed = f"round {row.round_id[:8]}", row.counts.unproven, row.counts.broadcast
    seconds_left, seconds_needed = row.vote_end_time - now, drained.work_seconds
    facts: dict[str, Any] = {
        "round": row.round_id,
        "shares_left": unproven,
        "unconfirmed": unconfirmed,
        "seconds_needed": round(seconds_needed, 1),
        "seconds_left": round(seconds_left, 1),
        "slack_seconds": round(drained.slack_seconds, 1),
        "per_second": round(proof_rate.per_second, 3),
    }
    if seconds_left <= 0:
        advice = (
            "Shares not confirmed by the end of a round are not counted. They are reported once the chain closes it."
        )
        return fail(subject, f"{unproven + unconfirmed} shares left after the round ended", advice, **facts)
    needed, left = format_duration(seconds_needed), format_duration(seconds_left)
    text = f"{unproven} shares left, {needed} needed, {left} left"
    if proof_rate.seconds_per_proof is None:
        text += " (limited by block capacity only: proof time was not measured)"
    if unconfirmed:
        text += f"; {unconfirmed} sent and not confirmed"
    if retries:
        facts["retrying"] = sum(group.count for group in retries)
        text += f"; {_describe_retries(retries, now)}"
    excess = math.ceil(drained.unfinished)
    if excess and seconds_needed <= seconds_left:
        text += f"; {excess} shares more than can be processed are due shortly before the end"
        return fail(subject, text, speed_advice, **facts, too_many_at_the_end=excess)
    outlook = drained.outlook(seconds_left)
    if outlook == "short":
        return fail(subject, f"{text}; about {excess} will not be revealed", speed_advice, **facts)
    if outlook == "tight":
        return warn(subject, text, f"The round ends soon. {speed_advice}", **facts)
    return ok(subject, text, **facts)


def _describe_retries(retries: Sequence[RetryingShares], now: float) -> str:
    """Describe how many shares wait for a retry, until when, and after which failure."""
    first = min(retries, key=lambda group: group.next)
    others = len({(group.stage, group.reason) for group in retries}) - 1
    more = f" and {others} other failure{'s' if others > 1 else ''}" if others else ""
    next_in = format_duration(max(0.0, first.next - now))
    number = sum(group.count for group in retries)
    return f"{number} of them waiting for a retry, the next in {next_in} (after {first.stage}: {first.reason}{more})"


def _forecast_without_retries(row: RoundSnapshot, retries: Sequence[RetryingShares], now: float) -> RoundWork:
    """Return the work of a round. Shares that wait for a retry count as due now, an upper limit of the work."""
    minutes, later = list(row.due_per_minute), row.later
    for group in retries:
        if group.minute < len(minutes):
            minutes[group.minute] = max(0, minutes[group.minute] - group.count)
        else:
            later = max(0, later - group.count)
    return forecast_work(row.vote_end_time, row.counts.unproven, minutes, later, now)
