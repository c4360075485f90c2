"""Result of the demo, as JSON and as tables."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from devnet.demo.plan import PROPOSALS, DemoOptions, expected_tally
from devnet.demo.votes import VoteResult
from devnet.leak_check import SensitiveValue, find_leaks

Tally = Mapping[tuple[int, int], int]


def sensitive_values(vote_results: Sequence[VoteResult], transactions: Mapping[str, bytes]) -> list[SensitiveValue]:
    """Values that no request may contain before a time.

    Args:
        vote_results: the votes. Values of a vote are allowed once its last share is due.
        transactions: hash of the revealing transaction by nullifier (hex).
    """
    values: list[SensitiveValue] = []
    for vote in (entry.vote for entry in vote_results):
        last = max(share.submit_at for share in vote.shares)
        values += [
            SensitiveValue("position", vote.position, last),
            SensitiveValue("shares hash", vote.ballot.shares_hash, last),
            SensitiveValue("vote commitment", vote.ballot.commitment, last),
        ]
        for share in vote.shares:
            sealed, at = vote.ballot.shares[share.index], share.submit_at
            values += [
                SensitiveValue("nullifier", share.nullifier, at),
                SensitiveValue("c1", sealed.c1, at),
                SensitiveValue("c2", sealed.c2, at),
                SensitiveValue("blind", sealed.blind, at),
            ]
            if share.nullifier.hex() in transactions:
                values.append(SensitiveValue("transaction", transactions[share.nullifier.hex()], at))
    return values


def count_early_requests(
    vote_results: Sequence[VoteResult], transactions: Mapping[str, bytes], requests: Sequence[Mapping[str, Any]]
) -> int:
    """Count the requests in the chain's log, to all nodes and ports, that contained a value too early."""
    return len(find_leaks(requests, sensitive_values(vote_results, transactions)))


def parse_tally(response: Mapping[str, Any]) -> dict[tuple[int, int], int]:
    """The chain's published results, without options that have no votes (the chain omits zeros)."""
    rows = response.get("results", [])
    totals = {(row["proposal_id"], row.get("vote_decision", 0)): row.get("total_value", 0) for row in rows}
    return {option: total for option, total in totals.items() if total}


