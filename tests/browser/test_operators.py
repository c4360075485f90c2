"""Views for operators: pending validators, network, rounds, and the live queue."""

from __future__ import annotations

import asyncio
import json
import re

from playwright.async_api import Locator, expect

from devnet import ballot
from tests.browser.browser_tab import BrowserTab
from tests.browser.environment import PIR_LAYOUT, PROPOSALS, TOKEN, WAITING_MONIKERS, BrowserEnvironment
from tests.support.harness import unix_time_in
from tests.support.secrets import collect_secrets, secrets_in_text


async def test_pending_validators_can_be_searched_sorted_and_copied(
    tab: BrowserTab, environment: BrowserEnvironment
) -> None:
    await tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await tab.open_page("/validators")
    rows = tab.page.get_by_role("row")
    await rows.filter(has_text=WAITING_MONIKERS[0]).wait_for()
    waiting = list((await environment.pending_validators()).values())
    await expect(rows).to_have_count(len(waiting) + 1)

    await tab.page.get_by_role("button", name="Name", exact=True).click()
    await expect(tab.page.get_by_role("columnheader", name="Name")).to_have_attribute("aria-sort", "ascending")
    names = await tab.page.locator("td[data-label=Name]").all_inner_texts()
    assert sorted(names) == sorted(entry["moniker"] for entry in waiting)
    own_names = [name for name in names if name in WAITING_MONIKERS]
    assert own_names == ["Höhle <&> node", "north-star-07", "Orchard Rising", "Ελιά"]

    await tab.page.get_by_label("Search").fill("star vote-3 north")
    await tab.wait_for_text("No match")
    await tab.page.get_by_label("Search").fill("orchard vote-1")
    await expect(rows).to_have_count(2)
    (entry,) = [entry for entry in waiting if entry["moniker"] == "Orchard Rising"]
    await tab.press_button(f"Copy address of {entry['moniker']}")
    assert await tab.page.evaluate("navigator.clipboard.readText()") == entry["operator_address"]
    row = rows.filter(has_text=entry["moniker"])
    await expect(row.locator("[data-label='Expires in']")).to_have_text(re.compile(r"^6 d 23 h$|^7 d$"))


async def test_network_view_shows_server_status(tab: BrowserTab, environment: BrowserEnvironment) -> None:
    tab.expected_messages.append("ERR_CONNECTION_REFUSED")
    await tab.open_page("/network")
    card = tab.page.get_by_role("listitem")
    own, silent, unchecked = (card.filter(has_text=label) for label in ("This helper", "Harbour", "Attic"))
    await own.get_by_text("Reachable", exact=True).wait_for()
    assert re.fullmatch(r"[\d.,]+ (ms|s)", await own.locator(".latency").inner_text())
    await silent.get_by_text("Not reachable").wait_for()
    await unchecked.get_by_text("Not checked").wait_for()
    await card.filter(has_text="https://pir.example.org").wait_for()
    await tab.wait_for_text("min_wallet")

    round_id, key = "ab" * 32, "A" * 43 + "="
    entry = {"round_id": round_id, "ea_pk": key, "auth_version": 2, "pir_layout": PIR_LAYOUT}
    await tab.page.get_by_label("Round ID").fill(round_id)
    await tab.page.get_by_label("Key of the election authority").fill(key)
    await tab.page.get_by_role("button", name="Show the bytes").click()
    signed = (await environment.http.post(f"{environment.url}/api/sign-config-entry", json=entry)).json()
    for name, value in (
        ("bytes to sign", signed["canonical_payload_b64"]),
        ("hash of the bytes", signed["signed_payload_hash"]),
    ):
        await expect(tab.page.get_by_role("group", name=name, exact=True)).to_have_text(value)

    await tab.page.get_by_role("radio", name="JSON").check()
    text = await tab.page.get_by_role("group", name="voting configuration as JSON").inner_text()
    assert json.loads(text) == (await environment.http.get(f"{environment.url}/api/voting-config")).json()
    requested = {url for url in tab.requested_urls if url.endswith("/status")}
    assert requested == {f"{environment.url}/shielded-vote/v1/status", *environment.vote_server_urls}


async def test_rounds_view_shows_ends_and_totals(tab: BrowserTab, environment: BrowserEnvironment) -> None:
    await tab.open_page("/rounds")
    opened = tab.page.get_by_role("article", name=f"Round {environment.open_round_id.hex()[:8]}")
    await opened.wait_for()
    await opened.get_by_text("Open", exact=True).wait_for()
    ends = await opened.locator("time").inner_text()
    assert "UTC" in ends
    assert re.search(r"GMT\+[12]|CES?T", ends), "the time in the visitor's time zone"
    for proposal in PROPOSALS:
        await opened.get_by_role("heading", name=str(proposal["title"])).wait_for()
    await expect(opened.get_by_role("table")).to_have_count(0)  # there is no tally before the end of the round

    past = tab.page.get_by_role("table", name=f"Result of “{PROPOSALS[0]['title']}”")
    row = past.get_by_role("row", name=re.compile("^Support"))
    await expect(row.get_by_role("cell").first).to_have_text("1,260")
    await expect(row.get_by_role("cell").last).to_have_text("100.0%")
    late = tab.page.get_by_role("table", name=f"Result of “{PROPOSALS[1]['title']}”")
    await expect(late.get_by_role("row", name="Total").get_by_role("cell").first).to_have_text("0")


