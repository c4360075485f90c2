"""A queue that moves to another machine while its shares are due: all are counted, once, and nothing is early."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from devnet import ballot
from devnet.leak_check import named_early
from tests.integration.test_proof_bundle import command
from tests.support.devnet import Chain
from tests.support.harness import Helper, cast_vote, helping
from tests.support.schemas import conforms
from tests.support.secrets import BEYOND_HEIGHTS, needles


@contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """Provers that do nothing for a while: a machine that is too slow."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def act(helper: Helper, folder: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    """What a command of this helper's operator prints."""
    words = ("queue", *arguments, "--config", str(helper.config), "--yes", "--json")
    ended, told, said = await command(folder, *words)
    assert ended == code, said
    conforms(f"queue-{arguments[0]}", told)
    assert told["source"] == "daemon"
    return told


async def failed(helper: Helper) -> int:
    return int((await helper.operator("/stats"))["total"]["failed"])


@pytest.mark.anyio
@pytest.mark.rule("R4", "R10", "R15")
async def test_due_shares_move_to_another_machine_or_are_taken_back(
    tmp_path: Path, http: httpx.AsyncClient, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SVOTE_HELPER_BACKUP_PASSPHRASE", "correct horse battery")
    (tmp_path / "there").mkdir()
    async with helping(tmp_path, http, chain) as here, helping(tmp_path / "there", http, chain) as there:
        round_id = await chain.open_round()
        await chain.delegate(round_id, BEYOND_HEIGHTS)
        with stopped(await here.workers()):
            moved = await cast_vote(chain, here, round_id, proposal=1, times=ballot.immediate())
            assert moved.accepted
            exported = await act(here, tmp_path, "export", "--move", "--output", "x.age", "--round", round_id.hex())
            assert (exported["shares"], exported["moved"] + exported["stayed"]) == (16, 16)
            assert exported["moved"] > 0, "the provers have a few in hand, no more"
            assert await failed(here) == exported["moved"]

            imported = await act(there, tmp_path, "import", "x.age")
            assert imported["taken"] == 16
            again = await act(there, tmp_path, "import", "x.age", code=3)
            assert (again["taken"], again["known"] + again["spent"]) == (0, 16)
            await there.confirmed(moved)
            await here.confirmed(moved)
            assert await failed(here) == 0, "what the other machine revealed is a tombstone here"
            assert (await here.counts()).get("broadcast", 0) == 0

            back = await cast_vote(chain, here, round_id, proposal=2, times=ballot.immediate())
            lost = await act(here, tmp_path, "export", "--move", "--output", "lost.age")
            assert lost["moved"] > 0
            taken_back = await act(here, tmp_path, "retry", "--stage", "moved")
            assert taken_back["retried"] == lost["moved"]
        await here.confirmed(back)

        acts = (await here.operator("/actions"))["actions"]
        assert [(one["what"], one["uid"], one["way"]) for one in acts] == [
            (what, os.getuid(), "socket") for what in ("retry", "move", "move")
        ]
        votes = [moved, back]
        nullifiers = [share.nullifier.hex() for vote in votes for share in vote.shares]
        assert await chain.spent(round_id) == dict.fromkeys(nullifiers, 1)
        assert named_early(await chain.requests(), needles(votes, await chain.hashes(round_id))) == []
