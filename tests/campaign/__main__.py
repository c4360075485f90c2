"""Run the campaigns: `python -m tests.campaign [--only NAME …] [--quick] [--seed N] [--rest]`.

Prints a table, and writes every run to `build/campaign.json`. Exit status 1 when a promise was broken. All of them take
hours: `--rest` goes on where a run was ended, and prints the table of them all.
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

from tests.campaign.base import Findings, Setting
from tests.campaign.registry import NAMES, campaign

REPORT = Path("build/campaign.json")


def code() -> str:
    """Which commit is tried, as git names it; "unknown" outside a repository."""
    command = ("git", "describe", "--always", "--dirty")
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"


def found_before(*, seed: int, quick: bool) -> dict[str, dict[str, Any]]:
    """What the report has of this seed and length and held, by campaign: what broke is to be run again."""
    if not REPORT.exists():
        return {}
    results: list[dict[str, Any]] = json.loads(REPORT.read_text())
    return {one["name"]: one for one in results if (one["seed"], one["quick"], one["held"]) == (seed, quick, True)}


def run_one(name: str, *, seed: int, quick: bool) -> dict[str, Any]:
    """Run one campaign in a folder of its own; an error of its own is a broken promise too."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"campaign-{name}-", ignore_cleanup_errors=True) as folder:
        try:
            findings = asyncio.run(_run(name, Setting(seed, quick, Path(folder))))
        except Exception as error:
            traceback.print_exc()
            findings = Findings()
            findings.exactly("error", f"{type(error).__name__}: {error}", "none")
    told = {"name": name, "seed": seed, "quick": quick, "code": code(), "seconds": time.monotonic() - began}
    return {**told, **findings.as_json()}


async def _run(name: str, setting: Setting) -> Findings:
    return await campaign(name).run(setting)


def table(results: list[dict[str, Any]]) -> Table:
    """What was found, a row a goal."""
    made = Table(title="Campaigns", title_justify="left")
    for column in ("campaign", "goal", "promised", "found", ""):
        made.add_column(column, overflow="fold")
    for result in results:
        first = f"{result['name']}\n[dim]{result['seconds']:.0f} s, seed {result['seed']}, {result['code']}[/dim]"
        for goal, found in result["goals"].items():
            verdict = "[green]held[/green]" if found["held"] else "[red]BROKEN[/red]"
            made.add_row(first, goal, found["promise"], str(found["figure"]), verdict)
            first = ""
        for figure, value in result["figures"].items():
            made.add_row("", f"[dim]{figure}[/dim]", "", f"[dim]{value}[/dim]", "")
        made.add_section()
    return made


def write_report(found: dict[str, dict[str, Any]]) -> None:
    """What was found so far, in the order of the registry."""
    results = [found[name] for name in NAMES if name in found]
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="make campaign", description=__doc__)
    parser.add_argument("--only", action="append", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--quick", action="store_true", help="the short forms, as CI runs them")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rest", action="store_true", help="run only what the report does not have yet")
    options = parser.parse_args()
    found = found_before(seed=options.seed, quick=options.quick) if options.rest else {}
    for name in options.only or NAMES:
        if name not in found:
            print(f"{name} …", file=sys.stderr, flush=True)
            found[name] = run_one(name, seed=options.seed, quick=options.quick)
            write_report(found)
    results = [found[name] for name in NAMES if name in found]
    Console().print(table(results))
    return 0 if all(result["held"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
