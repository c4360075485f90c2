"""Checks the duration of a self-test proof, and the circuit against the nodes' version."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from helper.circuits.generation import LATEST_KNOWN_VERSION, format_version, is_newer_than_known
from helper.circuits.known_circuits import circuit_for_version, default_circuit
from helper.clock import Clock
from helper.doctor import CheckResult, fail, ok, warn
from helper.errors import ProverError, ProverTimeout
from helper.observability.service_state import ServiceState
from helper.reveal.prover_pool import DEFAULT_COMMAND, WorkerProcess, WorkerSpawner

SELF_TEST_TIMEOUT_SECONDS: Final = 12.0
"""Time limit in seconds for the keys and one proof: about 3 s of CPU for the slower circuit."""

MEASURE_SECONDS: Final = 120.0
"""Time limit in seconds for one step of a measurement: the keys and a proof of each worker."""
MEASURED_PROOFS: Final = 8
"""Proofs per worker in a measurement."""


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """Result of the self-test.

    Attributes:
        problem: why there is no proof, None if there is one.
        has_timed_out: whether the proof timed out.
        seconds: duration of the proof.
        start_seconds: time since the worker's start, including keys, proof and verification.
    """

    problem: str | None = None
    has_timed_out: bool = False
    seconds: float | None = None
    start_seconds: float | None = None


async def run_self_test(
    circuit: str,
    *,
    nice: int,
    clock: Clock,
    spawn: WorkerSpawner = WorkerProcess.spawn,
    timeout: float = SELF_TEST_TIMEOUT_SECONDS,
) -> SelfTestResult:
    """Start a worker, make one proof, and stop the worker."""
    started_at = clock.monotonic()
    try:
        worker = await spawn(DEFAULT_COMMAND, threads=1)
    except OSError as error:
        return SelfTestResult(problem=f"prover could not be started: {error.strerror}")
    try:
        reply = await worker.exchange({"op": "start", "circuits": [circuit], "nice": nice}, timeout)
    except ProverTimeout:
        return SelfTestResult(problem=f"timed out after {timeout:.0f} s", has_timed_out=True)
    except ProverError as error:
        return SelfTestResult(problem=str(error))
    finally:
        await worker.kill()
    if "error" in reply:
        return SelfTestResult(problem=str(reply["message"]))
    return SelfTestResult(seconds=float(reply["self_test_seconds"]), start_seconds=clock.monotonic() - started_at)


async def measure_proof_seconds(
    circuit: str,
    *,
    provers: int,
    nice: int,
    spawn: WorkerSpawner = WorkerProcess.spawn,
    timeout: float = MEASURE_SECONDS,
) -> float:
    """Measure the mean time of a proof in seconds, while all provers prove concurrently.

    Each worker makes `MEASURED_PROOFS` proofs after a first one, which fills caches.

    Raises:
        ProverError: a worker could not be started, failed, or did not finish in time.
    """
    workers: list[WorkerProcess] = []
    times: list[float] = []

    async def prove(worker: WorkerProcess, niceness: int) -> float:
        reply = await worker.exchange({"op": "start", "circuits": [circuit], "nice": niceness}, timeout)
        if "error" in reply:
            raise ProverError(str(reply["message"]))
        return float(reply["self_test_seconds"])

    async def prove_repeatedly(worker: WorkerProcess) -> None:
        times.extend([await prove(worker, 0) for _ in range(MEASURED_PROOFS)])

    try:
        for _ in range(provers):
            workers.append(await spawn(DEFAULT_COMMAND, threads=1))
        await asyncio.gather(*(prove(worker, nice) for worker in workers))
        await asyncio.gather(*map(prove_repeatedly, workers))
    except OSError as error:
        raise ProverError(f"prover could not be started: {error.strerror}") from None
    finally:
        await asyncio.gather(*(worker.kill() for worker in workers))
    return sum(times) / len(times)


def evaluate_proof(result: SelfTestResult, circuit: str, slots: int) -> CheckResult:
    """Evaluate the self-test proof."""
    facts: dict[str, Any] = {
        "circuit": circuit,
        "seconds": None if result.seconds is None else round(result.seconds, 3),
        "start_seconds": None if result.start_seconds is None else round(result.start_seconds, 3),
        "slots": slots,
    }
    if result.has_timed_out:
        advice = "Other processes use this machine's CPU: see `top`. Shares are proven just as slowly."
        return warn("prover", f"{circuit} self-test proof {result.problem}", advice, **facts)
    if result.problem is not None or result.seconds is None:
        advice = "Check the kernel log for the out-of-memory killer, and the load; else reinstall the helper."
        return fail("prover", f"{circuit} self-test proof failed: {result.problem}", advice, **facts)
    text = f"{circuit} proof in {result.seconds:.2f} s"
    if result.start_seconds is not None:
        text += f", {result.start_seconds:.1f} s including keys"
    return ok("prover", f"{text}; {slots} provers", **facts)


def evaluate_recorded_proofs(service: ServiceState) -> CheckResult | None:
    """Evaluate the proofs that the helper has made; None if it has made none."""
    proof, slots = service.proof, service.provers.workers
    if not proof.count or proof.p50_ms is None:
        return None
    text = f"{proof.count} proofs made, median {proof.p50_ms / 1000:.2f} s; {slots} provers"
    return ok("proofs", text, count=proof.count, p50_ms=proof.p50_ms, p99_ms=proof.p99_ms, slots=slots)


def evaluate_circuit(setting: str, current: str | None, versions: Sequence[str]) -> CheckResult:
    """Compare the circuit with the nodes' versions.

    Args:
        setting: [prover] circuit: auto, or the name of a circuit.
        current: circuit of the running helper; None if none runs.
        versions: versions of the nodes that responded; "" for a node that reports none.
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
    if setting != "auto":
        result = _find_wrong_setting(setting, expected, reported, facts)
        assumed = f"{setting}, set in [prover] circuit"
        text = f"{assumed}; node versions: {reported}"
    else:
        result = _find_other_circuit(current, expected, reported, facts)
        circuit = next(iter(expected), None)
        assumed = f"{circuit}, as for version {format_version(LATEST_KNOWN_VERSION)}"
        text = f"{circuit}, according to node version {reported}"
        if circuit is None:
            first = current or f"{default_circuit()} first"
            text = f"{first}; the nodes report no version, the first reveals determine it"
    if result is not None:
        return result
    return _warn_newer(newer, assumed, facts) if newer else ok("circuit", text, **facts)


def _find_wrong_setting(
    setting: str, expected: Collection[str], reported: str, facts: Mapping[str, Any]
) -> CheckResult | None:
    if not expected or setting in expected:
        return None
    (verified,) = expected
    return fail(
        "circuit",
        f'[prover] circuit is "{setting}", and nodes of version {reported} verify {verified}',
        'Set [prover] circuit = "auto" and restart.',
        **facts,
    )


def _find_other_circuit(
    current: str | None, expected: Collection[str], reported: str, facts: Mapping[str, Any]
) -> CheckResult | None:
    if current is None or not expected or current in expected:
        return None
    advice = (
        "If reveals are confirmed, no action is needed: the accepted circuit takes precedence over reported versions."
    )
    return warn(
        "circuit", f"the chain accepts {current}, although the nodes report version {reported}", advice, **facts
    )


def _warn_newer(newer: Sequence[str], assumed: str, facts: Mapping[str, Any]) -> CheckResult:
    return warn(
        "circuit",
        f"node version not known to this release: {', '.join(newer)}; assumed circuit: {assumed}",
        "If reveals are confirmed, no action is needed. Otherwise install a newer release of the helper.",
        **facts,
    )
