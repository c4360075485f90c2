"""Validator registration and event stream of a running service; the API without a queue."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from devnet import ballot
from tests.support.devnet import DevChain
from tests.support.event_clients import cpu_seconds, open_event_clients
from tests.support.harness import REAL_PROGRAM, cast_vote, run_helper, unix_time_in
from tests.support.secrets import collect_secrets, secrets_in_text
from tests.unit.admin.fixtures import sign_registration

TOKEN = "operators-only"


async def read_state_events(http: httpx.AsyncClient, url: str, count: int) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    sent = {"Authorization": f"Bearer {TOKEN}"}
    async with asyncio.timeout(30), http.stream("GET", f"{url}/shielded-vote/v1/events", headers=sent) as stream:
        assert stream.status_code == 200
        assert stream.headers["content-type"].startswith("text/event-stream")
        async for line in stream.aiter_lines():
            field, _, value = line.partition(": ")
            if field == "data":
                events.append(json.loads(value))
                if len(events) == count:
                    break
    return events


async def test_events_require_operator_token(tmp_path: Path, http: httpx.AsyncClient, chain: DevChain) -> None:
    round_id = await chain.open_round()
    async with run_helper(tmp_path, http, chain, operator={"token": TOKEN}) as helper:
        vote = await cast_vote(chain, helper, round_id, times=ballot.same_second_times(unix_time_in(600)))
        (state,) = await read_state_events(http, helper.url, 1)
        (shown,) = [known for known in state["rounds"] if known["round_id"] == round_id.hex()]
        assert (shown["waiting"], shown["confirmed"], sum(shown["due_per_minute"])) == (16, 0, 16)
        assert shown["due_per_minute"][9:11] in ([0, 16], [16, 0])
        text = json.dumps(state)
        assert secrets_in_text(text, collect_secrets(vote)) == []
        assert all(share.nullifier.hex() not in text for share in vote.shares)
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
            refused = await http.get(f"{helper.url}/shielded-vote/v1/events", headers=headers)
            assert refused.status_code == 401
        in_url = await http.get(f"{helper.url}/shielded-vote/v1/events", params={"token": TOKEN})
        assert in_url.status_code == 401


async def test_events_to_hundreds_of_listeners_use_little_cpu_and_do_not_delay_the_stop(
    tmp_path: Path, http: httpx.AsyncClient, chain: DevChain
) -> None:
    """`python -m bench.event_listeners` is the long version, with dispatch."""
    seconds, listener_count = 3.0, 200
    async with run_helper(tmp_path, http, chain, operator={"token": TOKEN}) as helper:

        async def spent() -> float:
            before = cpu_seconds(helper.pid)
            await asyncio.sleep(seconds)
            return cpu_seconds(helper.pid) - before

        alone = await spent()
        async with open_event_clients(helper.url, TOKEN, listener_count) as listeners:
            followed = await spent()
            assert not any(listener.is_closed for listener in listeners)
            async with asyncio.timeout(30):  # every client receives more than one event
                while min(listener.state_events for listener in listeners) < 3:
                    await asyncio.sleep(0.05)
        # CPU time does not depend on the load of the machine: about 0.05 ms per client and event
        assert followed - alone < 0.5 / 1000 * listener_count * (seconds + 1)
        listening = asyncio.ensure_future(read_state_events(http, helper.url, 1000))
        await helper.wait_for("has a listener", lambda: read_state_events(http, helper.url, 1))
        assert await helper.stop() == 0
        assert len(await listening) < 1000


@pytest.mark.rule("R16")
async def test_admin_without_queue_accepts_registrations(
    tmp_path: Path, http: httpx.AsyncClient, chain: DevChain
) -> None:
    disabled = {"disable": True}
    async with run_helper(tmp_path, http, chain, program=REAL_PROGRAM, until="listening", helper=disabled) as helper:
        response = await http.post(
            f"{helper.url}/api/register-validator", json=sign_registration(timestamp=int(time.time()))
        )
        assert response.status_code == 200, response.text
        assert (await http.get(f"{helper.url}/shielded-vote/v1/status")).status_code == 404
        assert not helper.db.exists(), "no queue is created"
        assert await helper.stop() == 0
