"""Archives the documents of each finished round, and audits it, once the archive has all its blocks.

The work is done by a process of low priority (`audit/round_process.py`), one round at a time, so it delays neither
shares nor proofs. The requests depend only on the nodes' lists of rounds.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Final

import anyio
import orjson
import structlog
from pydantic import BaseModel, ConfigDict

from helper.chain.chain_data import RoundStatus
from helper.chain.node_pool import ReadOnlyNodePool
from helper.clock import Clock
from helper.config.sections import Config, HelperSection
from helper.core.log_limits import LoggedProblem
from helper.errors import AuditError, HelperError
from helper.object_store import Bucket
from helper.operations.archived_objects import AUDITS, MANIFESTS, parse_round_object
from helper.operations.proof_bundle import Height, Hex32

log = structlog.get_logger("helper.audit")

WORKER_COMMAND: Final = (sys.executable, "-m", "audit.round_process")
MARGIN_BLOCKS: Final = 10
"""Blocks to wait after a round was first seen as finalized: the node that lists it may be ahead."""
RETRY_SECONDS: Final = 900.0
"""Seconds until a round is tried again after a failure."""
MAX_PROCESS_SECONDS: Final = 86_400.0
"""Time limit of a worker process. Other rounds wait for its end, so one that hangs must not run forever."""


class Job(BaseModel):
    """A finished round to archive and, if `[archive] audit` is set, to audit.

    Attributes:
        height: the archive is complete up to this block.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: Config
    round: Hex32
    height: Height


class FinishedRounds:
    """Archives and audits finished rounds.

    Args:
        pool: the nodes, whose lists of rounds are read; closed at the end.
    """

    def __init__(
        self,
        config: Config,
        bucket: Bucket,
        pool: ReadOnlyNodePool,
        *,
        archived_height: Callable[[], int],
        is_writer: Callable[[], bool],
        clock: Clock,
    ) -> None:
        self._interval_seconds = config.archive.check_seconds
        self._audits = config.archive.audit
        # the process gets no other setting, since some are secret
        self._worker_config = Config(
            chain=config.chain,
            helper=HelperSection(chain_api_port=config.helper.chain_api_port),
            s3=config.s3,
            archive=config.archive,
        )
        self._bucket = bucket
        self._pool = pool
        self._archived_height = archived_height
        self._is_writer = is_writer
        self._clock = clock
        self._done: set[bytes] | None = None
        self._finalized_at: dict[bytes, int] = {}  # the chain's height when the round was first listed as finalized
        self._retry_at: dict[bytes, float] = {}
        self._failures: defaultdict[bytes, LoggedProblem] = defaultdict(LoggedProblem)
        self._problem = LoggedProblem()

    async def run(self) -> None:
        """Process finished rounds until cancelled. Errors are logged and retried."""
        while True:
            try:
                await self.process()
                self._problem.clear()
            except HelperError as error:
                if self._problem.note():
                    log.warning("finished_rounds_unavailable", reason=str(error))
            await self._clock.sleep(self._interval_seconds)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._pool.aclose()

    async def process(self) -> None:
        """Archive and audit the rounds that are ready.

        Raises:
            HelperError: the chain or the archive is not available.
        """
        newest = self._pool.node_pool.head
        if not self._is_writer() or newest is None:
            self._done = None  # another host may process rounds: read the archive again when this host takes over
            return
        if self._done is None:
            names = await self._bucket.list_names(AUDITS if self._audits else MANIFESTS)
            self._done = {round_id for name in names if (round_id := parse_round_object(name)) is not None}
        for round_id in await self._list_finalized() - self._done:
            finalized_at = self._finalized_at.setdefault(round_id, newest.height)
            height = self._archived_height()
            if height >= finalized_at + MARGIN_BLOCKS and self._clock.monotonic() >= self._retry_at.get(round_id, 0.0):
                await self._process_round(round_id, height)

    async def _list_finalized(self) -> set[bytes]:
        """The rounds that enough nodes list as finalized, because what is archived of a round is never replaced."""
        lists = await self._pool.call_each(lambda client: client.rounds())
        counts = Counter(
            known.round_id for listed in lists for known in listed.rounds if known.status is RoundStatus.FINALIZED
        )
        return {round_id for round_id, count in counts.items() if count >= self._pool.node_pool.needed}

    async def _process_round(self, round_id: bytes, height: int) -> None:
        job = Job(config=self._worker_config, round=round_id.hex(), height=height)
        try:
            verdict = await run_worker_process(WORKER_COMMAND, job)
        except AuditError as error:
            self._retry_at[round_id] = self._clock.monotonic() + RETRY_SECONDS
            if self._failures[round_id].note(str(error)):
                log.warning("round_audit_incomplete", round=round_id.hex(), reason=str(error))
            return
        assert self._done is not None
        self._done.add(round_id)
        del self._finalized_at[round_id]
        if verdict == "failed":
            log.error(
                "round_audit_failed",
                round=round_id.hex(),
                advice=f"Repeat it, and compare other nodes: `svote-helper audit {round_id.hex()}`.",
            )
        else:
            log.info("round_archived", round=round_id.hex(), verdict=verdict or "not audited")


async def run_worker_process(command: Sequence[str], job: Job) -> str | None:
    """Run the worker process, and kill it if cancelled. Returns the verdict.

    Raises:
        AuditError: the process failed; the text has its reason.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "RAYON_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(MAX_PROCESS_SECONDS):
            process.stdin.write(job.model_dump_json().encode() + b"\n")
            line = await process.stdout.readline()
            await process.wait()
    except ConnectionError:
        line = b""
    except TimeoutError:
        raise AuditError(f"the process did not end within {MAX_PROCESS_SECONDS / 3600:.0f} h") from None
    finally:
        if process.returncode is None:
            process.kill()
            with anyio.CancelScope(shield=True):
                await process.wait()
        process.stdin.close()
    result = orjson.loads(line) if line else {"error": f"the process exited with status {process.returncode}"}
    if "error" in result:
        raise AuditError(result["error"])
    verdict: str | None = result["verdict"]
    return verdict
