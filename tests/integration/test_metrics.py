"""Metrics of a real run: each exactly once and correct, complete for dashboard and alerts, without secrets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest
import yaml

from devnet import ballot
from tests.support.devnet import DevChain
from tests.support.harness import cast_vote, run_helper, unix_time_in
from tests.support.process import find_free_port
from tests.support.s3 import CREDENTIALS_ENV
from tests.support.secrets import collect_secrets, secrets_in_text
from tests.unit.observability.test_metrics import parse_samples

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
DASHBOARD = DEPLOY / "grafana" / "svote-helper.json"
PROMETHEUS_OWN = {"up"}
SEVERAL_HOSTS = {"helper_sends"}
"""Metrics that a host with its own queue does not export."""


def load_alert_rules() -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    return rules


def load_queries() -> Iterator[str]:
    for file in ALERTS.parent.glob("*.yaml"):
        yield from (rule["expr"] for rule in yaml.safe_load(file.read_text())["groups"][0]["rules"])
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


def metric_names(query: str) -> set[str]:
    """Return the series that an expression reads; raises for an invalid expression."""
    series: set[str] = set()
    pending: list[Any] = [promql_parser.parse(query.replace("$__rate_interval", "5m").replace("$instance", "x"))]
    while pending:
        node = pending.pop()
        if isinstance(node, promql_parser.VectorSelector):
            series.add(str(node.name))
        for part in ("lhs", "rhs", "expr", "vector_selector", "args"):
            inner = getattr(node, part, None)
            pending += inner if isinstance(inner, list) else [] if inner is None else [inner]
    assert series, query
    return series


async def test_metrics_cover_dashboard_and_alert_queries(
    tmp_path: Path, http: httpx.AsyncClient, chain: DevChain
) -> None:
    address = f"http://127.0.0.1:{find_free_port()}"
    metrics = {"enable": True, "port": int(address.rpartition(":")[2])}
    away: dict[str, Any] = {
        "s3": {"endpoint": f"http://127.0.0.1:{find_free_port()}"},
        "archive": {"place": "s3://bucket/archive"},
    }
    async with run_helper(tmp_path, http, chain, nodes=2, env=CREDENTIALS_ENV, metrics=metrics, **away) as helper:
        round_id = await chain.open_round()
        first = await cast_vote(chain, helper, round_id)
        waiting = await cast_vote(
            chain, helper, round_id, proposal=2, times=ballot.same_second_times(unix_time_in(3000))
        )
        share = first.ballot.shares[0]
        assert (await helper.post_share(ballot.post_body(first.ballot, share, first.position, 0))).json()["status"]
        assert (await helper.post_share({})).status_code == 400
        assert (await http.get(f"{helper.url}/nowhere")).status_code == 404
        await helper.wait_until_confirmed(first)
        with socket.create_connection(("127.0.0.1", metrics["port"])) as slow:
            slow.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 20)  # and reads no response
            text = await _read_settled_metrics(http, f"{address}/metrics")
        samples = parse_samples(text)
        for name, value in {"queued": 32, "duplicate": 1, "refused": 1}.items():
            assert samples["helper_share_posts_total", (("outcome", name),)] == value
        assert samples["helper_refusals_total", (("status", "404"),)] == 1
        assert samples["helper_proofs_total", ()] == samples["helper_confirmed_total", ()] == 16
        for name in ("start_lateness", "broadcast_lateness", "proof", "confirmation"):
            assert samples[f"helper_{name}_seconds_count", ()] == 16
        assert samples["helper_queue_age_seconds_count", ()] >= 1
        states = {name: samples["helper_shares", (("state", name),)] for name in ("received", "submitted", "failed")}
        assert states == {"received": 16, "submitted": 16, "failed": 0}
        assert samples["helper_ready", ()] == 1
        assert samples["helper_prover_slots", ()] >= 1

        served = {name for name, _ in samples}
        for query in load_queries():
            assert metric_names(query) <= served | PROMETHEUS_OWN | SEVERAL_HOSTS, query

        for vote in (first, waiting):
            nullifiers = {f"nullifier {share.index}": share.nullifier for share in vote.shares}
            assert secrets_in_text(text, {**collect_secrets(vote), **nullifiers, "round": round_id}) == []
        assert round_id.hex()[:8] not in text


async def _read_settled_metrics(http: httpx.AsyncClient, url: str) -> str:
    """Return the metrics after the last confirmation."""
    async with asyncio.timeout(30):
        while True:
            text = (await http.get(url)).text
            if parse_samples(text)["helper_confirmed_total", ()] >= 16:
                return text
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("rule", load_alert_rules(), ids=lambda rule: str(rule["alert"]))
def test_alert_rule_has_severity_summary_and_action(rule: dict[str, Any]) -> None:
    assert rule["alert"].startswith("SvoteHelper")
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert rule["annotations"].keys() == {"summary", "action"}
    assert metric_names(rule["expr"])


def test_dashboard_panels_are_complete_and_do_not_overlap() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    occupied: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        grid = panel["gridPos"]
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & occupied, f"{panel['title']} covers another panel"
        assert grid["x"] + grid["w"] <= 24
        occupied |= cells
        assert panel["type"] == "row" or panel["targets"]
        for target in panel.get("targets", ()):
            assert "instance" in target["expr"], "queries select the chosen helper"
