"""Run the campaigns: `python -m tests.campaign [--store NAME] [--only NAME …] [--quick] [--seed N] [--rest]`.

Prints a table, and writes every run to `build/campaign.json`. Exit status 1 when a promise was broken. All of them take
hours: `--rest` goes on where a run was ended, with the same store or with another, and prints the table of them all.
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

from tests.campaign.campaign import Findings, Setting
from tests.campaign.registry import NAMES, STORES, campaign, names
from tests.campaign.stores import cluster_of

REPORT = Path("build/campaign.json")
Found = dict[tuple[str, str], dict[str, Any]]
"""What was found, by store and campaign."""


def code() -> str:
    """Which commit is tried, as git names it; "unknown" outside a repository."""
    command = ("git", "describe", "--always", "--dirty")
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"


def found_before(*, seed: int, quick: bool) -> Found:
    """What the report has of this seed and length and held: what broke is to be run again."""
    if not REPORT.exists():
        return {}
    results: list[dict[str, Any]] = json.loads(REPORT.read_text())
    results = [{"store": STORES[0], **one} for one in results]  # older reports know of no other
    held = [one for one in results if (one["seed"], one["quick"], one["held"]) == (seed, quick, True)]
    return {(one["store"], one["name"]): one for one in held}


def run_one(name: str, *, store: str, seed: int, quick: bool) -> dict[str, Any]:
    """Run one campaign in a folder of its own; an error of its own is a broken promise too."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"campaign-{name}-", ignore_cleanup_errors=True) as folder:
        try:
            with cluster_of(store) as cluster:
                findings = asyncio.run(_run(name, Setting(seed, quick, Path(folder), cluster)))
        except Exception as error:
            traceback.print_exc()
            findings = Findings()
            findings.exactly("error", f"{type(error).__name__}: {error}", "none")
    seconds = time.monotonic() - began
    told = {"name": name, "store": store, "seed": seed, "quick": quick, "code": code(), "seconds": seconds}
    return {**told, **findings.as_json()}


async def _run(name: str, setting: Setting) -> Findings:
    return await campaign(name).run(setting)


def table(results: list[dict[str, Any]]) -> Table:
    """What was found, a row a goal."""
    made = Table(title="Campaigns", title_justify="left")
    for column in ("campaign", "goal", "promised", "found", ""):
        made.add_column(column, overflow="fold")
    for result in results:
        told = f"{result['store']}, {result['seconds']:.0f} s, seed {result['seed']}, {result['code']}"
        first = f"{result['name']}\n[dim]{told}[/dim]"
        for goal, found in result["goals"].items():
            verdict = "[green]held[/green]" if found["held"] else "[red]BROKEN[/red]"
            made.add_row(first, goal, found["promise"], str(found["figure"]), verdict)
            first = ""
        for figure, value in result["figures"].items():
            made.add_row("", f"[dim]{figure}[/dim]", "", f"[dim]{value}[/dim]", "")
        made.add_section()
    return made


def in_order(found: Found) -> list[dict[str, Any]]:
    """What was found so far, in the order of the registry."""
    return [found[store, name] for store in STORES for name in NAMES if (store, name) in found]


def write_report(found: Found) -> None:
    """Keep what was found so far."""
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(in_order(found), indent=1, ensure_ascii=False) + "\n")


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="make campaign", description=__doc__)
    parser.add_argument("--store", choices=STORES, default=STORES[0], help="where helpers keep their queues")
    parser.add_argument("--only", action="append", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--quick", action="store_true", help="the short forms, as CI runs them")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rest", action="store_true", help="run only what the report does not have yet")
    options = parser.parse_args()
    store, seed, quick = options.store, options.seed, options.quick
    if foreign := set(options.only or ()) - set(names(store)):
        parser.error(f"with this store there is nothing to try in: {', '.join(sorted(foreign))} (see registry.py)")
    found = found_before(seed=seed, quick=quick) if options.rest else {}
    for name in options.only or names(store):
        if (store, name) not in found:
            print(f"{name} …", file=sys.stderr, flush=True)
            found[store, name] = run_one(name, store=store, seed=seed, quick=quick)
            write_report(found)
    results = in_order(found)
    Console().print(table(results))
    return 0 if all(result["held"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
