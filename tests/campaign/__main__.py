"""Run the campaigns: `python -m tests.campaign [--store NAME] [--only NAME …] [--quick] [--seed N] [--rest]`.

Prints a table, and writes every result to `build/campaign.json`. The exit status is 1 if a promise was broken. All
campaigns take more than an hour: `--rest` continues an interrupted run, with the same store or another, and prints all
results.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.campaign.campaign import CampaignRun, Findings, run_cluster
from tests.campaign.registry import CAMPAIGNS, STORE_NAMES, campaign_names, load_campaign

REPORT = Path("build/campaign.json")
Report = dict[tuple[str, str], dict[str, Any]]
"""Results by store and campaign."""


def read_commit() -> str:
    """Return the tested commit as git names it; "unknown" outside a repository."""
    command = ("git", "describe", "--always", "--dirty")
    output = subprocess.run(command, capture_output=True, text=True, check=False)
    return output.stdout.strip() or "unknown"


def previous_seed_results(*, seed: int, quick: bool) -> Report:
    """Return passed results for this seed and length; failed campaigns run again."""
    if not REPORT.exists():
        return {}
    results: list[dict[str, Any]] = json.loads(REPORT.read_text())
    is_held = [result for result in results if (result["seed"], result["quick"], result["held"]) == (seed, quick, True)]
    return {(result["store"], result["name"]): result for result in is_held}


def run_campaign(name: str, *, store: str, seed: int, quick: bool) -> dict[str, Any]:
    """Run one campaign in a new directory; its own error counts as a failed goal."""
    started_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"campaign-{name}-", ignore_cleanup_errors=True) as directory:
        try:
            with run_cluster(store) as cluster:
                findings = asyncio.run(_run(name, CampaignRun(seed, quick, Path(directory), cluster)))
        except Exception as error:
            traceback.print_exc()
            findings = Findings()
            findings.require_equal("error", f"{type(error).__name__}: {error}", "none")
    seconds = time.monotonic() - started_at
    run_facts = {"name": name, "store": store, "seed": seed, "quick": quick, "code": read_commit(), "seconds": seconds}
    return {**run_facts, **findings.as_json()}


async def _run(name: str, setting: CampaignRun) -> Findings:
    return await load_campaign(name)(setting)


def format_table(results: list[dict[str, Any]]) -> Table:
    """Return the results as a table with one row per goal."""
    rows = Table(title="Campaigns", title_justify="left")
    for column in ("campaign", "goal", "promised", "measured", ""):
        rows.add_column(column, overflow="fold")
    for result in results:
        description = f"{result['store']}, {result['seconds']:.0f} s, seed {result['seed']}, {result['code']}"
        first = f"{result['name']}\n[dim]{description}[/dim]"
        for goal, outcome in result["goals"].items():
            verdict = "[green]held[/green]" if outcome["held"] else "[red]BROKEN[/red]"
            rows.add_row(first, goal, outcome["promise"], str(outcome["figure"]), verdict)
            first = ""
        for figure, value in result["figures"].items():
            rows.add_row("", f"[dim]{figure}[/dim]", "", f"[dim]{value}[/dim]", "")
        rows.add_section()
    return rows


def sort_report(report: Report) -> list[dict[str, Any]]:
    """Return the results so far in the registry's order."""
    return [report[store, name] for store in STORE_NAMES for name in CAMPAIGNS if (store, name) in report]


def write_report(report: Report) -> None:
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(sort_report(report), indent=1, ensure_ascii=False) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make campaign", description=__doc__)
    parser.add_argument("--store", choices=STORE_NAMES, default=STORE_NAMES[0], help="store of the helpers' queues")
    parser.add_argument("--only", action="append", choices=CAMPAIGNS, metavar="NAME", help=", ".join(CAMPAIGNS))
    parser.add_argument("--quick", action="store_true", help="the short forms, as CI runs them")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rest", action="store_true", help="run only campaigns without a result in the report")
    options = parser.parse_args()
    store, seed, quick = options.store, options.seed, options.quick
    if foreign := set(options.only or ()) - set(campaign_names(store)):
        parser.error(f"campaigns that do not apply to this store: {', '.join(sorted(foreign))} (see registry.py)")
    report = previous_seed_results(seed=seed, quick=quick) if options.rest else {}
    for name in options.only or campaign_names(store):
        if (store, name) not in report:
            print(f"{name} …", file=sys.stderr, flush=True)
            report[store, name] = run_campaign(name, store=store, seed=seed, quick=quick)
            write_report(report)
    results = sort_report(report)
    Console().print(format_table(results))
    return 0 if all(result["held"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
