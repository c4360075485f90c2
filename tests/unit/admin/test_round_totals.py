"""Round listing: prepared in the background, bounded, totals of finalized rounds read once."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from structlog.testing import capture_logs

from admin.api_models import AuditResponse
from admin.published_config import signed_message
from admin.round_totals import (
    INITIAL_REFRESH_SECONDS,
    MAX_CONCURRENT_QUERIES,
    MAX_LIST_BYTES,
    MAX_ROUNDS,
    MAX_TOTALS_PER_REFRESH,
    REFRESH_SECONDS,
)
from helper.chain.rest_client import parse_round
from helper.operations.archived_objects import digest_result
from tests.conftest import read_recorded_lines
from tests.unit.admin.fixtures import CONFIG_URL, AdminStack, open_admin_stack

pytestmark = pytest.mark.rule("R16")

FINALIZED = 3
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
TRUSTED_KEY = {
    "key_id": "one",
    "alg": "ed25519",
    "pubkey": base64.b64encode(KEY.public_key().public_bytes_raw()).decode(),
}


def sign_round(round_id: bytes, authority_key: bytes, layout: bytes) -> dict[str, Any]:
    """An authenticated entry of the published configuration."""
    signature = KEY.sign(signed_message(round_id, authority_key, layout))
    return {
        "auth_version": 2,
        "ea_pk": base64.b64encode(authority_key).decode(),
        "signatures": [{"key_id": "one", "alg": "ed25519", "sig": base64.b64encode(signature).decode()}],
    }


def round_id_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def listed_round(number: int, *, status: int = FINALIZED, proposals: int = 1, title: str = "Title") -> dict[str, Any]:
    """A round as nodes list it; a higher number is newer."""
    options = [{"index": 0, "label": "Support"}, {"index": 1, "label": "Oppose"}]
    return {
        "vote_round_id": base64.b64encode(round_id_of(number)).decode(),
        "status": status,
        "vote_end_time": 1_795_000_000 + number,
        "created_at_height": number,
        "proposals": [{"id": 1 + index, "title": title, "options": options} for index in range(proposals)],
    }


async def get_rounds(stack: AdminStack) -> list[dict[str, Any]]:
    response = await stack.client.get("/rounds")
    assert (response.status_code, response.headers["cache-control"]) == (200, "no-store")
    entries: list[dict[str, Any]] = response.json()["rounds"]
    return entries


def round_totals(known: dict[str, Any]) -> list[int | None]:
    return [option["total"] for option in known["proposals"][0]["options"]]


def read_recorded(name: str) -> Any:
    (response,) = [line["response"] for line in read_recorded_lines("exchanges.jsonl") if line["name"] == name]
    return response


async def test_refresh_reports_the_keys_of_election_authorities(tmp_path: Path) -> None:
    key, other = b"k" * 32, b"o" * 32
    config = {
        "config_version": 1,
        "vote_servers": [],
        "pir_layout": {"pir_depth": 1, "tier0_layers": 1, "tier1_layers": 1, "poly_len": 1},
        "rounds": {
            round_id_of(number).hex(): sign_round(round_id_of(number), key, bytes([1, 0, 0, 0] * 4))
            for number in (1, 2)
        },
    }
    static = {
        "static_config_version": 1,
        "dynamic_config_url": "https://config.example.org/dynamic.json",
        "trusted_keys": [TRUSTED_KEY],
    }
    async with open_admin_stack(tmp_path / "admin.db") as stack:
        for url, document in ((CONFIG_URL, static), (static["dynamic_config_url"], config)):
            stack.web.responses[str(url)] = httpx.Response(200, content=json.dumps(document).encode())
        await stack.config.refresh()
        results = []
        for listed in (None, "", "?", key, other):
            encoded = base64.b64encode(listed).decode() if isinstance(listed, bytes) else listed
            stack.staking.listed = [{**listed_round(1), "ea_pk": encoded}]
            await stack.rounds.refresh()
            assert len(await get_rounds(stack)) == 1
            results.append((await stack.client.get("/round-authentication")).json()["rounds"])
    first, second = (round_id_of(number).hex() for number in (1, 2))
    assert [result[first] for result in results] == ["authenticated"] * 4 + ["key_mismatch"]
    assert {result[second] for result in results} == {"authenticated"}, "nodes do not list it"


async def test_get_rounds_of_recorded_chain_shows_totals_when_finalized(stack: AdminStack) -> None:
    final, results = read_recorded("rounds")["rounds"][0], read_recorded("tally results")["results"]
    round_id = base64.b64decode(final["vote_round_id"])
    stack.staking.listed, stack.staking.totals_by_round = [{**final, "status": 2}], {round_id: results}
    await stack.rounds.refresh()
    (tallying,) = await get_rounds(stack)
    assert tallying["proposals"][0]["options"] == [
        {"index": 0, "label": "Support", "total": None},
        {"index": 1, "label": "Oppose", "total": None},
    ]
    stack.staking.listed = [final]
    await stack.rounds.refresh()
    (known,) = await get_rounds(stack)
    assert (known["round_id"], known["status"], round_totals(known)) == (round_id.hex(), FINALIZED, [0, 1])


async def test_get_rounds_queries_no_node(stack: AdminStack) -> None:
    assert (await stack.client.get("/rounds")).status_code == 502, "never read"
    stack.staking.listed = [listed_round(number) for number in range(MAX_ROUNDS)]
    await stack.rounds.refresh()
    before = stack.staking.listing_calls, len(stack.staking.queried_totals)
    for _ in range(20):
        stack.clock.advance(REFRESH_SECONDS)
        assert len(await get_rounds(stack)) == MAX_ROUNDS
    assert (stack.staking.listing_calls, len(stack.staking.queried_totals)) == before
    stack.staking.is_unreachable = True
    await stack.rounds.refresh()
    assert len(await get_rounds(stack)) == MAX_ROUNDS, "the last copy that was read"


async def test_refresh_reads_totals_in_bounded_number_and_each_once(stack: AdminStack) -> None:
    numbers = range(2 * MAX_TOTALS_PER_REFRESH + 5)
    stack.staking.listed = [listed_round(number) for number in numbers]
    for number in numbers:
        votes = [{"proposal_id": 1, "vote_decision": 1, "total_value": number}] if number else []
        stack.staking.totals_by_round[round_id_of(number)] = votes
    reads = []
    for _ in range(5):
        before = len(stack.staking.queried_totals)
        await stack.rounds.refresh()
        reads.append(len(stack.staking.queried_totals) - before)
    assert reads == [MAX_TOTALS_PER_REFRESH, MAX_TOTALS_PER_REFRESH, 5, 0, 0]
    assert stack.staking.max_concurrent == MAX_CONCURRENT_QUERIES
    assert stack.staking.queried_totals[:MAX_TOTALS_PER_REFRESH] == [
        round_id_of(number) for number in reversed(numbers[-MAX_TOTALS_PER_REFRESH:])
    ], "newest first"
    assert [round_totals(known) for known in await get_rounds(stack)] == [[0, number] for number in reversed(numbers)]


async def test_refresh_with_totals_that_fail_reads_the_others(stack: AdminStack) -> None:
    stack.staking.listed = [listed_round(number) for number in range(MAX_TOTALS_PER_REFRESH + 1)]
    stack.staking.totals_by_round[round_id_of(0)] = []
    for _ in range(2):
        await stack.rounds.refresh()
    *failing, oldest = await get_rounds(stack)
    assert round_totals(oldest) == [0, 0]
    assert {tuple(round_totals(known)) for known in failing} == {(None, None)}
    assert len(stack.staking.queried_totals) <= 2 * MAX_TOTALS_PER_REFRESH


async def test_refresh_with_node_behind_waits_for_the_totals(stack: AdminStack) -> None:
    stack.staking.listed, stack.staking.lagging_rounds = [listed_round(1)], {round_id_of(1)}
    stack.staking.totals_by_round[round_id_of(1)] = []
    await stack.rounds.refresh()
    assert round_totals((await get_rounds(stack))[0]) == [None, None], (
        "the response would be that of a round without votes"
    )
    stack.staking.lagging_rounds, stack.staking.totals_by_round[round_id_of(1)] = (
        set(),
        [{"proposal_id": 1, "vote_decision": 0, "total_value": 7}],
    )
    await stack.rounds.refresh()
    assert round_totals((await get_rounds(stack))[0]) == [7, 0]


async def test_refresh_keeps_totals_of_listed_rounds_and_options_only(stack: AdminStack) -> None:
    for generation in range(4):
        numbers = range(10 * generation, 10 * generation + 10)
        stack.staking.listed = [listed_round(number) for number in numbers]
        for number in numbers:
            stack.staking.totals_by_round[round_id_of(number)] = [
                {"proposal_id": proposal, "vote_decision": 1, "total_value": 1} for proposal in range(1000)
            ]
        await stack.rounds.refresh()
        assert set(stack.rounds._totals) == {round_id_of(number) for number in numbers}
        assert sum(map(len, stack.rounds._totals.values())) == 10


async def test_get_rounds_shows_the_audit_of_finalized_rounds_only(stack: AdminStack) -> None:
    stack.staking.listed = [listed_round(1), listed_round(2, status=2), listed_round(3)]
    audit: AuditResponse = {"at": 7, "verdict": "passed", "passed": 19, "others": []}
    stack.audits |= {round_id_of(1): audit, round_id_of(2): audit}
    await stack.rounds.refresh()
    shown = {entry["round_id"]: entry["audit"] for entry in await get_rounds(stack)}
    assert shown == {round_id_of(1).hex(): audit, round_id_of(2).hex(): None, round_id_of(3).hex(): None}


async def test_get_rounds_asks_for_the_audit_of_what_it_shows(stack: AdminStack) -> None:
    round_id = round_id_of(1)
    swapped = [{"index": 0, "label": "Oppose"}, {"index": 1, "label": "Support"}]
    digests: list[str | None] = []
    for total, options in ((None, None), (7, None), (8, None), (7, swapped)):
        listed = listed_round(1)
        if options is not None:
            listed["proposals"][0]["options"] = options
        stack.staking.listed = []
        await stack.rounds.refresh()
        stack.staking.listed = [listed]
        if total is not None:
            votes = [{"proposal_id": 1, "vote_decision": 0, "total_value": total}]
            stack.staking.totals_by_round = {round_id: votes}
        await stack.rounds.refresh()
        digests.append(stack.shown[round_id])
    assert digests[0] is None
    assert digests[1] == digest_result(parse_round({"round": listed_round(1)}), {(1, 0): 7})
    assert len({*digests}) == len(digests), "another total, and exchanged labels"


async def test_refresh_with_huge_rounds_serves_a_bounded_body(stack: AdminStack) -> None:
    huge = listed_round(9, proposals=MAX_LIST_BYTES // 400, title="t" * 400)
    large = [listed_round(10 + number, status=1, proposals=50, title="t" * 400) for number in range(MAX_ROUNDS)]
    stack.staking.listed = [*large, huge, listed_round(1)]
    await stack.rounds.refresh()
    assert stack.rounds.body is not None
    assert MAX_LIST_BYTES - 50_000 < len(stack.rounds.body) <= MAX_LIST_BYTES
    stack.staking.listed = [huge, listed_round(1)]
    await stack.rounds.refresh()
    (known,) = await get_rounds(stack)
    assert known["round_id"] == round_id_of(1).hex()
    assert round_id_of(9) not in stack.staking.queried_totals


async def test_refresh_logs_changes_and_no_start(stack: AdminStack) -> None:
    stack.staking.listed = [listed_round(1, status=1)]
    with capture_logs() as lines:
        for away in (True, True, False, False, True, True, False):
            stack.staking.is_unreachable = away
            await stack.rounds.refresh()
    assert [line["event"] for line in lines] == ["rounds_unavailable", "rounds_available"]


async def test_run_reads_rounds_repeatedly_and_soon_again_at_start(
    stack: AdminStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        stack.staking.is_unreachable, stack.staking.listed = False, [listed_round(1)]
        if len(pauses) == 3:
            raise InterruptedError

    stack.staking.is_unreachable = True
    monkeypatch.setattr(stack.clock, "sleep", sleep)
    with pytest.raises(InterruptedError):
        await stack.rounds.run()
    assert pauses == [INITIAL_REFRESH_SECONDS, REFRESH_SECONDS, REFRESH_SECONDS]
    assert stack.staking.listing_calls == 2, "an unreachable node is not counted"
