"""Rounds as they are served: prepared in the background, bounded, the totals of a finalized round read once."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from admin.rounds import AT_ONCE, BODY_BYTES, FIRST_SECONDS, MOST, REFRESH_SECONDS, TOTALS_PER_REFRESH
from tests.conftest import recorded_lines
from tests.unit.admin.fixtures import Desk, open_desk

pytestmark = [pytest.mark.anyio, pytest.mark.rule("R16")]

FINALIZED = 3


def id_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def listed(number: int, *, status: int = FINALIZED, proposals: int = 1, title: str = "Title") -> dict[str, Any]:
    """A round as nodes list it; a higher number is newer."""
    options = [{"index": 0, "label": "Support"}, {"index": 1, "label": "Oppose"}]
    return {
        "vote_round_id": base64.b64encode(id_of(number)).decode(),
        "status": status,
        "vote_end_time": 1_795_000_000 + number,
        "created_at_height": number,
        "proposals": [{"id": 1 + place, "title": title, "options": options} for place in range(proposals)],
    }


async def shown(desk: Desk) -> list[dict[str, Any]]:
    answer = await desk.http.get("/rounds")
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
    found: list[dict[str, Any]] = answer.json()["rounds"]
    return found


def totals(known: dict[str, Any]) -> list[int | None]:
    return [option["total"] for option in known["proposals"][0]["options"]]


def recorded(name: str) -> Any:
    (found,) = [line["response"] for line in recorded_lines("exchanges.jsonl") if line["name"] == name]
    return found


async def test_get_rounds_of_recorded_chain_shows_totals_when_finalized(tmp_path: Path) -> None:
    final, results = recorded("rounds")["rounds"][0], recorded("tally results")["results"]
    round_id = base64.b64decode(final["vote_round_id"])
    async with open_desk(tmp_path / "admin.db") as desk:
        desk.staking.rounds, desk.staking.results = [{**final, "status": 2}], {round_id: results}
        await desk.rounds.refresh()
        (tallying,) = await shown(desk)
        assert tallying["proposals"][0]["options"] == [
            {"index": 0, "label": "Support", "total": None},
            {"index": 1, "label": "Oppose", "total": None},
        ]
        desk.staking.rounds = [final]
        await desk.rounds.refresh()
        (known,) = await shown(desk)
        assert (known["round_id"], known["status"], totals(known)) == (round_id.hex(), FINALIZED, [0, 1])


async def test_get_rounds_queries_no_node(tmp_path: Path) -> None:
    async with open_desk(tmp_path / "admin.db") as desk:
        assert (await desk.http.get("/rounds")).status_code == 502, "never read"
        desk.staking.rounds = [listed(number) for number in range(MOST)]
        await desk.rounds.refresh()
        before = desk.staking.listed, len(desk.staking.totals_asked)
        for _ in range(20):
            desk.clock.advance(REFRESH_SECONDS)
            assert len(await shown(desk)) == MOST
        assert (desk.staking.listed, len(desk.staking.totals_asked)) == before
        desk.staking.away = True
        await desk.rounds.refresh()
        assert len(await shown(desk)) == MOST, "what was read last"


async def test_refresh_reads_totals_in_bounded_number_and_each_once(tmp_path: Path) -> None:
    async with open_desk(tmp_path / "admin.db") as desk:
        numbers = range(2 * TOTALS_PER_REFRESH + 5)
        desk.staking.rounds = [listed(number) for number in numbers]
        for number in numbers:
            votes = [{"proposal_id": 1, "vote_decision": 1, "total_value": number}] if number else []
            desk.staking.results[id_of(number)] = votes
        reads = []
        for _ in range(5):
            before = len(desk.staking.totals_asked)
            await desk.rounds.refresh()
            reads.append(len(desk.staking.totals_asked) - before)
        assert reads == [TOTALS_PER_REFRESH, TOTALS_PER_REFRESH, 5, 0, 0]
        assert desk.staking.most_at_once == AT_ONCE
        assert desk.staking.totals_asked[:TOTALS_PER_REFRESH] == [
            id_of(number) for number in reversed(numbers[-TOTALS_PER_REFRESH:])
        ], "the newest first"
        assert [totals(known) for known in await shown(desk)] == [[0, number] for number in reversed(numbers)]


async def test_refresh_with_totals_that_fail_reads_the_others(tmp_path: Path) -> None:
    async with open_desk(tmp_path / "admin.db") as desk:
        desk.staking.rounds = [listed(number) for number in range(TOTALS_PER_REFRESH + 1)]
        desk.staking.results[id_of(0)] = []
        for _ in range(2):
            await desk.rounds.refresh()
        *failing, oldest = await shown(desk)
        assert totals(oldest) == [0, 0]
        assert {tuple(totals(known)) for known in failing} == {(None, None)}
        assert len(desk.staking.totals_asked) <= 2 * TOTALS_PER_REFRESH


async def test_refresh_with_node_behind_waits_for_the_totals(tmp_path: Path) -> None:
    async with open_desk(tmp_path / "admin.db") as desk:
        desk.staking.rounds, desk.staking.behind = [listed(1)], {id_of(1)}
        desk.staking.results[id_of(1)] = []
        await desk.rounds.refresh()
        assert totals((await shown(desk))[0]) == [None, None], "its answer would be that of a round without votes"
        desk.staking.behind, desk.staking.results[id_of(1)] = (
            set(),
            [{"proposal_id": 1, "vote_decision": 0, "total_value": 7}],
        )
        await desk.rounds.refresh()
        assert totals((await shown(desk))[0]) == [7, 0]


async def test_refresh_keeps_totals_of_listed_rounds_and_options_only(tmp_path: Path) -> None:
    async with open_desk(tmp_path / "admin.db") as desk:
        for generation in range(4):
            numbers = range(10 * generation, 10 * generation + 10)
            desk.staking.rounds = [listed(number) for number in numbers]
            for number in numbers:
                desk.staking.results[id_of(number)] = [
                    {"proposal_id": proposal, "vote_decision": 1, "total_value": 1} for proposal in range(1000)
                ]
            await desk.rounds.refresh()
            assert set(desk.rounds._totals) == {id_of(number) for number in numbers}
            assert sum(map(len, desk.rounds._totals.values())) == 10


async def test_refresh_with_huge_rounds_serves_a_bounded_body(tmp_path: Path) -> None:
    async with open_desk(tmp_path / "admin.db") as desk:
        huge = listed(9, proposals=BODY_BYTES // 400, title="t" * 400)
        large = [listed(10 + number, status=1, proposals=50, title="t" * 400) for number in range(MOST)]
        desk.staking.rounds = [*large, huge, listed(1)]
        await desk.rounds.refresh()
        assert desk.rounds.body is not None
        assert BODY_BYTES - 50_000 < len(desk.rounds.body) <= BODY_BYTES
        desk.staking.rounds = [huge, listed(1)]
        await desk.rounds.refresh()
        (known,) = await shown(desk)
        assert known["round_id"] == id_of(1).hex()
        assert id_of(9) not in desk.staking.totals_asked


async def test_refresh_logs_changes_and_no_start(tmp_path: Path) -> None:
    async with open_desk(tmp_path / "admin.db") as desk:
        desk.staking.rounds = [listed(1, status=1)]
        with capture_logs() as lines:
            for away in (True, True, False, False, True, True, False):
                desk.staking.away = away
                await desk.rounds.refresh()
        assert [line["event"] for line in lines] == ["rounds_unavailable", "rounds_available"]


async def test_run_reads_rounds_repeatedly_and_soon_again_at_start(tmp_path: Path) -> None:
    async with open_desk(tmp_path / "admin.db") as desk:
        desk.staking.away = True
        task = asyncio.create_task(desk.rounds.run())
        try:
            await asyncio.sleep(0)
            desk.staking.away, desk.staking.rounds = False, [listed(1)]
            for reads, seconds in ((1, FIRST_SECONDS), (2, REFRESH_SECONDS)):
                async with asyncio.timeout(20):
                    while desk.staking.listed < reads or desk.rounds.body is None:
                        desk.clock.advance(seconds)
                        await asyncio.sleep(0.01)
        finally:
            task.cancel()
            await asyncio.wait([task], timeout=10)