async def read_counts(round_card: Locator) -> dict[str, int]:
    """Return the number of shares by state on the card."""
    text = await round_card.locator("dl.states").inner_text()
    return {name: int(number) for name, number in re.findall(r"(\w+)\s+([\d]+)", text)}


async def test_queue_view_updates_live(tab: BrowserTab, environment: BrowserEnvironment) -> None:
    await tab.open_queue(TOKEN)
    card = tab.page.get_by_role("article", name=f"Round {environment.open_round_id.hex()[:8]}")
    await card.wait_for()
    shown = [await read_counts(card)]
    assert shown[0]["Waiting"] > 0
    later, now = ballot.same_second_times(unix_time_in(1800)), ballot.immediate_times()
    async with environment.helper.create_wallet() as wallet:
        sealed = await wallet.seal_ballot(environment.open_round_id, 1, 0)
        position = await wallet.cast_ballot(sealed)
        for state, times, indices in (
            ("Waiting", later, range(6)),
            ("Confirmed", now, range(6, 11)),  # each part is posted when the page shows the one before
            ("Confirmed", now, range(11, ballot.SHARE_COUNT)),
        ):
            vote = await wallet.post_shares(sealed, position, times=times, indices=indices)
            expected = shown[-1][state] + len(indices)
            async with environment.helper.timeout(f"shows {expected} as {state}"):
                while shown[-1][state] < expected:
                    shown.append(await read_counts(card))
                    await asyncio.sleep(0.05)
    totals = [sum(counts.values()) for counts in shown]
    assert totals == sorted(totals)
    assert totals[-1] == totals[0] + ballot.SHARE_COUNT, "each is shown exactly once"
    steps = [counts["Confirmed"] for counts in shown]
    assert steps == sorted(steps)

    failures = tab.page.get_by_role("region", name="Recent failures")
    await failures.get_by_text("the round closed before the share was confirmed").wait_for()
    await failures.get_by_text("16 ×").wait_for()
    await tab.page.get_by_text("Show as table").click()
    table = tab.page.get_by_role("table", name=re.compile("Shares due per minute"))
    due = [int(await cell.inner_text()) for cell in await table.get_by_role("cell").all()]
    assert 0 < sum(due) <= 32
    content = await tab.page.content()
    assert secrets_in_text(content, collect_secrets(vote)) == []
    assert not any(share.nullifier.hex() in content for share in sealed.shares)
    assert not any("token" in url or TOKEN in url for url in tab.requested_urls)


async def test_queue_view_reconnects_after_stream_loss(tab: BrowserTab, environment: BrowserEnvironment) -> None:
    """The page reports the loss while it reconnects."""
    tab.expected_messages += ["ERR_INTERNET_DISCONNECTED", "ERR_FAILED"]
    await tab.open_page("/queue")
    await tab.page.get_by_label("Operator token").fill(TOKEN)
    await tab.page.context.set_offline(True)
    await tab.press_button("Watch the queue")
    await tab.wait_for_text("The server cannot be reached")
    await tab.page.context.set_offline(False)
    await tab.wait_until_live()
    await tab.page.get_by_role("article", name=f"Round {environment.open_round_id.hex()[:8]}").wait_for()


async def test_queue_token_wrong_is_refused_and_sign_out_forgets_it(tab: BrowserTab) -> None:
    tab.expected_messages.append("401")
    await tab.open_page("/queue")
    await tab.page.get_by_label("Operator token").fill("not the token")
    await tab.press_button("Watch the queue")
    await tab.wait_for_text("A token has no spaces or accents")
    await tab.page.get_by_label("Operator token").fill("nearly-operators-only")
    await tab.press_button("Watch the queue")
    await tab.wait_for_text("The token was refused")
    await tab.page.get_by_label("Operator token").fill(TOKEN)
    await tab.page.get_by_label("Remember for this tab").check()
    await tab.press_button("Watch the queue")
    await tab.wait_until_live()
    await tab.page.reload()
    await tab.wait_until_live()
    await tab.press_button("Sign out")
    await tab.page.get_by_label("Operator token").wait_for()
    assert await tab.page.evaluate("JSON.stringify([sessionStorage, localStorage])") == "[{},{}]"


async def test_content_security_policy_blocks_injected_content(tab: BrowserTab) -> None:
    """Verifies the detection that all other tests rely on: a violation is reported and has no effect."""
    await tab.open_page("/join")
    await tab.wait_for_heading("Join the network")
    await tab.page.evaluate(
        """() => {
          const script = document.createElement("script");
          script.textContent = "globalThis.inlined = true";
          document.head.append(script);
          const style = document.createElement("style");
          style.textContent = "h1 { display: none }";
          document.head.append(style);
        }"""
    )
    left = await tab.page.evaluate("fetch('http://192.0.2.7/').then(() => 'left', () => 'kept')")
    assert left == "kept"
    assert await tab.page.evaluate("globalThis.inlined") is None
    assert await tab.page.get_by_role("heading", level=1).is_visible()
    directives = set(re.findall(r"directive:? ['\"](\w+-src)", "".join(tab.console_messages)))
    assert directives == {"script-src", "style-src", "connect-src"}, tab.console_messages
    tab.console_messages.clear()
    tab.requested_urls.clear()
