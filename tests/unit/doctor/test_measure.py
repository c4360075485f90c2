"""Measuring the time of a proof with all provers working."""

from __future__ import annotations

import pytest

from helper.doctor.proving import MEASURED_PROOFS, measure_proof_seconds
from helper.errors import ProverCrashed, ProverError
from helper.reveal.prover_pool import WorkerProcess
from helper.reveal.prover_worker import Frame

pytestmark = pytest.mark.anyio


class ScriptedWorker(WorkerProcess):
    """A worker that needs 3 s for its first proof and `seconds` for each other."""

    def __init__(self, seconds: float, error: Exception | str | None = None) -> None:
        """Start no process."""
        self.frames: list[Frame] = []
        self.is_killed = False
        self._seconds, self._error = seconds, error

    async def exchange(self, frame: Frame, timeout: float) -> Frame:
        self.frames.append(frame)
        if isinstance(self._error, Exception):
            raise self._error
        if self._error is not None:
            return {"error": "circuit", "message": self._error}
        return {"self_test_seconds": 3.0 if len(self.frames) == 1 else self._seconds}

    async def kill(self) -> None:
        self.is_killed = True


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedWorker]:
    """The workers that can be started, in this order."""
    workers: list[ScriptedWorker] = []
    waiting = iter(workers)

    async def spawn(*, threads: int) -> WorkerProcess:
        assert threads == 1
        worker = next(waiting, None)
        if worker is None:
            raise OSError(12, "Cannot allocate memory")
        return worker

    monkeypatch.setattr(WorkerProcess, "spawn", spawn)
    return workers


async def test_measure_is_the_mean_without_the_first_proofs(workers: list[ScriptedWorker]) -> None:
    workers += [ScriptedWorker(0.4), ScriptedWorker(0.6)]
    seconds = await measure_proof_seconds("k10", provers=2, nice=10)
    assert seconds == pytest.approx(0.5)
    for worker in workers:
        assert len(worker.frames) == 1 + MEASURED_PROOFS
        assert [frame["nice"] for frame in worker.frames] == [10] + [0] * MEASURED_PROOFS, "nice values add up"
        assert worker.is_killed


@pytest.mark.parametrize("error", [ProverCrashed("worker exited"), "unknown circuit"])
async def test_measure_fails_with_a_worker_and_kills_all(workers: list[ScriptedWorker], error: Exception | str) -> None:
    workers += [ScriptedWorker(0.4), ScriptedWorker(0.4, error)]
    with pytest.raises(ProverError, match=str(error)):
        await measure_proof_seconds("k10", provers=2, nice=0)
    assert all(worker.is_killed for worker in workers)


async def test_measure_without_memory_for_a_worker_fails(workers: list[ScriptedWorker]) -> None:
    workers += [ScriptedWorker(0.4)]
    with pytest.raises(ProverError, match="Cannot allocate memory"):
        await measure_proof_seconds("k10", provers=2, nice=0)
    assert workers[0].is_killed
