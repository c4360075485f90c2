"""`svote-helper doctor`: runs all checks and prints results with advice."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import typer

from helper.cli.conventions import ConfigOption, ExitCode, JsonOption, emit, format_one_line, print_message
from helper.clock import SystemClock
from helper.core.json_records import fact
from helper.doctor import CheckResult, Level, all_ok
from helper.doctor.run import Doctor
from helper.observability import log_config

_SUBJECT_WIDTH: Final = 16
_INDENT: Final = " " * 6
_COLORS: Final = {Level.OK: "32", Level.WARN: "33", Level.FAIL: "31"}


@dataclass(frozen=True, slots=True)
class LevelCounts:
    """Number of results by level."""

    ok: int = fact("Number of checks that are ok.")
    warn: int = fact("Number of warnings.")
    fail: int = fact("Number of failed checks.")


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """Output of `doctor --json`."""

    ok: bool = fact("Whether all checks are ok.")
    counts: LevelCounts = fact("Number of results by level.")
    seconds: float = fact("Duration in seconds.")
    findings: Sequence[CheckResult] = fact("Results of the checks.")


def doctor(
    config: ConfigOption = None,
    skip_proof: Annotated[
        bool, typer.Option("--skip-proof", help="Skip the self-test proof, which takes a few seconds.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Check configuration, database, nodes and provers; suggest fixes.

    Exits with 0 if all checks pass, otherwise with 3.
    """
    log_config.configure("error", "auto")
    clock = SystemClock()
    checks, started_at = Doctor(config, os.environ, clock, skip_proof=skip_proof), clock.monotonic()
    findings = asyncio.run(checks.run_all())
    levels = Counter(finding.level for finding in findings)
    counts = LevelCounts(levels[Level.OK], levels[Level.WARN], levels[Level.FAIL])
    report = DoctorReport(all_ok(findings), counts, round(clock.monotonic() - started_at, 2), findings)
    emit(report, lambda _: _print_report(report), json=json)
    code = ExitCode.OK if report.ok else ExitCode.DEGRADED
    if checks.has_hung_checks:
        # hung threads would block a normal exit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise typer.Exit(code)


def _print_report(report: DoctorReport) -> None:
    """Print each result with its advice below. Lines are wrapped only on a terminal."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    # https://no-color.org
    colored = columns is not None and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    for finding in report.findings:
        level = finding.level.value.ljust(5)
        first_line = f"{level} {finding.subject.ljust(_SUBJECT_WIDTH)} {finding.message}"
        lines = _wrap(format_one_line(first_line), columns, _INDENT)
        if colored:
            lines[0] = f"\x1b[{_COLORS[finding.level]}m{level}\x1b[0m{lines[0][len(level) :]}"
        if finding.advice:
            lines += _wrap(format_one_line(f"{_INDENT}-> {finding.advice}"), columns, _INDENT + "   ")
        typer.echo("\n".join(lines))
    counts = report.counts
    print_message(f"{counts.ok} ok, {counts.warn} warnings, {counts.fail} failed, in {report.seconds:.1f} s")


def _wrap(text: str, columns: int | None, indent: str) -> list[str]:
    if columns is None:
        return [text]
    return textwrap.wrap(
        text,
        max(24, columns),
        subsequent_indent=indent,
        break_on_hyphens=False,
        drop_whitespace=True,
        replace_whitespace=False,
    ) or [text]
