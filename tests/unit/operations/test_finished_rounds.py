"""Finished rounds are archived and audited once, after their blocks, by a process of low priority."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any, cast

import anyio
import pytest
from structlog.testing import capture_logs

from audit.documents import parse_results
from audit.node_source import PROBE_SECONDS, AgreedSource
from audit.round_process import run_job
from helper.chain.chain_data import BlockHead, Round, RoundList, RoundStatus
from helper.chain.node_pool import ReadOnlyNodePool
from helper.chain.rest_client import parse_round
from helper.config.sections import ArchiveSection, ChainSection, Config, OperatorSection
from helper.errors import AuditError, BucketError, ChainUnavailable, ProofBundleError
from helper.operations.archive_reader import AuditResults
from helper.operations.archived_objects import StoredAudit, audit_name, digest_result, manifest_name, parse_object
from helper.operations.finished_rounds import RETRY_SECONDS, FinishedRounds, Job, run_worker_process
from tests.support.audit_rounds import threshold_round
from tests.support.bucket import MemoryBucket
from tests.support.clock import FakeClock
from tests.support.fakes import wait_until
from tests.support.round_archive import archive_round
from tests.unit.chain.fakes import create_network

pytestmark = pytest.mark.anyio

FIRST, SECOND = bytes([1]) * 32, bytes([2]) * 32


class FakePool:
    """The lists of rounds of two nodes, of which one may be false."""

    needed = 2

    def __init__(self) -> None:
        self.node_pool = self
        self.head: BlockHead | None = None
        self.statuses = {FIRST: RoundStatus.ACTIVE}
        self.false_statuses: dict[bytes, RoundStatus] = {}
        self.is_unreachable = False
        self.is_closed = False

    async def call_each(self, _: object) -> list[RoundList]:
        if self.is_unreachable:
            raise ChainUnavailable("away")
        lists = ({**self.statuses, **self.false_statuses}, self.statuses)
        return [RoundList([Round(*each, 1, (), 1) for each in statuses.items()], {}) for statuses in lists]

    async def aclose(self) -> None:
        self.is_closed = True


class FakeWorker:
    """Records jobs and returns a verdict, or fails."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.verdict: str | None = "passed"
        self.error: str | None = None

    async def __call__(self, _command: object, job: Job) -> str | None:
        self.jobs.append(job)
        if self.error is not None:
            raise AuditError(self.error)
        return self.verdict if job.config.archive.audit else None


CONFIG = Config(
    archive=ArchiveSection(place="s3://bucket/proofs"),
    chain=ChainSection(endpoints=("http://one.test",)),
    operator=OperatorSection(token="a secret of this host"),
)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> FakeWorker:
    worker = FakeWorker()
    monkeypatch.setattr("helper.operations.finished_rounds.run_worker_process", worker)
    return worker


class Setup:
    """A task with a fake chain and worker."""

    def __init__(self, worker: FakeWorker, config: Config = CONFIG) -> None:
        self.pool, self.worker, self.clock, self.bucket = FakePool(), worker, FakeClock(), MemoryBucket()
        self.archived_height, self.is_writer = 0, True
        self.pool.head = BlockHead("svote-1", 150, 0.0)
        self.rounds = FinishedRounds(
            config,
            self.bucket,
            cast("ReadOnlyNodePool", self.pool),
            archived_height=lambda: self.archived_height,
            is_writer=lambda: self.is_writer,
            clock=self.clock,
        )

    async def processed(self) -> list[str]:
        """Process once. Returns the rounds of the jobs so far, by their first byte."""
        await self.rounds.process()
        return [job.round[:2] for job in self.worker.jobs]


async def test_process_waits_for_the_end_of_the_round_and_its_blocks(worker: FakeWorker) -> None:
    setup = Setup(worker)
    assert await setup.processed() == []
    setup.pool.statuses[FIRST] = RoundStatus.FINALIZED
    setup.archived_height = 159
    assert await setup.processed() == []
    setup.pool.head, setup.archived_height = BlockHead("svote-1", 199, 0.0), 199
    assert await setup.processed() == ["01"]
    (job,) = setup.worker.jobs
    assert (job.height, job.config.archive.audit, job.round) == (199, True, FIRST.hex())
    assert await setup.processed() == ["01"]
    setup.pool.statuses[SECOND] = RoundStatus.FINALIZED
    setup.archived_height = 299
    assert await setup.processed() == ["01", "02"]


async def test_process_waits_until_enough_nodes_list_the_round_as_finalized(worker: FakeWorker) -> None:
    setup = Setup(worker)
    setup.pool.false_statuses[FIRST], setup.archived_height = RoundStatus.FINALIZED, 160
    assert await setup.processed() == []
    setup.pool.head, setup.pool.statuses[FIRST] = BlockHead("svote-1", 155, 0.0), RoundStatus.FINALIZED
    assert await setup.processed() == [], "the tally may be in a block that is not archived"
    setup.archived_height = 199
    assert await setup.processed() == ["01"]


