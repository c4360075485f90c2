"""A proof of a made-up share, made by a prover worker as the service starts them, with its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from helper.clock import Clock
from helper.doctor.result import CheckResult, fail, ok, warn
from helper.errors import ProverError, ProverTimeout
from helper.reveal.prover.pool import DEFAULT_COMMAND
from helper.reveal.prover.process import Spawn, WorkerProcess

PATIENCE: Final = 12.0
"""Seconds for the keys and one proof: some 3 s of CPU for the slower circuit."""


@dataclass(frozen=True, slots=True)
class Proved:
    """What came of it.

    Attributes:
        problem: why there is no proof, None where there is one.
        late: whether there was none in time; it may still be made.
        seconds: how long the proof took.
        start_seconds: how long the worker took from its start, keys and proof and its check included.
    """

    problem: str | None = None
    late: bool = False
    seconds: float | None = None
    start_seconds: float | None = None


async def prove_once(
    circuit: str, *, nice: int, clock: Clock, spawn: Spawn = WorkerProcess.spawn, patience: float = PATIENCE
) -> Proved:
    """Start a worker, let it make its keys and a proof, and end it."""
    began = clock.monotonic()
    try:
        worker = await spawn(DEFAULT_COMMAND, threads=1)
    except OSError as error:
        return Proved(problem=f"no prover could be started: {error.strerror}")
    try:
        reply = await worker.exchange({"op": "start", "circuits": [circuit], "nice": nice}, patience)
    except ProverTimeout:
        return Proved(problem=f"none within {patience:.0f} s", late=True)
    except ProverError as error:
        return Proved(problem=str(error))
    finally:
        await worker.kill()
    if "error" in reply:
        return Proved(problem=str(reply["message"]))
    return Proved(seconds=float(reply["self_test_seconds"]), start_seconds=clock.monotonic() - began)


def judge_proof(proved: Proved, circuit: str, slots: int) -> CheckResult:
    """A line about the proof."""
    facts: dict[str, Any] = {
        "circuit": circuit,
        "seconds": None if proved.seconds is None else round(proved.seconds, 3),
        "start_seconds": None if proved.start_seconds is None else round(proved.start_seconds, 3),
        "slots": slots,
    }
    if proved.late:
        advice = "Other work takes this machine's cores: see `top`. Shares are proven as slowly while it lasts."
        return warn("prover", f"the self-test made no {circuit} proof in time: {proved.problem}", advice, **facts)
    if proved.problem is not None or proved.seconds is None:
        advice = "Look for the out-of-memory killer in the kernel's log, and at this machine's load; else reinstall."
        return fail("prover", f"the self-test made no {circuit} proof: {proved.problem}", advice, **facts)
    text = f"a {circuit} proof in {proved.seconds:.2f} s"
    if proved.start_seconds is not None:
        text += f", {proved.start_seconds:.1f} s with its keys"
    return ok("prover", f"{text}; {slots} at once", **facts)


def judge_measured(facts: Mapping[str, Any]) -> CheckResult | None:
    """A line about the daemon's own proofs; None where it has made none."""
    proof, slots = facts.get("proof") or {}, (facts.get("provers") or {}).get("workers", 1)
    if not proof.get("count") or proof.get("p50_ms") is None:
        return None
    text = f"the daemon made {proof['count']}, half of them within {proof['p50_ms'] / 1000:.2f} s; {slots} at once"
    return ok("proofs", text, count=proof["count"], p50_ms=proof["p50_ms"], p99_ms=proof.get("p99_ms"), slots=slots)
