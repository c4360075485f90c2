"""Export and import of a queue with due shares: every share is confirmed once, and no request is early."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from devnet import ballot
from devnet.leak_check import find_leaks
from tests.integration.test_proof_bundle import run_command_line
from tests.support.devnet import DevChain
from tests.support.harness import HelperProcess, cast_vote, run_helper
from tests.support.schemas import assert_conforms
from tests.support.secrets import LEAVES_BEYOND_HEIGHTS, sensitive_values


@contextmanager
def suspend_processes(pids: Sequence[int]) -> Iterator[None]:
    """Suspend the provers, like a machine that is too slow."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # the service that was stopped meanwhile has killed it
                os.kill(pid, signal.SIGCONT)


async def run_operator_command(
    helper: HelperProcess, directory: Path, *arguments: str, code: int = 0
) -> dict[str, Any]:
    """Run a command with this helper's configuration. Returns its output."""
    command_line = ("queue", *arguments, "--config", str(helper.config), "--yes", "--json")
    exit_code, response, messages = await run_command_line(directory, *command_line)
    assert exit_code == code, messages
    assert_conforms(f"queue-{arguments[0]}", response)
    assert response["source"] == "daemon"
    return response


async def count_failed(helper: HelperProcess) -> int:
    return int((await helper.operator_get("/stats"))["total"]["failed"])


@pytest.mark.rule("R4", "R10", "R15")
async def test_export_move_of_due_shares_imports_elsewhere_or_back(
    tmp_path: Path, http: httpx.AsyncClient, chain: DevChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SVOTE_HELPER_BACKUP_PASSPHRASE", "correct horse battery")
    (tmp_path / "there").mkdir()
    async with run_helper(tmp_path, http, chain) as source, run_helper(tmp_path / "there", http, chain) as target:
        round_id = await chain.open_round()
        await chain.delegate(round_id, LEAVES_BEYOND_HEIGHTS)
        with suspend_processes(await source.worker_pids()):
            moved = await cast_vote(chain, source, round_id, proposal=1, times=ballot.immediate_times())
            assert moved.is_accepted
            exported = await run_operator_command(
                source, tmp_path, "export", "--move", "--output", "x.age", "--round", round_id.hex()
            )
            assert (exported["shares"], exported["moved"] + exported["stayed"]) == (16, 16)
            assert exported["moved"] > 0, "the provers hold only a few shares"
            assert await count_failed(source) == exported["moved"]

            imported = await run_operator_command(target, tmp_path, "import", "x.age")
            assert imported["taken"] == 16
            imported_again = await run_operator_command(target, tmp_path, "import", "x.age", code=3)
            assert (imported_again["taken"], imported_again["known"] + imported_again["spent"]) == (0, 16)
            await target.wait_until_confirmed(moved)
            await source.wait_until_confirmed(moved)
            assert await count_failed(source) == 0, "shares revealed by the other machine are tombstones"
            assert (await source.service_counts()).get("broadcast", 0) == 0

            returned_vote = await cast_vote(chain, source, round_id, proposal=2, times=ballot.immediate_times())
            lost = await run_operator_command(source, tmp_path, "export", "--move", "--output", "lost.age")
            assert lost["moved"] > 0
            returned = await run_operator_command(source, tmp_path, "retry", "--stage", "moved")
            assert returned["retried"] == lost["moved"]
        await source.wait_until_confirmed(returned_vote)

        actions = (await source.operator_get("/actions"))["actions"]
        assert [(action["what"], action["uid"], action["way"]) for action in actions] == [
            (what, os.getuid(), "socket") for what in ("retry", "move", "move")
        ]
        votes = [moved, returned_vote]
        nullifiers = [share.nullifier.hex() for vote in votes for share in vote.shares]
        assert await chain.spent_nullifiers(round_id) == dict.fromkeys(nullifiers, 1)
        assert (
            find_leaks(await chain.request_log(), sensitive_values(votes, await chain.transaction_hashes(round_id)))
            == []
        )