def merge_host_stats(hosts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the facts of all hosts: the sum of their counts, all other values from the host with the role.

    Args:
        hosts: facts of a single host, or of those with the roles api, prover and sender.
    """
    counts: Counter[str] = Counter()
    for host in hosts:
        counts.update(host["counts"])
    proves = hosts[min(1, len(hosts) - 1)]
    return {**proves, "lateness_broadcast": hosts[-1]["lateness_broadcast"], "counts": dict(counts)}


def merge_fleet_stats(helpers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the facts of independent helpers: the sum of their counts and workers, otherwise the largest value.

    Args:
        helpers: facts of each helper.
    """
    counts: Counter[str] = Counter()
    for helper in helpers:
        counts.update(helper["counts"])
    times = {
        name: {key: _largest(helper[name][key] for helper in helpers) for key in ("p50_ms", "p99_ms")}
        for name in ("lateness_start", "lateness_broadcast", "proof")
    }
    provers = [helper["provers"] for helper in helpers]
    return {
        **helpers[0],
        **times,
        "counts": dict(counts),
        "proving_seconds": _largest(helper["proving_seconds"] for helper in helpers),
        "provers": {
            **provers[0],
            "workers": sum(prover["workers"] for prover in provers),
            "self_test_seconds": _largest(prover["self_test_seconds"] for prover in provers),
        },
    }


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def figure(description: str) -> Any:
    """Create a field of the result, with its description in the JSON schema."""
    return field(metadata={"description": description})


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoAudit:
    """The audit of the round from public data (docs/audit.md)."""

    verdict: str = figure("Verdict as in `audit --json`.")
    passed: int = figure("Number of checks that passed.")
    others: Sequence[Mapping[str, str]] = figure("The other checks: `id`, `verdict`, `why`.")
    seconds: float = figure("Duration of the audit.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOutcome:
    """`demo`. More figures may be added."""

    shares: int = figure("Number of posted shares.")
    accepted: int = figure("Number of accepted shares.")
    confirmed: int = figure("Number of confirmed shares.")
    failed: int = figure("Number of failed shares.")
    early: int = figure("Number of requests that contained data of a share before its due time.")
    tally_ok: bool = figure("Whether the chain's tally is correct.")
    lateness_ms_p50: float | None = figure("Median time from a due time to the start of the proof.")
    lateness_ms_p99: float | None = figure("The same, 99th percentile.")
    broadcast_ms_p50: float | None = figure("Median time from a due time to the broadcast.")
    broadcast_ms_p99: float | None = figure("The same, 99th percentile.")
    proofs_per_second: float | None = figure("Rate of proofs while at least one was running.")
    proof_ms_p50: float | None = figure("Median time of a proof.")
    circuit: str | None = figure("Circuit in use.")
    helpers: int = figure("Number of independent helpers.")
    proofs_per_reveal: float = figure("Number of proofs of all helpers, divided by the number of shares.")
    voters: int = figure("Number of voters.")
    votes: int = figure("Number of votes.")
    audit: DemoAudit = figure("The audit of the round.")
    tally: Sequence[Mapping[str, Any]] = figure("Votes cast and counted, by option.")
    clients: Sequence[Mapping[str, Any]] = figure("Shares posted and accepted, by client. Only with `--wallets all`.")
    seconds: float = figure("Duration of the demo.")


def build_result(
    options: DemoOptions,
    vote_results: Sequence[VoteResult],
    service_stats: Mapping[str, Any],
    *,
    counted: Tally,
    early: int,
    audited: Mapping[str, Any],
    seconds: float,
) -> dict[str, Any]:
    """The object printed by `--json`. Times are in milliseconds, rates per second."""
    counts, proving = service_stats["counts"], service_stats["proving_seconds"]
    shares = [share for result in vote_results for share in result.vote.shares]
    expected = expected_tally([result.planned for result in vote_results])
    outcome = DemoOutcome(
        shares=options.share_count,
        accepted=sum(share.is_accepted for share in shares),
        confirmed=counts.get("confirmed", 0) // options.helpers_per_share,
        failed=counts.get("failed", 0) + counts.get("expired", 0),
        early=early,
        tally_ok=counted == expected and len(shares) == options.share_count,
        lateness_ms_p50=service_stats["lateness_start"]["p50_ms"],
        lateness_ms_p99=service_stats["lateness_start"]["p99_ms"],
        broadcast_ms_p50=service_stats["lateness_broadcast"]["p50_ms"],
        broadcast_ms_p99=service_stats["lateness_broadcast"]["p99_ms"],
        proofs_per_second=round(counts.get("proven", 0) / proving, 2) if proving else None,
        proof_ms_p50=service_stats["proof"]["p50_ms"],
        circuit=service_stats["circuit"],
        helpers=options.helpers,
        proofs_per_reveal=round(counts.get("proven", 0) / options.share_count, 3),
        voters=options.voters,
        votes=len(vote_results),
        audit=_summarize_audit(audited),
        tally=[_tally_row(option, expected.get(option, 0), counted.get(option, 0)) for option in _all_options()],
        clients=_count_by_client(vote_results),
        seconds=round(seconds, 1),
    )
    return asdict(outcome)


def is_successful(outcome: Mapping[str, Any]) -> bool:
    """Return whether all shares are confirmed, none was early, the tally is correct, and no audit check failed."""
    complete = outcome["shares"] == outcome["accepted"] == outcome["confirmed"]
    correct = outcome["tally_ok"] and outcome["audit"]["verdict"] != "failed"
    return bool(complete and correct and not outcome["failed"] and not outcome["early"])


def _summarize_audit(audited: Mapping[str, Any]) -> DemoAudit:
    """The verdict of the audit, the number of passed checks, and the others with their reasons."""
    others = [check for check in audited["checks"] if check["verdict"] != "passed"]
    return DemoAudit(
        verdict=audited["verdict"],
        passed=len(audited["checks"]) - len(others),
        others=[{name: check[name] for name in ("id", "verdict", "why")} for check in others],
        seconds=audited["seconds"],
    )


def _count_by_client(vote_results: Sequence[VoteResult]) -> list[dict[str, Any]]:
    shares: defaultdict[str, list[bool]] = defaultdict(list)
    for result in vote_results:
        shares[result.client] += [share.is_accepted for share in result.vote.shares]
    return [
        {"client": name, "shares": len(accepted), "accepted": sum(accepted)}
        for name, accepted in shares.items()
        if name
    ]


def _all_options() -> list[tuple[int, int]]:
    return [
        (number + 1, option) for number, proposal in enumerate(PROPOSALS) for option in range(len(proposal["options"]))
    ]


def _tally_row(option: tuple[int, int], voted: int, counted: int) -> dict[str, Any]:
    proposal, decision = option
    details = PROPOSALS[proposal - 1]
    return {
        "proposal": proposal,
        "title": details["title"],
        "option": details["options"][decision],
        "voted": voted,
        "counted": counted,
    }


def print_report(outcome: Mapping[str, Any], console: Console) -> None:
    """Print the tables of shares and tally."""
    figures = Table(title="Shares", show_header=False)
    for name, value in (
        ("shares", outcome["shares"]),
        ("accepted by helpers", outcome["accepted"]),
        ("confirmed on chain", outcome["confirmed"]),
        ("failed", outcome["failed"]),
        ("requests that contained data of a share too early", outcome["early"]),
        ("due time → proof started, p50 / p99", _format_percentiles(outcome, "lateness_ms")),
        ("due time → broadcast, p50 / p99", _format_percentiles(outcome, "broadcast_ms")),
        ("proofs per second while proving", outcome["proofs_per_second"]),
        ("proofs per reveal", outcome["proofs_per_reveal"]),
        ("circuit", outcome["circuit"]),
        ("audit of the round", _describe_audit(outcome["audit"])),
    ):
        figures.add_row(name, str(value))
    console.print(figures)
    if outcome["clients"]:
        clients = Table("wallet", "shares", "accepted by helpers", title="Wallets")
        for row in outcome["clients"]:
            clients.add_row(row["client"], str(row["shares"]), str(row["accepted"]))
        console.print(clients)
    tally = Table("proposal", "option", "votes cast", "votes counted", "", title="Tally")
    for row in outcome["tally"]:
        verdict = "correct" if row["voted"] == row["counted"] else "WRONG"
        tally.add_row(row["title"], row["option"], str(row["voted"]), str(row["counted"]), verdict)
    console.print(tally)


def _describe_audit(audited: Mapping[str, Any]) -> str:
    """The audit in one line for each check that did not pass."""
    words, count = audited["verdict"].replace("_", " "), audited["passed"] + len(audited["others"])
    lines = [f"{words} ({audited['passed']} of {count} checks passed, {audited['seconds']:.1f} s)"]
    lines += [f"{check['id']} {check['verdict'].replace('_', ' ')}: {check['why']}" for check in audited["others"]]
    return "\n".join(lines)


def _format_percentiles(outcome: Mapping[str, Any], name: str) -> str:
    p50, p99 = outcome[f"{name}_p50"], outcome[f"{name}_p99"]
    return "–" if p50 is None else f"{p50:.0f} ms / {p99:.0f} ms"
