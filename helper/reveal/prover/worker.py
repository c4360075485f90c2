"""One prover worker: `python -m helper.reveal.prover.worker`, started by the service, never by hand.

It makes the keys of the circuits it was told (and checks them against their fingerprints), proves once to know how
long a proof takes here, says that it is ready, then answers frames one at a time until its input ends. The input ends
when the service does, however it ended; the reading thread then ends the worker at once, in the middle of a proof too.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from typing import IO, Protocol

import proofs
from helper.reveal.prover import frames
from helper.reveal.prover.frames import Frame
from helper.runtime.hardening import harden_process


class Engine(Protocol):
    """What makes and checks proofs; the real one is `CircuitEngine`, tests of the queue bring a quick one."""

    def warm(self, circuits: list[str]) -> Mapping[str, str]:
        """Make the keys of these circuits and give each one's fingerprint."""
        ...

    def self_test(self, circuit: str) -> float:
        """Make and check one proof; seconds of the proving alone."""
        ...

    def prove(self, job: Frame) -> Frame:
        """Make the proof that the job asks for."""
        ...

    def verify(self, job: Frame) -> Frame:
        """Check the proof that the job carries."""
        ...


class CircuitEngine:
    """The Halo 2 circuits."""

    def warm(self, circuits: list[str]) -> Mapping[str, str]:
        """Make the keys and check their fingerprints (`proofs.CircuitError` when they are not the chain's)."""
        return {name: proofs.warm(name) for name in circuits}

    def self_test(self, circuit: str) -> float:
        """Prove a made-up share against a tree with one leaf, and verify it."""
        from helper.reveal.prover.selftest import sample_job, sample_statement  # noqa: PLC0415 - needed once, at start

        job = sample_job()
        started = time.perf_counter()
        made = proofs.prove(circuit, **job)
        seconds = time.perf_counter() - started
        if not proofs.verify(circuit, made.proof, sample_statement(job, made)):
            raise proofs.CircuitError(f"{circuit}: a proof made at start does not verify")
        return seconds

    def prove(self, job: Frame) -> Frame:
        """Prove one share against one anchor; all bytes come as hex."""
        made = proofs.prove(
            job["circuit"],
            path=bytes.fromhex(job["path"]),
            position=job["position"],
            share_comms=bytes.fromhex(job["share_comms"]),
            primary_blind=bytes.fromhex(job["primary_blind"]),
            c1=bytes.fromhex(job["c1"]),
            c2=bytes.fromhex(job["c2"]),
            share_index=job["share_index"],
            proposal_id=job["proposal_id"],
            vote_decision=job["vote_decision"],
            round_id=bytes.fromhex(job["round_id"]),
        )
        return {"proof": made.proof, "nullifier": made.nullifier, "root": made.root}

    def verify(self, job: Frame) -> Frame:
        """Check one proof against its public inputs."""
        statement = proofs.Statement(
            nullifier=bytes.fromhex(job["nullifier"]),
            c1=bytes.fromhex(job["c1"]),
            c2=bytes.fromhex(job["c2"]),
            proposal_id=job["proposal_id"],
            vote_decision=job["vote_decision"],
            root=bytes.fromhex(job["root"]),
            round_id=bytes.fromhex(job["round_id"]),
        )
        return {"ok": proofs.verify(job["circuit"], bytes.fromhex(job["proof"]), statement)}


def main(engine: Engine) -> None:
    """Answer frames on standard input and output until the input ends."""
    harden_process()
    inbox: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    reader = threading.Thread(target=_read_frames, args=(sys.stdin.buffer, inbox), daemon=True)
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a stray print of a library must not become part of a frame
    reader.start()
    while True:
        _reply(replies, _answer(engine, inbox.get()))


def _read_frames(stream: IO[bytes], inbox: queue.SimpleQueue[Frame]) -> None:
    while (frame := frames.read(stream)) is not None:
        inbox.put(frame)
    os._exit(0)  # the service is gone; nothing here is worth finishing


def _reply(stream: IO[bytes], frame: Frame) -> None:
    try:
        stream.write(frames.encode(frame))
    except BrokenPipeError:
        os._exit(0)


def _answer(engine: Engine, frame: Frame) -> Frame:
    try:
        return _do(engine, frame)
    except proofs.CircuitError as error:
        return {"error": "circuit", "message": str(error)}
    except proofs.ProofsError as error:
        return {"error": "proof", "message": str(error)}
    except (KeyError, ValueError, TypeError) as error:
        return {"error": "protocol", "message": type(error).__name__}


def _do(engine: Engine, frame: Frame) -> Frame:
    match frame["op"]:
        case "start":
            os.nice(frame["nice"])
            prints = engine.warm(frame["circuits"])
            return {"fingerprints": dict(prints), "self_test_seconds": engine.self_test(frame["circuits"][0])}
        case "prove":
            return engine.prove(frame)
        case "verify":
            return engine.verify(frame)
        case other:
            raise ValueError(f"unknown operation {other!r}")


if __name__ == "__main__":
    main(CircuitEngine())
