"""Archives and audits one finished round, in a process of low priority: `python -m audit.round_process`.

Standard input has one line of JSON, a `Job`. The result is written to the archive. Standard output gets one line of
JSON: `{"verdict": …}` (null without an audit), or `{"error": …}`. The process ends when its input ends, which happens
when the service exits for any reason.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from contextlib import suppress

import orjson

from audit.archive_source import archive_documents, open_archived_round
from audit.auditor import audit_round
from audit.node_source import AgreedSource, open_readers
from audit.source import ROUND
from helper.chain.node_pool import create_node_pool
from helper.chain.rest_client import parse_round
from helper.clock import Clock, SystemClock
from helper.errors import ChainUnavailable, HelperError, InvalidResponse
from helper.object_store import Bucket
from helper.observability.log_config import configure
from helper.operations.archive_reader import open_archive_bucket, read_finished_round
from helper.operations.archived_objects import StoredAudit, audit_name, digest_result
from helper.operations.finished_rounds import Job
from helper.runtime.process_security import harden_process

NICE = 19
"""Priority of the process: it only uses processor time that nothing else needs."""


async def run_job(job: Job, bucket: Bucket, clock: Clock) -> str | None:
    """Archive the documents of a round unless they are archived, and audit it. Returns the verdict.

    Raises:
        HelperError: the chain or the archive is not available, or the round cannot be audited.
    """
    round_id = bytes.fromhex(job.round)
    archived = await read_finished_round(bucket, round_id)
    if archived is None:
        pool = create_node_pool(job.config, clock)
        try:
            await pool.probe_all()
            if pool.chain_id is None:  # the archive is kept under it
                raise ChainUnavailable("too few nodes report the same chain id")
            async with open_readers(pool, timeout=job.config.chain.timeout_seconds) as readers:
                archived = await archive_documents(
                    bucket, AgreedSource(readers, round_id), round_id, chain_id=pool.chain_id, height=job.height
                )
        finally:
            await pool.aclose()
    if not job.config.archive.audit:
        return None
    completed = await audit_round(await open_archived_round(bucket, round_id, archived), round_id)
    digest: str | None = None
    with suppress(InvalidResponse):
        digest = digest_result(parse_round(archived.documents[ROUND]), completed.totals)
    result = StoredAudit.model_validate({**completed.result.to_json(), "at": int(clock.now()), "result": digest})
    await bucket.put(audit_name(round_id), result.to_line())
    return result.verdict


async def _run(job: Job) -> dict[str, str | None]:
    clock = SystemClock()
    try:
        bucket = open_archive_bucket(job.config, clock)
        return {"verdict": await run_job(job, bucket, clock)}
    except HelperError as error:
        return {"error": str(error)}


def _exit_with_input() -> None:
    """End the process when the service has exited."""
    while sys.stdin.buffer.readline():
        pass
    os._exit(1)


def main() -> None:
    """Run the job of the first line of standard input."""
    harden_process()
    os.nice(NICE)
    configure("error")
    job = Job.model_validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=_exit_with_input, daemon=True).start()
    result = asyncio.run(_run(job))
    sys.stdout.buffer.write(orjson.dumps(result) + b"\n")
    sys.stdout.buffer.flush()
    os._exit(0)  # the thread holds the lock of standard input


if __name__ == "__main__":
    main()
