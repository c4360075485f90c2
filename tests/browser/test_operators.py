"""What operators see: who waits, the network, the rounds, and the queue live."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from playwright.async_api import Locator, expect

from tests.browser.browser_tab import Visitor
from tests.browser.environment import PROPOSALS, TOKEN, WAITING, Stage, in_seconds
from tests.support.secrets import secrets_of, told_in

pytestmark = pytest.mark.anyio


async def test_who_waits_can_be_searched_sorted_and_copied(visitor: Visitor, stage: Stage) -> None:
    await visitor.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await visitor.open("/validators")
    rows = visitor.page.get_by_role("row")
    await rows.filter(has_text=WAITING[0]).wait_for()
    waiting = list((await stage.pending()).values())
    await expect(rows).to_have_count(len(waiting) + 1)

    await visitor.page.get_by_role("button", name="Name", exact=True).click()
    await expect(visitor.page.get_by_role("columnheader", name="Name")).to_have_attribute("aria-sort", "ascending")
    names = await visitor.page.locator("td[data-label=Name]").all_inner_texts()
    assert sorted(names) == sorted(one["moniker"] for one in waiting)
    ours = [name for name in names if name in WAITING]
    assert ours == ["Höhle <&> node", "north-star-07", "Orchard Rising", "Ελιά"]

    await visitor.page.get_by_label("Search").fill("star vote-3 north")
    await visitor.shows("No match")
    await visitor.page.get_by_label("Search").fill("orchard vote-1")
    await expect(rows).to_have_count(2)
    (one,) = [one for one in waiting if one["moniker"] == "Orchard Rising"]
    await visitor.press(f"Copy address of {one['moniker']}")
    assert await visitor.page.evaluate("navigator.clipboard.readText()") == one["operator_address"]
    row = rows.filter(has_text=one["moniker"])
    await expect(row.locator("[data-label='Expires in']")).to_have_text(re.compile(r"^6 d 23 h$|^7 d$"))


async def test_the_network_is_shown_and_asked_how_it_is(visitor: Visitor, stage: Stage) -> None:
    visitor.expected.append("ERR_CONNECTION_REFUSED")
    await visitor.open("/network")
    card = visitor.page.get_by_role("listitem")
    own, silent, attic = (card.filter(has_text=label) for label in ("This helper", "Harbour", "Attic"))
    await own.get_by_text("Reachable", exact=True).wait_for()
    assert re.fullmatch(r"[\d.,]+ (ms|s)", await own.locator(".latency").inner_text())
    await silent.get_by_text("Not reachable").wait_for()
    await attic.get_by_text("Not checked").wait_for()
    await card.filter(has_text="https://pir.example.org").wait_for()
    await visitor.shows("min_wallet")

    await visitor.page.get_by_role("radio", name="JSON").check()
    text = await visitor.page.get_by_role("group", name="voting configuration as JSON").inner_text()
    assert json.loads(text) == (await stage.http.get(f"{stage.url}/api/voting-config")).json()
    asked = {url for url in visitor.asked if url.endswith("/status")}
    assert asked == {f"{stage.url}/shielded-vote/v1/status", *stage.servers}


async def test_rounds_are_shown_with_their_ends_and_totals(visitor: Visitor, stage: Stage) -> None:
    await visitor.open("/rounds")
    opened = visitor.page.get_by_role("article", name=f"Round {stage.open.hex()[:8]}")
    await opened.wait_for()
    await opened.get_by_text("Open", exact=True).wait_for()
    ends = await opened.locator("time").inner_text()
    assert "UTC" in ends
    assert re.search(r"GMT\+[12]|CES?T", ends), "the visitor's own time"
    for proposal in PROPOSALS:
        await opened.get_by_role("heading", name=str(proposal["title"])).wait_for()
    await expect(opened.get_by_role("table")).to_have_count(0)  # nothing is counted before the end

    past = visitor.page.get_by_role("table", name=f"Result of “{PROPOSALS[0]['title']}”")
    row = past.get_by_role("row", name=re.compile("^Support"))
    await expect(row.get_by_role("cell").first).to_have_text("1,260")
    await expect(row.get_by_role("cell").last).to_have_text("100.0%")
    assert stage.support == 1260
    late = visitor.page.get_by_role("table", name=f"Result of “{PROPOSALS[1]['title']}”")
    await expect(late.get_by_role("row", name="Total").get_by_role("cell").first).to_have_text("0")


async def counts(round_card: Locator) -> dict[str, int]:
    """What the card says of each state."""
    text = await round_card.locator("dl.states").inner_text()
    return {name: int(number) for name, number in re.findall(r"(\w+)\s+([\d]+)", text)}


async def test_the_queue_is_live(visitor: Visitor, stage: Stage) -> None:
    await visitor.watch_queue(TOKEN)
    card = visitor.page.get_by_role("article", name=f"Round {stage.open.hex()[:8]}")
    await card.wait_for()
    before = await counts(card)
    assert before["Pending"] > 0
    vote = await stage.vote(in_seconds(5, after=6))
    everything = sum(before.values()) + 16
    async with stage.helper.patience("shows all shares of a vote"):
        while sum((await counts(card)).values()) < everything:
            await asyncio.sleep(0.05)
    seen: list[dict[str, Any]] = []
    async with stage.helper.patience("has revealed a vote"):
        while not seen or seen[-1]["Confirmed"] < before["Confirmed"] + 16:
            now = await counts(card)
            if not seen or now != seen[-1]:
                seen.append(now)
            await asyncio.sleep(0.05)
    assert {sum(state.values()) for state in seen} == {everything}, "none is shown twice, none nowhere"
    assert max(state["Pending"] for state in seen) > before["Pending"], "they waited"
    steps = [state["Confirmed"] for state in seen]
    assert steps == sorted(steps)
    assert len(set(steps)) > 2, "they came one after another"

    failures = visitor.page.get_by_role("region", name="Recent failures")
    await failures.get_by_text("the round closed before it was counted").wait_for()
    await failures.get_by_text("16 ×").wait_for()
    await visitor.page.get_by_text("Show as table").click()
    table = visitor.page.get_by_role("table", name=re.compile("Shares due per minute"))
    due = [int(await cell.inner_text()) for cell in await table.get_by_role("cell").all()]
    assert 0 < sum(due) <= 32
    shown = await visitor.page.content()
    assert told_in(shown, secrets_of(vote)) == []
    assert not any(share.nullifier.hex() in shown for share in vote.shares)
    assert not any("token" in url or TOKEN in url for url in visitor.asked)


async def test_the_queue_comes_back_by_itself(visitor: Visitor, stage: Stage) -> None:
    """A stream that is cut is taken up again, and the page says so meanwhile."""
    visitor.expected += ["ERR_INTERNET_DISCONNECTED", "ERR_FAILED"]
    await visitor.open("/queue")
    await visitor.page.get_by_label("Operator token").fill(TOKEN)
    await visitor.page.context.set_offline(True)
    await visitor.press("Watch the queue")
    await visitor.shows("The server cannot be reached")
    await visitor.page.context.set_offline(False)
    await visitor.live()
    await visitor.page.get_by_role("article", name=f"Round {stage.open.hex()[:8]}").wait_for()


async def test_a_wrong_token_is_refused_and_the_right_one_is_forgotten_when_told(visitor: Visitor) -> None:
    visitor.expected.append("401")
    await visitor.open("/queue")
    await visitor.page.get_by_label("Operator token").fill("not the token")
    await visitor.press("Watch the queue")
    await visitor.shows("A token has no spaces or accents")
    await visitor.page.get_by_label("Operator token").fill("nearly-operators-only")
    await visitor.press("Watch the queue")
    await visitor.shows("The token was refused")
    await visitor.page.get_by_label("Operator token").fill(TOKEN)
    await visitor.page.get_by_label("Remember for this tab").check()
    await visitor.press("Watch the queue")
    await visitor.live()
    await visitor.page.reload()
    await visitor.live()
    await visitor.press("Sign out")
    await visitor.page.get_by_label("Operator token").wait_for()
    assert await visitor.page.evaluate("JSON.stringify([sessionStorage, localStorage])") == "[{},{}]"


async def test_the_policy_lets_no_script_in_and_none_out(visitor: Visitor) -> None:
    """The planted fault for what every other test relies on: a violation is seen, and it does nothing."""
    await visitor.open("/join")
    await visitor.heading("Join the network")
    await visitor.page.evaluate(
        """() => {
          const script = document.createElement("script");
          script.textContent = "globalThis.inlined = true";
          document.head.append(script);
          const style = document.createElement("style");
          style.textContent = "h1 { display: none }";
          document.head.append(style);
        }"""
    )
    left = await visitor.page.evaluate("fetch('http://192.0.2.7/').then(() => 'left', () => 'kept')")
    assert left == "kept"
    assert await visitor.page.evaluate("globalThis.inlined") is None
    assert await visitor.page.get_by_role("heading", level=1).is_visible()
    directives = set(re.findall(r"directive:? ['\"](\w+-src)", "".join(visitor.told)))
    assert directives == {"script-src", "style-src", "connect-src"}, visitor.told
    visitor.told.clear()
    visitor.asked.clear()
