"""Measure the cost of proofs on this machine: `python -m bench.proving [--quick] [--circuit NAME]`.

Prints JSON. For each circuit:

- `keygen_cpu_seconds`: CPU time of generating the keys and tables, once per process
- `cpu_seconds_per_proof`: median, one thread
- `verify_ms`: median
- `proofs_per_second`, medians: `one_process` with one thread per core, `process_per_core` with one thread each

Each figure is measured in new processes, which start proving at the same time, once all keys are loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from statistics import median
from typing import Any

import proofs
from helper.circuits import create_sample_share, create_sample_statement, get_generation


def run_worker(circuit: str, count: int) -> None:
    """Run a worker: warm up, wait for a line on stdin, prove and verify `count` times, report."""
    cpu = time.process_time()
    proofs.warm(circuit)
    keygen_cpu = time.process_time() - cpu
    share, path = create_sample_share()
    witness = get_generation(circuit).create_job(share, path)
    statement = create_sample_statement(share, proofs.prove(circuit, **witness))  # the first proof fills caches
    print("ready", flush=True)
    sys.stdin.readline()
    started = time.perf_counter()
    proof_cpu, verify_seconds, generated = [], [], []
    for _ in range(count):
        cpu = time.process_time()
        generated.append(proofs.prove(circuit, **witness).proof)
        proof_cpu.append(time.process_time() - cpu)
    ended = time.perf_counter()
    for proof in generated:
        started_at = time.perf_counter()
        verified = proofs.verify(circuit, proof, statement)
        verify_seconds.append(time.perf_counter() - started_at)
        if not verified:
            raise SystemExit("a proof did not verify")
    report = {
        "keygen_cpu": keygen_cpu,
        "proof_cpu": proof_cpu,
        "verify_seconds": verify_seconds,
        "started": started,
        "ended": ended,
    }
    print(json.dumps(report), flush=True)


def run_workers(circuit: str, count: int, *, processes: int, threads: int) -> list[dict[str, Any]]:
    """Run workers that prove concurrently. Returns their reports."""
    command = [sys.executable, "-m", "bench.proving", "--worker", circuit, "--count", str(count)]
    environment = {**os.environ, "RAYON_NUM_THREADS": str(threads)}
    start = partial(
        subprocess.Popen[str],
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    workers = [start() for _ in range(processes)]
    for worker in workers:
        if worker.stdout is None or worker.stdout.readline() != "ready\n":
            raise SystemExit("a worker did not start")
    for worker in workers:
        if worker.stdin is not None:
            worker.stdin.write("go\n")
            worker.stdin.flush()
    return [json.loads(worker.communicate()[0]) for worker in workers]


def proofs_per_second(reports: list[dict[str, Any]]) -> float:
    """Return the combined proofs per second of the workers."""
    proven = sum(len(report["proof_cpu"]) for report in reports)
    seconds: float = max(r["ended"] for r in reports) - min(r["started"] for r in reports)
    return proven / seconds


def measure(circuit: str, *, runs: int, count: int) -> dict[str, Any]:
    """Measure all figures of one circuit."""
    cores = len(os.sched_getaffinity(0))
    alone = [run_workers(circuit, count, processes=1, threads=1)[0] for _ in range(runs)]
    together = [proofs_per_second(run_workers(circuit, count, processes=1, threads=cores)) for _ in range(runs)]
    apart = [proofs_per_second(run_workers(circuit, count, processes=cores, threads=1)) for _ in range(runs)]
    return {
        "keygen_cpu_seconds": round(median(report["keygen_cpu"] for report in alone), 3),
        "cpu_seconds_per_proof": round(median(cpu for report in alone for cpu in report["proof_cpu"]), 4),
        "verify_ms": round(median(s for report in alone for s in report["verify_seconds"]) * 1000, 2),
        "proofs_per_second": {
            "one_process": round(median(together), 2),
            "process_per_core": round(median(apart), 2),
        },
        "cores": cores,
        "runs": runs,
    }


def main() -> None:
    """Parse the command line and print one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one short run instead of three")
    parser.add_argument("--circuit", choices=[*proofs.CIRCUITS], help="only this circuit")
    parser.add_argument("--worker", choices=[*proofs.CIRCUITS], help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=10, help="proofs per run and process (default 10)")
    options = parser.parse_args()
    if options.worker:
        run_worker(options.worker, options.count)
        return
    circuits = [options.circuit] if options.circuit else [*proofs.CIRCUITS]
    runs, count = (1, 3) if options.quick else (3, options.count)
    print(json.dumps({name: measure(name, runs=runs, count=count) for name in circuits}))


if __name__ == "__main__":
    main()