async def test_process_gives_the_process_no_secret(worker: FakeWorker) -> None:
    setup = Setup(worker)
    setup.pool.statuses[FIRST], setup.archived_height = RoundStatus.FINALIZED, 199
    assert await setup.processed() == ["01"]
    text = setup.worker.jobs[0].model_dump_json()
    assert "a secret" not in text
    job = Job.model_validate_json(text)
    assert job.config.chain_nodes == CONFIG.chain_nodes
    assert (job.config.archive, job.config.s3) == (CONFIG.archive, CONFIG.s3)


@pytest.mark.parametrize("audit", [True, False])
async def test_process_skips_rounds_in_the_archive(worker: FakeWorker, audit: bool) -> None:
    setup = Setup(worker, Config(archive=ArchiveSection(place="s3://bucket/proofs", audit=audit)))
    setup.pool.statuses, setup.archived_height = dict.fromkeys((FIRST, SECOND), RoundStatus.FINALIZED), 199
    await setup.bucket.put(audit_name(FIRST) if audit else manifest_name(FIRST), b"")
    await setup.bucket.put(audit_name(SECOND) if not audit else manifest_name(SECOND), b"")
    assert await setup.processed() == ["02"]
    assert setup.worker.jobs[0].config.archive.audit is audit
    assert setup.bucket.request_counts["list"] == 1
    await setup.processed()
    assert setup.bucket.request_counts["list"] == 1


async def test_process_of_another_writer_is_taken_over(worker: FakeWorker) -> None:
    setup = Setup(worker)
    setup.pool.statuses[FIRST], setup.archived_height, setup.is_writer = RoundStatus.FINALIZED, 199, False
    assert await setup.processed() == []
    await setup.bucket.put(audit_name(FIRST), b"")  # by the other host
    setup.is_writer = True
    assert await setup.processed() == []


async def test_process_failed_round_is_tried_again_later(worker: FakeWorker) -> None:
    setup = Setup(worker)
    setup.pool.statuses[FIRST], setup.archived_height = RoundStatus.FINALIZED, 199
    setup.worker.error = "no chain node responded"
    with capture_logs() as logs:
        assert await setup.processed() == ["01"]
        assert await setup.processed() == ["01"]
        setup.clock.advance(RETRY_SECONDS)
        assert await setup.processed() == ["01", "01"]
    assert [(line["event"], line["reason"]) for line in logs] == [("round_audit_incomplete", "no chain node responded")]
    setup.worker.error = None
    setup.clock.advance(RETRY_SECONDS)
    assert await setup.processed() == ["01", "01", "01"]
    assert await setup.processed() == ["01", "01", "01"]


async def test_process_failed_audit_is_logged_as_error(worker: FakeWorker) -> None:
    setup = Setup(worker)
    setup.pool.statuses[FIRST], setup.archived_height, setup.worker.verdict = RoundStatus.FINALIZED, 199, "failed"
    with capture_logs() as logs:
        await setup.processed()
    assert [(line["event"], line["log_level"]) for line in logs] == [("round_audit_failed", "error")]
    assert FIRST.hex() in logs[0]["advice"]


async def test_run_survives_errors(worker: FakeWorker) -> None:
    setup = Setup(worker)
    setup.pool.is_unreachable = True
    with capture_logs() as logs:
        task = asyncio.create_task(setup.rounds.run())
        async with asyncio.timeout(20):
            await wait_until(lambda: logs)
            setup.pool.is_unreachable = False
            setup.pool.statuses[FIRST], setup.archived_height = RoundStatus.FINALIZED, 199
            while not setup.worker.jobs:
                setup.clock.advance(60)
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert [line["event"] for line in logs] == ["finished_rounds_unavailable", "round_archived"]
    assert not setup.pool.is_closed, "the task may be started again"
    await setup.rounds.aclose()
    assert setup.pool.is_closed


# ---------------------------------------------------------------------- the process


def script(text: str) -> tuple[str, ...]:
    return sys.executable, "-c", text


JOB = Job(config=CONFIG, round=FIRST.hex(), height=199)


async def test_worker_process_gets_the_job_and_returns_the_verdict() -> None:
    text = "import sys, os, json; job = json.loads(sys.stdin.readline());"
    text += "print(json.dumps({'verdict': job['round'] + os.environ['RAYON_NUM_THREADS']}))"
    assert await run_worker_process(script(text), JOB) == FIRST.hex() + "1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('print(\'{"error": "no node"}\')', "no node"),
        ("raise SystemExit(7)", "exited with status 7"),
        ("import sys; sys.stdin.readline(); raise SystemExit(3)", "exited with status 3"),
    ],
)
async def test_worker_process_failure_is_an_audit_error(text: str, message: str) -> None:
    with pytest.raises(AuditError, match=message):
        await run_worker_process(script(text), JOB)


