"""`svote-helper conformance`: checks any share-reveal helper over HTTP."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import anyio
import typer

from conformance.check_failures import CheckFailed
from conformance.checks import CheckResult
from conformance.dev_chain import DevChain
from conformance.http_requests import HelperClient, parse_address
from conformance.runner import create_report, is_conformant, run_checks, select_checks, to_junit
from conformance.session import Session
from conformance.status_checks import STATUS_PATH
from helper.cli.conventions import ExitCode, JsonOption, emit, fail, new_file, print_message
from helper.cli.terminal import emit_table, progress_bar
from helper.clock import SystemClock
from helper.errors import UsageError


def conformance(
    url: Annotated[str, typer.Argument(metavar="URL", help="Base URL of the helper, as wallets use it.")],
    devnet: Annotated[
        str | None,
        typer.Option(
            metavar="REST",
            help="REST URL of a `svote-helper devnet` that the helper uses; rounds and votes are created on it.",
        ),
    ] = None,
    shares: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", readable=False, help="Real shares of an active round, as JSON lines. They are posted."
        ),
    ] = None,
    restart: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="Shell command that restarts the helper.")
    ] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="JUnit XML file to write; must not exist.")] = None,
    token: Annotated[str, typer.Option(help="X-Helper-Token, for helpers that require one.")] = "",
    within: Annotated[
        float, typer.Option(min=1, help="Seconds after its submit_at within which a share must be counted.")
    ] = 60.0,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Check (POST-012) or topic (POST) to run; may be repeated."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check a share-reveal helper, of any implementation, clause by clause.

    Sends requests as wallets, faulty clients and attackers do, and checks the responses. With --devnet, also checks
    when the helper reveals shares, and what its requests disclose to the node. Checks whose requirements are missing
    are skipped (docs/conformance-kit.md).

    Exit code 0: no must check failed, 1: at least one failed, or all were skipped, 6: the helper or the dev chain does
    not respond.
    """
    if devnet is not None and shares is not None:
        raise UsageError("--devnet and --shares are mutually exclusive")

    async def run() -> list[CheckResult]:
        checks, address = select_checks(only or []), parse_address(url)
        chain_address = parse_address(devnet) if devnet is not None else None
        clock = SystemClock()
        client = HelperClient(address, token, clock)
        chain = DevChain(chain_address.url) if chain_address is not None else None
        try:
            session = Session(
                client,
                clock,
                chain=chain,
                shares_file=shares,
                restart_command=restart,
                share_count=sum(check.shares for check in checks),
                reveal_seconds=within,
            )
            try:
                await client.get(STATUS_PATH)
            except CheckFailed as failure:
                fail(f"the helper does not respond: {failure}", ExitCode.UNREACHABLE)
            with progress_bar("{task.fields[shown]}", len(checks)) as update:
                return await run_checks(session, checks, lambda result: update(advance=1, shown=result.check.id))
        finally:
            await client.aclose()
            if chain is not None:
                await chain.aclose()

    with nullcontext() if junit is None else new_file(junit) as report:
        results = anyio.run(run)
        if report is not None:
            report.write(to_junit(url, results))
    code = ExitCode.OK if is_conformant(results) else ExitCode.FAILURE
    emit(create_report(results), lambda _: _print_results(results), json=json, code=code)


def _print_results(results: list[CheckResult]) -> None:
    rows = [
        (result.check.id, result.check.level, result.verdict, result.check.name, result.check.source, result.seen)
        for result in results
    ]
    emit_table(("check", "level", "verdict", "what", "source", "seen"), rows)
    counts = {
        verdict: sum(result.verdict == verdict for result in results) for verdict in ("passed", "failed", "skipped")
    }
    must = sum(result.verdict == "failed" and result.check.level == "must" for result in results)
    sys.stdout.flush()  # keeps the summary last if both streams go to one file
    print_message(
        f"{counts['passed']} passed, {counts['failed']} failed ({must} must, {counts['failed'] - must} should), "
        f"{counts['skipped']} skipped"
    )
