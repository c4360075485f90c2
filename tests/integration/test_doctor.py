"""The doctor beside a real helper and a chain with faults: it names what is wrong, and exits 0 when nothing is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from devnet import ballot
from helper.clock import SystemClock
from helper.doctor import run as run_module
from helper.doctor.proving import judge_proof, prove_once
from helper.doctor.result import CheckResult, Level, healthy
from helper.doctor.run import LONGEST, examine
from tests.support.command import command
from tests.support.devnet import Chain
from tests.support.harness import Helper, cast_vote, helping, soon
from tests.support.process import PATIENCE

pytestmark = pytest.mark.anyio


async def look(helper: Helper) -> dict[str, CheckResult]:
    """The findings by subject, without a proof."""
    report = await examine(helper.config, {}, SystemClock(), skip_proof=True)
    return {finding.subject: finding for finding in report.findings}


async def test_all_is_well_then_a_node_goes_wrong(
    tmp_path: Path, http: httpx.AsyncClient, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "harden_process", list)
    async with helping(tmp_path, http, chain, nodes=2, chain={"stale_seconds": 30}) as helper:
        helper.config.chmod(0o600)
        round_id = await chain.open_round()
        vote = await cast_vote(chain, helper, round_id, times=ballot.same_second(soon(3000)))
        assert vote.accepted

        found = await look(helper)
        assert healthy(found.values()), found
        assert found["helper"].facts["ready"] is True
        assert found[f"round {round_id.hex()[:8]}"].message.startswith("16 shares left, ")
        assert found["core files"].message.startswith("the helper writes none")
        assert found["database"].facts["shares"] == 16

        first = f"node {chain.nodes[0]['rest'].removeprefix('http://')}"
        for switches, message in (
            ({"catching_up": True}, "catching up"),
            ({"chain_id": "other-1"}, "on chain other-1"),
            ({"refuse": 1.0}, "connection failed"),
            ({"status_503": 1.0}, "HTTP 503"),
        ):
            await chain.faults(**switches)
            found = await look(helper)
            await chain.mend()
            assert found[first].level is Level.WARN, (switches, found[first])
            assert message in found[first].message
            assert found["chain"].level is Level.OK, "the other node is usable"

        strict = tmp_path / "strict.toml"
        strict.write_text(helper.config.read_text().replace("stale_seconds = 30", "stale_seconds = 2"))
        await chain.faults(stale=10_000)  # it shows its first block, which was made when the tests began
        report = await examine(strict, {}, SystemClock(), skip_proof=True)
        await chain.mend()
        (old,) = [finding for finding in report.findings if finding.subject == first]
        assert old.level is not Level.OK
        assert "newest block is" in old.message

        for node in (0, 1):
            await chain.faults(node=node, catching_up=True)
        found = await look(helper)
        assert (found[first].level, found["chain"].level) == (Level.FAIL, Level.FAIL)


async def test_the_command_says_it_in_one_line_for_machines(
    tmp_path: Path, http: httpx.AsyncClient, chain: Chain
) -> None:
    async with helping(tmp_path, http, chain) as helper:
        helper.config.chmod(0o600)
        ran = await command("doctor", "--config", str(helper.config), "--json", "--skip-proof")
        assert (ran.code, ran.out.count("\n"), ran.err) == (0, 1, ""), ran
        told: dict[str, Any] = ran.json()
        assert told["ok"] is True
        assert told["seconds"] < LONGEST
        assert {finding["level"] for finding in told["findings"]} == {"ok"}
    ran = await command("doctor", "--config", str(helper.config), "--skip-proof")
    assert ran.code == 3
    assert "Traceback" not in ran.err
    lines = ran.out.splitlines()
    assert f"warn  helper           not running: no answer on {helper.told['socket']}" in lines
    assert lines[lines.index(lines[1]) + 1].startswith("      -> Start it")


async def test_a_proof_is_made_and_timed_or_its_failure_told() -> None:
    clock = SystemClock()
    proved = await prove_once("k10", nice=0, clock=clock, patience=PATIENCE)
    assert proved.seconds is not None
    assert proved.start_seconds is not None
    assert 0 < proved.seconds < proved.start_seconds
    assert judge_proof(proved, "k10", 2).level is Level.OK
    late = judge_proof(await prove_once("k10", nice=0, clock=clock, patience=0.01), "k10", 2)
    assert (late.level, "timed out" in late.message) == (Level.WARN, True)
    broken = judge_proof(await prove_once("k12", nice=0, clock=clock, patience=PATIENCE), "k12", 2)
    assert (broken.level, "k12 self-test proof failed" in broken.message) == (Level.FAIL, True)