async def test_worker_process_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helper.operations.finished_rounds.MAX_PROCESS_SECONDS", 0.5)
    text = "import sys; print('{}', flush=True); sys.stdin.read()"  # its input stays open
    with pytest.raises(AuditError, match="did not end"):
        await run_worker_process(script(text), JOB)


async def test_worker_process_is_killed_with_its_task(tmp_path: Any) -> None:
    path = tmp_path / "pid"
    text = f"import os, sys, pathlib; pathlib.Path({str(path)!r}).write_text(str(os.getpid())); sys.stdin.read()"
    task = asyncio.create_task(run_worker_process(script(text), JOB))
    await wait_until(lambda: path.exists() and path.read_text())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ProcessLookupError):
        os.kill(int(path.read_text()), 0)


async def test_run_job_audits_an_archived_round() -> None:
    source, clock = threshold_round(), FakeClock()
    bucket = await archive_round(source)
    job = Job(config=CONFIG, round=source.round_id.hex(), height=399)
    assert await run_job(job, bucket, clock) == "not_checked"
    stored = parse_object(StoredAudit, bucket.objects[audit_name(source.round_id)].body)
    assert (stored.round, stored.at, stored.verdict) == (source.round_id.hex(), int(clock.now()), "not_checked")
    assert [check.id for check in stored.checks if check.verdict != "passed"] == ["E"]
    known = parse_round(await source.document("round"))
    totals = parse_results(await source.document("results"), source.round_id)
    assert (stored.result, any(totals.values())) == (digest_result(known, totals), True)
    archives_only = CONFIG.model_copy(update={"archive": CONFIG.archive.model_copy(update={"audit": False})})
    assert await run_job(job.model_copy(update={"config": archives_only}), bucket, clock) is None


async def test_run_job_reads_nodes_for_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, _, pool = create_network("a", "b")
    usable: list[int] = []

    async def read_slowly(_: object, source: object, *__: object, **___: object) -> None:
        assert isinstance(source, AgreedSource), "what is archived is never one node's word"
        for _step in range(30):
            clock.advance(PROBE_SECONDS)
            await anyio.wait_all_tasks_blocked()  # the probes have ended
        usable.append(len(pool.usable_nodes))
        raise ChainUnavailable("the end of the test")

    monkeypatch.setattr("audit.round_process.create_node_pool", lambda *_: pool)
    monkeypatch.setattr("audit.round_process.archive_documents", read_slowly)
    with pytest.raises(ChainUnavailable, match="the end of the test"):
        await run_job(JOB, MemoryBucket(), clock)
    assert usable == [2]


# ---------------------------------------------------------------------- results


def stored_audit(round_id: bytes) -> bytes:
    return StoredAudit(round=round_id.hex(), at=7, verdict="passed", checks=[]).model_dump_json().encode()


async def test_audit_results_reads_each_result_once() -> None:
    bucket = MemoryBucket()
    results = AuditResults(bucket, clock=FakeClock(), interval_seconds=60)
    await results.refresh()
    assert results.get(FIRST) is None
    await bucket.put(audit_name(FIRST), stored_audit(FIRST))
    await bucket.put("audits/other", b"")
    await results.refresh()
    await results.refresh()
    stored = results.get(FIRST)
    assert stored is not None
    assert stored.at == 7
    assert bucket.request_counts["get"] == 1


async def test_invalid_result_hides_no_other() -> None:
    bucket = MemoryBucket()
    results = AuditResults(bucket, clock=FakeClock(), interval_seconds=60)
    await bucket.put(audit_name(FIRST), b"{}")
    await bucket.put(audit_name(SECOND), stored_audit(SECOND))
    with pytest.raises(ProofBundleError, match=FIRST.hex()):
        await results.refresh()
    assert results.get(FIRST) is None
    assert results.get(SECOND) is not None
    await bucket.put(audit_name(FIRST), stored_audit(FIRST))
    await results.refresh()
    assert results.get(FIRST) is not None


async def test_audit_results_run_survives_an_unreachable_store() -> None:
    class AwayBucket(MemoryBucket):
        is_away = True

        async def list_names(self, directory: str) -> list[str]:
            if self.is_away:
                raise BucketError("away")
            return await super().list_names(directory)

    bucket, clock = AwayBucket(), FakeClock()
    await bucket.put(audit_name(FIRST), stored_audit(FIRST))
    results = AuditResults(bucket, clock=clock, interval_seconds=60)
    with capture_logs() as logs:
        task = asyncio.create_task(results.run())
        async with asyncio.timeout(20):
            await wait_until(lambda: logs)
            bucket.is_away = False
            while results.get(FIRST) is None:
                clock.advance(60)
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert [line["event"] for line in logs] == ["audit_results_unavailable"]
