"""Result of the demo, as JSON and as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from devnet.demo.plan import PROPOSALS, DemoOptions, expected_tally
from devnet.demo.votes import Voted
from devnet.leak_check import Needle, named_early

Tally = Mapping[tuple[int, int], int]


def needles(voted: Sequence[Voted], transactions: Mapping[str, bytes]) -> list[Needle]:
    """Values that no request may contain before a time.

    Args:
        voted: the votes. Values of a vote are allowed once its last share is due.
        transactions: hash of the revealing transaction by nullifier (hex).
    """
    values: list[Needle] = []
    for vote in (entry.vote for entry in voted):
        last = max(share.submit_at for share in vote.shares)
        values += [
            Needle("position", vote.position, last),
            Needle("shares hash", vote.ballot.shares_hash, last),
            Needle("vote commitment", vote.ballot.commitment, last),
        ]
        for share in vote.shares:
            sealed, at = vote.ballot.shares[share.index], share.submit_at
            values += [
                Needle("nullifier", share.nullifier, at),
                Needle("c1", sealed.c1, at),
                Needle("c2", sealed.c2, at),
                Needle("blind", sealed.blind, at),
            ]
            if share.nullifier.hex() in transactions:
                values.append(Needle("transaction", transactions[share.nullifier.hex()], at))
    return values


def early_requests(
    voted: Sequence[Voted], transactions: Mapping[str, bytes], requests: Sequence[Mapping[str, Any]]
) -> int:
    """Count the requests in the chain's log, to all nodes and ports, that contained a value too early."""
    return len(named_early(requests, needles(voted, transactions)))


def tally_of(answer: Mapping[str, Any]) -> dict[tuple[int, int], int]:
    """The chain's published results, without options that have no votes (the chain omits zeros)."""
    rows = answer.get("results", [])
    totals = {(row["proposal_id"], row.get("vote_decision", 0)): row.get("total_value", 0) for row in rows}
    return {option: total for option, total in totals.items() if total}


def together(hosts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the facts of all hosts: the sum of their counts, all other values from the host with the role.

    Args:
        hosts: facts of a single host, or of those with the roles api, prover and sender.
    """
    counts: Counter[str] = Counter()
    for host in hosts:
        counts.update(host["counts"])
    proves = hosts[min(1, len(hosts) - 1)]
    return {**proves, "lateness_broadcast": hosts[-1]["lateness_broadcast"], "counts": dict(counts)}


def result(
    options: DemoOptions,
    voted: Sequence[Voted],
    facts: Mapping[str, Any],
    *,
    counted: Tally,
    early: int,
    seconds: float,
) -> dict[str, Any]:
    """The object printed by `--json`. Times are in milliseconds, rates per second."""
    counts, proving = facts["counts"], facts["proving_seconds"]
    shares = [share for one in voted for share in one.vote.shares]
    expected = expected_tally([one.choice for one in voted])
    return {
        "shares": options.shares,
        "accepted": sum(share.accepted for share in shares),
        "confirmed": counts.get("confirmed", 0),
        "failed": counts.get("failed", 0) + counts.get("expired", 0),
        "early": early,
        "tally_ok": counted == expected and len(shares) == options.shares,
        "lateness_ms_p50": facts["lateness_start"]["p50_ms"],
        "lateness_ms_p99": facts["lateness_start"]["p99_ms"],
        "broadcast_ms_p50": facts["lateness_broadcast"]["p50_ms"],
        "broadcast_ms_p99": facts["lateness_broadcast"]["p99_ms"],
        "proofs_per_second": round(counts.get("proven", 0) / proving, 2) if proving else None,
        "proof_ms_p50": facts["proof"]["p50_ms"],
        "circuit": facts["circuit"],
        "voters": options.voters,
        "votes": len(voted),
        "tally": [_row(option, expected.get(option, 0), counted.get(option, 0)) for option in _options()],
        "seconds": round(seconds, 1),
    }


def succeeded(outcome: Mapping[str, Any]) -> bool:
    """Return whether all shares are confirmed, no request contained a value too early, and the tally is correct."""
    complete = outcome["shares"] == outcome["accepted"] == outcome["confirmed"]
    return bool(complete and outcome["tally_ok"] and not outcome["failed"] and not outcome["early"])


def _options() -> list[tuple[int, int]]:
    return [(number + 1, option) for number, one in enumerate(PROPOSALS) for option in range(len(one["options"]))]


def _row(option: tuple[int, int], voted: int, counted: int) -> dict[str, Any]:
    proposal, decision = option
    about = PROPOSALS[proposal - 1]
    return {
        "proposal": proposal,
        "title": about["title"],
        "option": about["options"][decision],
        "voted": voted,
        "counted": counted,
    }


def show(outcome: Mapping[str, Any], console: Console) -> None:
    """Print the tables of shares and tally."""
    figures = Table(title="The shares", show_header=False)
    for name, value in (
        ("shares", outcome["shares"]),
        ("accepted by the helper", outcome["accepted"]),
        ("confirmed on chain", outcome["confirmed"]),
        ("failed", outcome["failed"]),
        ("requests that named a share before its time", outcome["early"]),
        ("time due → proof begins, p50 / p99", _pair(outcome, "lateness_ms")),
        ("time due → broadcast, p50 / p99", _pair(outcome, "broadcast_ms")),
        ("proofs a second while proving", outcome["proofs_per_second"]),
        ("circuit", outcome["circuit"]),
    ):
        figures.add_row(name, str(value))
    console.print(figures)
    tally = Table("proposal", "option", "wallets voted", "chain counted", "", title="The tally")
    for row in outcome["tally"]:
        right = "right" if row["voted"] == row["counted"] else "WRONG"
        tally.add_row(row["title"], row["option"], str(row["voted"]), str(row["counted"]), right)
    console.print(tally)


def _pair(outcome: Mapping[str, Any], name: str) -> str:
    p50, p99 = outcome[f"{name}_p50"], outcome[f"{name}_p99"]
    return "–" if p50 is None else f"{p50:.0f} ms / {p99:.0f} ms"
