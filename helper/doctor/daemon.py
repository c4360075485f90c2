"""Queries the running helper over its control socket and judges its state."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from helper.doctor.backlog import Waiting
from helper.doctor.result import CheckResult, fail, ok, warn
from helper.server.control_client import PATIENCE, DaemonNotRunningError, DaemonUnresponsiveError, ask_control

ADVICE: Final = {
    "store": "If the database was moved or replaced, move the helper's own file back to its path (the log names it), "
    "and do not stop the helper before that. Otherwise free space on its disk, and check the kernel log for disk "
    "errors. The helper recovers by itself.",
    "chain": "Fix a node, or add another to [chain] endpoints; see the node checks. The helper recovers by itself.",
    "clock": "Correct this machine's clock and run an NTP service. The helper recovers by itself.",
    "blocks": "Wait while the blocks are read. If no node has them, add one with more history to [chain] endpoints.",
    "rounds": "The nodes report other data of the round than before: ask their operators, and add a second node.",
    "circuit": 'Set [prover] circuit = "auto" and restart. If it already is, check whether the chain was upgraded.',
    "provers": "Check the kernel log for the out-of-memory killer; lower [helper] max_concurrent_proofs.",
    "queue": "Wait some seconds after a start. If it persists, see the other checks.",
    "sender": "Check that the [sender] lease location is reachable; run only one of two copies of a queue.",
}
"""Advice for each of the helper's own health checks, by name."""


@dataclass(frozen=True, slots=True)
class Daemon:
    """State reported by the running helper.

    Attributes:
        running: whether a helper answers, or at least listens.
        problem: why it could not be queried, None if it could.
        forbidden: whether this user lacks permission.
        stats: response to `/stats`.
        overview: response to `/overview`.
    """

    running: bool
    problem: str | None = None
    forbidden: bool = False
    stats: Mapping[str, Any] = field(default_factory=dict)
    overview: Mapping[str, Any] = field(default_factory=dict)

    @property
    def facts(self) -> Mapping[str, Any]:
        """The `service` section of its stats; empty if it could not be queried."""
        service: Mapping[str, Any] = self.stats.get("service") or {}
        return service


def ask_daemon(socket: Path) -> Daemon:
    """Query the helper's stats and overview. Never raises."""
    try:
        return Daemon(True, stats=_ask(socket, "/stats"), overview=_ask(socket, "/overview"))
    except DaemonNotRunningError:
        return Daemon(False)
    except PermissionError:
        return Daemon(True, problem=f"no permission to use {socket}", forbidden=True)
    except (DaemonUnresponsiveError, ValueError) as error:
        return Daemon(True, problem=str(error))


def _ask(socket: Path, target: str) -> dict[str, Any]:
    status, body = ask_control(socket, target, timeout=PATIENCE)
    try:
        reported = json.loads(body)
    except ValueError:
        reported = None
    if status != 200 or not isinstance(reported, dict):
        reason = reported.get("error") if isinstance(reported, dict) else "unexpected response"
        raise ValueError(f"{target}: HTTP {status} {reason}")
    return reported


def judge_daemon(daemon: Daemon, socket: Path) -> list[CheckResult]:
    """Judge whether the helper runs and is ready; one result for each failed health check."""
    if not daemon.running:
        return [
            warn(
                "helper",
                f"not running: no answer on {socket}",
                "Start it with `svote-helper serve` or its systemd unit.",
            )
        ]
    if daemon.forbidden:
        return [warn("helper", f"running, but {daemon.problem}", "Run doctor as the helper's user.")]
    if daemon.problem is not None:
        advice = "If it persists, check its log and restart it: the shares are on disk."
        return [fail("helper", f"it accepts connections but does not answer: {daemon.problem}", advice)]
    facts = daemon.facts
    failed = [check for check in facts.get("checks", ()) if check.get("problem")]
    results = [
        fail(f"helper: {check['name']}", str(check["problem"]), ADVICE.get(str(check["name"]), "See its log."))
        for check in failed
    ]
    results += [
        warn(
            f"helper: {check['name']}",
            str(check["note"]),
            "Query a node of your own. A changed end takes effect once two nodes report it, or one node for ten blocks"
            " if only one is configured. If the status is unknown, install a newer version.",
        )
        for check in facts.get("checks", ())
        if check.get("note")
    ]
    paused = facts.get("paused")
    if paused and paused not in {check["problem"] for check in failed}:
        results.append(fail("helper: dispatch", f"dispatch is paused: {paused}", "See the other checks, and the log."))
    if facts.get("unread_blocks"):
        results.append(
            warn(
                "helper: history",
                f"{facts['unread_blocks']} older blocks not read yet; shares are revealed meanwhile",
                "Nothing needs to be done. A round is closed once the blocks since its creation are read; a node with"
                " RPC ([chain] rpc) makes that faster.",
                unread_blocks=facts["unread_blocks"],
            )
        )
    pid = (facts.get("process") or {}).get("pid")
    reported = {"pid": pid, "ready": facts.get("ready"), "height": facts.get("height")}
    if results:
        return results
    return [ok("helper", f"running (pid {pid}), ready at height {facts.get('height')}", **reported)]


def judge_sender(daemon: Daemon) -> list[CheckResult]:
    """Judge which host sends; no result for a single host, or if unknown."""
    facts = daemon.facts
    reported = {name: facts.get(name) for name in ("role", "sends", "sender")}
    if reported["sends"]:
        return [ok("sender", f"this host sends (role {reported['role']})", **reported)]
    if reported["sender"]:
        return [
            ok("sender", f"host {reported['sender']!r} sends; the role of this host is {reported['role']}", **reported)
        ]
    if "database_skew" not in facts or reported["sender"] is None:
        return []  # lease problems are reported by the helper's own health checks
    return [
        warn(
            "sender",
            "no host sends now: proven shares are waiting",
            "Start a host with the role sender or all. A standby takes over within [store] lease_seconds; if this"
            " persists, check its log.",
            **reported,
        )
    ]


def judge_archive(daemon: Daemon) -> list[CheckResult]:
    """Judge the progress of the archive, if one is configured."""
    archive = daemon.facts.get("archive")
    if not archive:
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


def judge_failures(counts: Mapping[str, Any], damaged: Sequence[object]) -> list[CheckResult]:
    """Report failed shares and damaged rows.

    Args:
        counts: number of shares by state.
        damaged: damaged rows.
    """
    results = []
    number = int(counts.get("failed", 0))
    if number:
        advice = "See `svote-helper queue list --state failed`. `queue retry` retries them while a round is open."
        results.append(warn("failed shares", f"{number} shares failed", advice, failed=number))
    if damaged:
        advice = "Copy the database and check the disk for errors; restore a backup if many rows are damaged."
        results.append(
            fail("damaged rows", f"{len(damaged)} rows were set aside and are not used", advice, rows=len(damaged))
        )
    return results


def waiting_of(overview: Mapping[str, Any]) -> list[Waiting]:
    """Waiting shares according to the helper's overview."""
    return [
        Waiting(
            round_id=str(row["round_id"]),
            end=float(row["vote_end_time"]),
            left=int(row["waiting"]) + int(row["proving"]),
            unconfirmed=int(row["broadcast"]),
            minutes=tuple(row["due_per_minute"]),
            later=int(row["later"]),
        )
        for row in overview.get("rounds", ())
    ]
