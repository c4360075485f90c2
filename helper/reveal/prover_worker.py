"""Prover worker process, started by the service as `python -m helper.reveal.prover_worker`.

The worker creates the keys of one circuit, checks their fingerprint, creates one proof as a self-test and reports that
it is ready. It then processes requests one at a time until its input ends, which happens when the service exits for any
reason. The reading thread then terminates the worker immediately, even during a proof. The keys of other circuits are
created on request.

Requests and replies are frames: a line with a JSON object, in which bytes are hex-encoded. There is no version field,
because both ends come from the same wheel. This module imports none of the libraries of the pool, because a worker then
starts four times as fast.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from typing import IO, Any

import orjson

import proofs
from helper.circuits import get_generation
from helper.runtime.process_security import harden_process

Frame = dict[str, Any]


def encode_frame(frame: Frame) -> bytes:
    """Encode a frame with the end of its line."""
    return orjson.dumps(frame, default=_hex, option=orjson.OPT_APPEND_NEWLINE)


def _hex(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(type(value).__name__)


def main() -> None:
    """Process request frames from standard input until it ends; write replies to standard output."""
    harden_process()
    inbox: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    reader = threading.Thread(target=_read_frames, args=(sys.stdin.buffer, inbox), daemon=True)
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # output of a library must not become part of a frame
    reader.start()
    while True:
        _write_reply(replies, _create_reply(inbox.get()))


def _read_frames(stream: IO[bytes], inbox: queue.SimpleQueue[Frame]) -> None:
    for line in stream:
        if line.endswith(b"\n"):  # otherwise the service has exited while it was writing
            inbox.put(orjson.loads(line))
    os._exit(0)  # the service has exited; the current proof is not needed


def _write_reply(stream: IO[bytes], frame: Frame) -> None:
    try:
        stream.write(encode_frame(frame))
    except BrokenPipeError:
        os._exit(0)


def _create_reply(frame: Frame) -> Frame:
    try:
        return _handle_request(frame)
    except proofs.CircuitError as error:
        return {"error": "circuit", "message": str(error)}
    except proofs.ProofsError as error:
        return {"error": "proof", "message": str(error)}
    except (KeyError, ValueError, TypeError) as error:
        return {"error": "protocol", "message": type(error).__name__}


def _handle_request(frame: Frame) -> Frame:
    match frame["op"]:
        case "start":
            _create_keys(frame["circuits"])
            os.nice(frame["nice"])  # not before: due shares wait for the keys, also on a busy machine
            return {"self_test_seconds": get_generation(frame["circuits"][0]).self_test()}
        case "load":
            _create_keys(frame["circuits"])
            return {}
        case "prove":
            return get_generation(frame["circuit"]).prove(frame)
        case "verify":
            generation = get_generation(frame["circuit"])
            return {"ok": generation.verify(bytes.fromhex(frame["proof"]), generation.parse_statement(frame))}
        case other:
            raise ValueError(f"unknown operation {other!r}")


def _create_keys(circuits: list[str]) -> None:
    for name in circuits:
        get_generation(name).warm()


if __name__ == "__main__":
    main()
