"""The doctor with a running helper and a faulty chain reports every fault; without one, it exits with 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from devnet import ballot
from helper.clock import SystemClock
from helper.doctor import CheckResult, Level, all_ok
from helper.doctor import chain as chain_module
from helper.doctor import run as run_module
from helper.doctor.proving import check_proof
from helper.doctor.run import MAX_TOTAL_SECONDS, Doctor
from tests.support.command import run_in_process
from tests.support.devnet import DevChain
from tests.support.harness import HelperProcess, cast_vote, run_helper, unix_time_in
from tests.support.process import TIMEOUT_SECONDS
from tests.support.wrong_helper import run_wrong_helper


@pytest.fixture(autouse=True)
def _slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_module, "SLOW_CALL_SECONDS", MAX_TOTAL_SECONDS)


def has_read_all_blocks(facts: dict[str, Any]) -> bool:
    """Whether the check of the blocks reports nothing."""
    return {(check["problem"], check["note"]) for check in facts["checks"] if check["name"] == "blocks"} == {
        (None, None)
    }


async def run_checks(helper: HelperProcess) -> dict[str, CheckResult]:
    """Return the findings by subject, without a proof."""
    findings = await Doctor(helper.config, {}, SystemClock(), skip_proof=True).run_all()
    return {finding.subject: finding for finding in findings}


async def test_doctor_healthy_then_faulty_node_is_reported(
    tmp_path: Path, http: httpx.AsyncClient, chain: DevChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "harden_process", list)
    async with run_helper(tmp_path, http, chain, nodes=2, chain={"stale_seconds": 30}) as helper:
        helper.config.chmod(0o600)
        round_id = await chain.open_round()
        vote = await cast_vote(chain, helper, round_id, times=ballot.same_second_times(unix_time_in(3000)))
        assert vote.is_accepted

        await helper.wait_until("has read all blocks", has_read_all_blocks)
        results = await run_checks(helper)
        assert [finding for finding in results.values() if not all_ok([finding])] == []
        assert results["helper"].facts["ready"] is True
        assert results[f"round {round_id.hex()[:8]}"].message.startswith("16 shares left, ")
        assert results["core files"].message.startswith("the helper writes none")
        assert results["database"].facts["shares"] == 16

        first = f"node {chain.nodes[0]['rest'].removeprefix('http://')}"
        for switches, message in (
            ({"catching_up": True}, "syncing"),
            ({"chain_id": "other-1"}, "on chain other-1"),
            ({"refuse": 1.0}, "connection failed"),
            ({"status_503": 1.0}, "HTTP 503"),
        ):
            await chain.set_faults(**switches)
            results = await run_checks(helper)
            await chain.clear_faults()
            assert results[first].level is Level.WARN, (switches, results[first])
            assert message in results[first].message
            assert results["chain"].level is Level.OK, "the other node is usable"

        strict = tmp_path / "strict.toml"
        strict.write_text(helper.config.read_text().replace("stale_seconds = 30", "stale_seconds = 1"))
        await chain.set_faults(stale=10_000)  # The node serves its first block, from the start of the tests.
        findings = await Doctor(strict, {}, SystemClock(), skip_proof=True).run_all()
        await chain.clear_faults()
        (old,) = [finding for finding in findings if finding.subject == first]
        assert old.level is not Level.OK
        assert "newest block is" in old.message

        for node in (0, 1):
            await chain.set_faults(node=node, catching_up=True)
        results = await run_checks(helper)
        assert (results[first].level, results["chain"].level) == (Level.FAIL, Level.FAIL)


async def test_doctor_asks_public_url_as_wallets_do(tmp_path: Path, http: httpx.AsyncClient, chain: DevChain) -> None:
    async with run_helper(tmp_path, http, chain) as helper, run_wrong_helper(helper.url, chain.url) as proxied:
        node = str(chain.nodes[0]["rest"])
        settings = helper.config.read_text()
        results = {}
        for url in (helper.url, f"{proxied}/", node):
            helper.config.write_text(f'{settings}\n[admin]\npublic_url = "{url}"\n')
            findings = await Doctor(helper.config, {}, SystemClock(), skip_proof=True).run_all()
            results[url] = [finding for finding in findings if finding.subject == "public URL"]
    assert [each[0].level for each in results.values()] == [Level.OK, Level.OK, Level.FAIL]
    assert "/shielded-vote/v1/shares: unexpected response (HTTP 404" in results[node][0].message
    assert "/rounds: unexpected" not in results[node][-1].message


async def test_doctor_json_is_one_line(tmp_path: Path, http: httpx.AsyncClient, chain: DevChain) -> None:
    async with run_helper(tmp_path, http, chain) as helper:
        helper.config.chmod(0o600)
        await helper.wait_until("has read all blocks", has_read_all_blocks)
        result = await run_in_process(tmp_path, "doctor", "--config", str(helper.config), "--json", "--skip-proof")
        assert (result.exit_code, result.stdout.count("\n"), result.stderr) == (0, 1, ""), result
        report: dict[str, Any] = result.json()
        assert report["ok"] is True
        assert report["seconds"] < MAX_TOTAL_SECONDS
        assert {finding["level"] for finding in report["findings"]} == {"ok"}
    result = await run_in_process(tmp_path, "doctor", "--config", str(helper.config), "--skip-proof")
    assert result.exit_code == 3
    assert "Traceback" not in result.stderr
    lines = result.stdout.splitlines()
    warning = f"warn  helper           not running: no helper is listening on {helper.ready_data['socket']}"
    assert lines[lines.index(warning) + 1].startswith("      -> Start it")


async def test_doctor_proof_check_reports_time_or_failure() -> None:
    clock = SystemClock()
    made = await check_proof("k10", 2, nice=0, clock=clock, timeout=TIMEOUT_SECONDS)
    assert made.level is Level.OK
    assert 0 < made.facts["seconds"] < made.facts["start_seconds"]
    late = await check_proof("k10", 2, nice=0, clock=clock, timeout=0.01)
    assert (late.level, "timed out" in late.message) == (Level.WARN, True)
    broken = await check_proof("k12", 2, nice=0, clock=clock, timeout=TIMEOUT_SECONDS)
    assert (broken.level, "k12 self-test proof failed" in broken.message) == (Level.FAIL, True)
