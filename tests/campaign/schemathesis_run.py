"""Tests the API against its description with schemathesis, in a separate process."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import httpx

from tests.campaign.campaign import CampaignRun, Findings


async def check_described_operations(findings: Findings, setting: CampaignRun, url: str, token: str) -> None:
    """Call every described operation; responses must match the description, without 5xx."""
    async with httpx.AsyncClient() as http:
        document = (await http.get(f"{url}/openapi.json")).json()
    (setting.directory / "openapi.json").write_text(json.dumps(document))
    report = setting.directory / "schemathesis.json"
    options = {
        "--url": url,
        "--header": f"X-Helper-Token: {token}",
        "--seed": str(setting.seed),
        "--max-examples": setting.scale("300", "10"),
        "--phases": "coverage,fuzzing",
        "--checks": "all",
        # a well-formed share must also be in a tree to be accepted
        "--exclude-checks": "positive_data_acceptance",
        # on a busy machine payload generation is slow, which is not the helper's fault
        "--suppress-health-check": "too_slow",
        "--generation-database": "none",
        "--report-json-path": str(report),
    }
    status = await _run_schemathesis(setting.directory, [part for option in options.items() for part in option])
    results = json.loads(report.read_text()) if report.exists() else {}
    operations = sum(len(methods) for methods in document["paths"].values())
    findings.require_equal("schemathesis, exit status", status, 0)
    findings.require_equal(
        "schemathesis, operations tested", results.get("operations", {}).get("tested", 0), operations
    )
    findings.record_figure("schemathesis, requests", results.get("test_cases", {}).get("generated", 0))
    findings.require_equal("schemathesis, failures", len(results.get("failures", ["no report"])), 0)


async def _run_schemathesis(directory: Path, flags: list[str]) -> int:
    """Return the exit status; print the output if it is not 0."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "run", "openapi.json"),
        *(*flags, "--no-color", "--continue-on-failure"),
        cwd=directory,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    if process.returncode:
        print(output.decode(errors="replace")[-6000:], file=sys.stderr)
    return process.returncode or 0
