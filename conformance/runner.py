"""Runs checks: slow ones concurrently, all others sequentially, phase by phase."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from conformance.checks import Check, CheckResult, Phase
from conformance.session import ENDED, Session
from conformance.verdicts import CheckFailed, CheckSkipped, shorten

CHECK_SECONDS: Final = 600.0
"""Time limit of one check. Checks have shorter limits of their own."""
_BEFORE_SLOW_END: Final = (Phase.QUICK, Phase.QUIET, Phase.REVEAL)
_AFTER_SLOW_END: Final = (Phase.RESTART, Phase.END)


async def run_checks(
    session: Session, checks: Sequence[Check], on_result: Callable[[CheckResult], None] = lambda _: None
) -> list[CheckResult]:
    """Run checks. Returns their results in the order of `checks`.

    The rounds that the run has created on the dev chain are ended.

    If the helper accepts no share at all, the first check that needs shares fails with its response, and the others are
    skipped.

    Raises:
        ChainUnavailable: the dev chain does not respond.
    """
    results: dict[str, CheckResult] = {}

    def add(result: CheckResult) -> None:
        results[result.check.id] = result
        on_result(result)

    runnable: list[Check] = []
    for check in checks:
        reason = _missing_reason(session, check)
        if reason is None:
            runnable.append(check)
        else:
            add(CheckResult(check, "skipped", reason))
    needing = [check for check in runnable if check.needs_shares]
    if needing and (refusal := await _prepare(session)) is not None:
        add(CheckResult(needing[0], "failed", refusal))
        for check in needing[1:]:
            add(CheckResult(check, "skipped", f"no valid share is accepted, see {needing[0].id}"))
        runnable = [check for check in runnable if not check.needs_shares]

    async def run_phase(phase: Phase) -> None:
        for check in runnable:
            if check.phase is phase:
                add(await _run_check(session, check))

    async def run_slow(check: Check) -> None:
        add(await _run_check(session, check))

    slow = [asyncio.ensure_future(run_slow(check)) for check in runnable if check.phase is Phase.SLOW]
    try:
        for phase in _BEFORE_SLOW_END:
            await run_phase(phase)
        await asyncio.gather(*slow)
    finally:
        for task in slow:
            task.cancel()
    for phase in _AFTER_SLOW_END:
        await run_phase(phase)
    await session.end_rounds()
    return [results[check.id] for check in checks]


def _missing_reason(session: Session, check: Check) -> str | None:
    """Why a check cannot run."""
    if check.needs_token and not session.client.token:
        return "needs a helper with a token (--token)"
    if check.needs_restart and session.restart_command is None:
        return "needs a command that restarts the helper (--restart)"
    if check.needs_chain and not session.has_chain:
        return "needs a dev chain (--devnet)"
    if check.needs_shares and not session.has_shares:
        return "needs shares (--devnet or --shares)"
    return ENDED if check.needs_shares and session.has_ended else None


async def _prepare(session: Session) -> str | None:
    """Create round and shares. Returns the response to a valid share that was not accepted."""
    try:
        await session.prepare()
    except CheckFailed as failure:
        return str(failure)
    return None


async def _run_check(session: Session, check: Check) -> CheckResult:
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            return CheckResult(check, "passed", shorten(await check.run(session)))
    except CheckFailed as failure:
        return CheckResult(check, "failed", shorten(str(failure)))
    except CheckSkipped as reason:
        return CheckResult(check, "skipped", str(reason))
    except TimeoutError:
        return CheckResult(check, "failed", f"not finished within {CHECK_SECONDS:.0f} s")
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        # The JSON of the response has an unexpected shape.
        return CheckResult(check, "failed", shorten(f"unexpected response: {type(error).__name__} {error}"))
