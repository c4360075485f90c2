"""The service with fake proofs: `python -m tests.support.service --config FILE --ready-file FILE`.

`KILL_AT` kills it with SIGKILL at an exact moment: `<method>:<before|after>[:<n>]` names a method of the store or
of the chain's client, and the n-th call (default 1) after the first share was enqueued.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

from helper.app.service import Service
from helper.app.startup import run_service
from helper.chain.rest_client import ChainClient
from helper.config.loader import load
from helper.observability.log_config import configure
from helper.reveal.prover_pool import ProverPool, WorkerProcess
from helper.store.shares import EnqueueOperation
from helper.store.sqlite.store import SqliteStore

WORKER_COMMAND = (sys.executable, "-m", "tests.support.prover_worker")
KILL_TARGETS: tuple[type, ...] = (SqliteStore, ChainClient, ProverPool)


def install_kill(moment: str) -> None:
    """Patch the method so that it kills the process."""
    method, when, number = [*moment.split(":"), "1"][:3]
    calls, shares = 0, 0

    def wrap(original: Callable[..., Awaitable[Any]], name_of: Callable[..., str]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(original)
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls, shares
            name = name_of(*args)
            shares += name == "enqueue"
            calls += name == method and shares > 0
            is_moment = name == method and calls == int(number)
            if is_moment and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = await original(*args, **kwargs)
            if is_moment and when == "after":
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    for owner in KILL_TARGETS:
        if hasattr(owner, method):
            setattr(owner, method, wrap(getattr(owner, method), lambda *_: method))
    setattr(SqliteStore, "run", wrap(SqliteStore.run, _operation_name))  # noqa: B010 - mypy refuses an assignment


def _operation_name(_store: SqliteStore, op: Any, *_: Any) -> str:
    return "enqueue" if isinstance(op, EnqueueOperation) else op.__name__


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--ready-file", type=Path)
    options = parser.parse_args()
    config = load(options.config, {}, {}).config
    configure(config.log.level, config.log.format)
    if moment := os.environ.get("KILL_AT"):
        install_kill(moment)

    def started(url: str) -> None:
        partial = options.ready_file.with_suffix(".partial")
        partial.write_text(json.dumps({"url": url, "socket": str(config.socket_path)}))
        partial.replace(options.ready_file)

    service = Service(config, spawn_worker=functools.partial(WorkerProcess.spawn, command=WORKER_COMMAND))
    uvloop.run(run_service(service, on_started=started))


if __name__ == "__main__":
    main()
