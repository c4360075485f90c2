"""Checks the duration of a self-test proof, and the circuit against the nodes' version."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from helper.circuits import (
    LATEST_KNOWN_VERSION,
    circuit_for_version,
    default_circuit,
    is_newer_than_known,
)
from helper.clock import Clock
from helper.doctor import CheckResult, fail, ok, warn
from helper.errors import ProverError, ProverTimeout
from helper.reveal.prover_pool import WorkerProcess

MEASURE_SECONDS: Final = 120.0
"""Time limit in seconds for one step of a measurement: the keys and a proof of each worker."""
MEASURED_PROOFS: Final = 8
"""Proofs per worker in a measurement."""


async def check_proof(circuit: str, slots: int, *, nice: int, clock: Clock, timeout: float) -> CheckResult:
    """Start a worker, make one proof, and stop the worker. The facts have the time of the proof, null without one.

    Keys and proof take about 3 s of CPU for the slower circuit.
    """
    facts: dict[str, Any] = {"circuit": circuit, "seconds": None, "start_seconds": None, "slots": slots}
    started_at = clock.monotonic()
    try:
        worker = await _start_worker()
        try:
            seconds = await _prove(worker, circuit, nice, timeout)
        finally:
            await worker.kill()
    except ProverTimeout:
        advice = "Other processes use this machine's CPU: see `top`. Shares are proven just as slowly."
        return warn("prover", f"{circuit} self-test proof timed out after {timeout:.0f} s", advice, **facts)
    except ProverError as error:
        advice = "Check the kernel log for the out-of-memory killer, and the load; else reinstall the helper."
        return fail("prover", f"{circuit} self-test proof failed: {error}", advice, **facts)
    start_seconds = clock.monotonic() - started_at
    facts |= {"seconds": round(seconds, 3), "start_seconds": round(start_seconds, 3)}
    text = f"{circuit} proof in {seconds:.2f} s, {start_seconds:.1f} s including keys; {slots} provers"
    return ok("prover", text, **facts)


async def measure_proof_seconds(circuit: str, *, provers: int, nice: int) -> float:
    """Measure the mean time of a proof in seconds, while all provers prove concurrently.

    Each worker makes `MEASURED_PROOFS` proofs after a first one, which fills caches.

    Raises:
        ProverError: a worker could not be started, failed, or did not finish in time.
    """
    workers: list[WorkerProcess] = []
    times: list[float] = []

    async def prove_repeatedly(worker: WorkerProcess) -> None:
        times.extend([await _prove(worker, circuit, 0, MEASURE_SECONDS) for _ in range(MEASURED_PROOFS)])

    try:
        for _ in range(provers):
            workers.append(await _start_worker())
        await asyncio.gather(*(_prove(worker, circuit, nice, MEASURE_SECONDS) for worker in workers))
        await asyncio.gather(*map(prove_repeatedly, workers))
    finally:
        await asyncio.gather(*(worker.kill() for worker in workers))
    return sum(times) / len(times)


async def _start_worker() -> WorkerProcess:
    try:
        return await WorkerProcess.spawn(threads=1)
    except OSError as error:
        raise ProverError(f"prover could not be started: {error.strerror}") from None


async def _prove(worker: WorkerProcess, circuit: str, nice: int, timeout: float) -> float:
    """Have a worker create its keys, if it has none, and make a proof. Returns the time of the proof in seconds."""
    reply = await worker.exchange({"op": "start", "circuits": [circuit], "nice": nice}, timeout)
    if "error" in reply:
        raise ProverError(str(reply["message"]))
    return float(reply["self_test_seconds"])


def evaluate_circuit(setting: str, current: str | None, versions: Sequence[str]) -> CheckResult:
    """Compare the circuit with the nodes' versions.

    Args:
        setting: [prover] circuit.
        current: circuit of the running helper; None if none runs.
        versions: "" for a node that reports none.
    """
    expected = {circuit for version in versions if (circuit := circuit_for_version(version)) is not None}
    reported = ", ".join(sorted({version for version in versions if version})) or "none"
    newer = sorted({version for version in versions if is_newer_than_known(version)})
    facts = {
        "setting": setting,
        "current": current,
        "versions": sorted(set(versions)),
        "expected": sorted(expected),
        "newer_than_known": newer,
    }
    if len(expected) > 1:
        advice = "The chain is being upgraded, or one node runs another version: ask its operator."
        return warn("circuit", f"the nodes run versions with different circuits: {reported}", advice, **facts)
    (verified,) = expected or (None,)
    if setting != "auto":
        if verified not in {None, setting}:
            text = f'[prover] circuit is "{setting}", and nodes of version {reported} verify {verified}'
            return fail("circuit", text, 'Set [prover] circuit = "auto" and restart.', **facts)
        assumed = f"{setting}, set in [prover] circuit"
        text = f"{assumed}; node versions: {reported}"
    else:
        if current is not None and verified not in {None, current}:
            text = f"the chain accepts {current}, although the nodes report version {reported}"
            advice = "the accepted circuit takes precedence over reported versions."
            return warn("circuit", text, f"If reveals are confirmed, no action is needed: {advice}", **facts)
        assumed = f"{verified}, as for version {LATEST_KNOWN_VERSION}"
        text = f"{verified}, according to node version {reported}"
        if verified is None:
            first = current or f"{default_circuit()} first"
            text = f"{first}; the nodes report no version, the first reveals determine it"
    if newer:
        text = f"node version not known to this release: {', '.join(newer)}; assumed circuit: {assumed}"
        advice = "If reveals are confirmed, no action is needed. Otherwise install a newer release of the helper."
        return warn("circuit", text, advice, **facts)
    return ok("circuit", text, **facts)
