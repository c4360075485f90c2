"""What the running daemon says of itself over its control socket, and what that means."""

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
    "and do not stop the helper before that. Else free space on its disk, and look into the kernel's log for its "
    "errors. It continues by itself.",
    "chain": "Mend a node, or name another one in [chain] endpoints; see the lines about nodes. It goes on by itself.",
    "clock": "Set this machine's clock and run an NTP service; it goes on by itself.",
    "blocks": "Wait while it reads them. If none has them, name a node that keeps more blocks in [chain] endpoints.",
    "rounds": "The nodes tell other things of the round than before: ask who runs them, and name a second node.",
    "circuit": 'Set [prover] circuit = "auto" and restart; if it is, ask whether the chain was upgraded.',
    "provers": "Look for the out-of-memory killer in the kernel's log; lower [helper] max_concurrent_proofs.",
    "queue": "Wait some seconds after a start. If it stays so, the other lines tell why.",
    "sender": "Look whether the place of [sender] lease can be reached; keep one of two copies of a queue.",
}
"""What to do when a check of the daemon's own fails, by its name."""


@dataclass(frozen=True, slots=True)
class Daemon:
    """What it told.

    Attributes:
        running: whether one answers, or at least listens.
        problem: why nothing could be learnt from it, None where it was.
        forbidden: whether this user may not ask it.
        stats: the answer to `/stats`.
        overview: the answer to `/overview`.
    """

    running: bool
    problem: str | None = None
    forbidden: bool = False
    stats: Mapping[str, Any] = field(default_factory=dict)
    overview: Mapping[str, Any] = field(default_factory=dict)

    @property
    def facts(self) -> Mapping[str, Any]:
        """What only it knows; empty where it has told nothing."""
        found: Mapping[str, Any] = self.stats.get("service") or {}
        return found


def ask_daemon(socket: Path) -> Daemon:
    """Ask it everything at once; never raises."""
    try:
        return Daemon(True, stats=_ask(socket, "/stats"), overview=_ask(socket, "/overview"))
    except DaemonNotRunningError:
        return Daemon(False)
    except PermissionError:
        return Daemon(True, problem=f"{socket} may not be used by this user", forbidden=True)
    except (DaemonUnresponsiveError, ValueError) as error:
        return Daemon(True, problem=str(error))


def _ask(socket: Path, target: str) -> dict[str, Any]:
    status, body = ask_control(socket, target, timeout=PATIENCE)
    try:
        told = json.loads(body)
    except ValueError:
        told = None
    if status != 200 or not isinstance(told, dict):
        reason = told.get("error") if isinstance(told, dict) else "not what a helper answers"
        raise ValueError(f"{target}: HTTP {status} {reason}")
    return told


def judge_daemon(daemon: Daemon, socket: Path) -> list[CheckResult]:
    """Whether it runs and is ready; a line for each of its own checks that fails."""
    if not daemon.running:
        return [
            warn(
                "helper", f"none runs here: nobody answers on {socket}", "Start it: `svote-helper serve`, or its unit."
            )
        ]
    if daemon.forbidden:
        return [warn("helper", f"it runs, but {daemon.problem}", "Run the doctor as the helper's user.")]
    if daemon.problem is not None:
        advice = "If it stays so, look into its log, and restart it: the shares are on disk."
        return [fail("helper", f"it listens and does not answer: {daemon.problem}", advice)]
    facts = daemon.facts
    failed = [check for check in facts.get("checks", ()) if check.get("problem")]
    found = [
        fail(f"helper: {check['name']}", str(check["problem"]), ADVICE.get(str(check["name"]), "See its log."))
        for check in failed
    ]
    found += [
        warn(
            f"helper: {check['name']}",
            str(check["note"]),
            "Ask a node of your own: another end takes effect once two nodes report it, or one for ten blocks where"
            " one is configured. For a status that is unknown, install a newer version.",
        )
        for check in facts.get("checks", ())
        if check.get("note")
    ]
    paused = facts.get("paused")
    if paused and paused not in {check["problem"] for check in failed}:
        found.append(fail("helper: dispatch", f"nothing is proven now: {paused}", "See the other lines, and its log."))
    if facts.get("unread_blocks"):
        found.append(
            warn(
                "helper: history",
                f"{facts['unread_blocks']} older blocks are still to be read; shares are revealed meanwhile",
                "Nothing needs to be done. A round is closed once the blocks since its creation are read; a node with"
                " its RPC in [chain] rpc makes that quicker.",
                unread_blocks=facts["unread_blocks"],
            )
        )
    pid = (facts.get("process") or {}).get("pid")
    told = {"pid": pid, "ready": facts.get("ready"), "height": facts.get("height")}
    if found:
        return found
    return [ok("helper", f"it runs (pid {pid}), and is ready at height {facts.get('height')}", **told)]


def judge_sender(daemon: Daemon) -> list[CheckResult]:
    """Which of several hosts sends; nothing where there is one, or where it is not known."""
    facts = daemon.facts
    told = {name: facts.get(name) for name in ("role", "sends", "sender")}
    if told["sends"]:
        return [ok("sender", f"this host sends (role {told['role']})", **told)]
    if told["sender"]:
        return [ok("sender", f"the host {told['sender']!r} sends; this one's role is {told['role']}", **told)]
    if "database_skew" not in facts or told["sender"] is None:
        return []  # what is wrong with a lease is a check of the daemon's own
    return [
        warn(
            "sender",
            "no host sends now: what is proven waits",
            "Start one with the role sender, or all. One on standby takes over within [store] lease_seconds: if this"
            " stays so, see its log.",
            **told,
        )
    ]


def judge_archive(daemon: Daemon) -> list[CheckResult]:
    """How far the archive is that it writes, if it writes one."""
    told = daemon.facts.get("archive")
    if not told:
        return []
    where = (
        f"it has all blocks up to {told['through']}, {told['behind']} behind" if told["through"] else "not begun yet"
    )
    if told["problem"]:
        advice = "Nothing else waits for it, and it is tried again; see the log, and the section [s3]."
        return [warn("archive", f"{told['problem']}; {where}", advice, **told)]
    return [ok("archive", where, **told)]


def judge_failures(counts: Mapping[str, Any], damaged: Sequence[object]) -> list[CheckResult]:
    """Shares that failed for good, and rows that were set aside.

    Args:
        counts: shares by state's name.
        damaged: the rows.
    """
    found = []
    number = int(counts.get("failed", 0))
    if number:
        advice = (
            "See why: `svote-helper queue list --state failed`. `queue retry` puts them back while their round runs."
        )
        found.append(warn("failed shares", f"{number} were given up", advice, failed=number))
    if damaged:
        advice = "Keep a copy of the database and look for errors of the disk; restore a backup if there are many."
        found.append(
            fail("damaged rows", f"{len(damaged)} were set aside and are not acted on", advice, rows=len(damaged))
        )
    return found


def waiting_of(overview: Mapping[str, Any]) -> list[Waiting]:
    """What waits, by the daemon's overview."""
    return [
        Waiting(
            round_id=str(one["round_id"]),
            end=float(one["vote_end_time"]),
            left=int(one["waiting"]) + int(one["proving"]),
            unconfirmed=int(one["broadcast"]),
            minutes=tuple(one["due_per_minute"]),
            later=int(one["later"]),
        )
        for one in overview.get("rounds", ())
    ]
