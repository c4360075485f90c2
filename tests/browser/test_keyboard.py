"""The whole page without a mouse: Tab reaches every control, in order, with a focus that is seen, and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page

from tests.browser.browser_tab import Visitor
from tests.browser.environment import TOKEN, Stage
from tests.browser.view_states import SCENES

pytestmark = pytest.mark.anyio

KEYS = (Path(__file__).parent / "keys.js").read_text()
WALKED = ("join", "wrong-details", "reviewed", "key-tool", "registered", "validators", "network", "rounds", "queue")


async def focus(page: Page) -> dict[str, Any] | None:
    """What has the focus and how it looks; None where nothing has."""
    found: dict[str, Any] | None = await page.evaluate(KEYS, "focus")
    return found


async def walk(page: Page, most: int) -> list[dict[str, Any]]:
    """Every stop from the document's start until the focus leaves the document; one more than `most` is too many."""
    await page.evaluate(KEYS, "begin")
    stops: list[dict[str, Any]] = []
    while len(stops) <= most:
        await page.keyboard.press("Tab")
        stop = await focus(page)
        if stop is None:
            break
        stops.append(stop)
    return stops


@pytest.mark.parametrize("scene", WALKED)
async def test_tab_reaches_every_control_and_shows_where_it_is(visitor: Visitor, scene: str) -> None:
    await SCENES[scene](visitor)
    page = visitor.page
    there: list[str] = await page.evaluate(KEYS, "stops")
    walked = await walk(page, len(there))
    assert [stop["name"] for stop in walked] == there
    assert [stop["name"] for stop in walked if not stop["visible"]] == []
    assert [stop["name"] for stop in walked if not stop["uncovered"]] == []


async def test_the_way_back_is_the_same(visitor: Visitor) -> None:
    await SCENES["reviewed"](visitor)
    page = visitor.page
    forth = [stop["name"] for stop in await walk(page, 60)]
    await page.evaluate(KEYS, "begin")
    for _ in forth:
        await page.keyboard.press("Tab")
    back = []
    for _ in forth:
        stop = await focus(page)
        back.append(stop["name"] if stop else None)
        await page.keyboard.press("Shift+Tab")
    assert back == forth[::-1]


class Typist:
    """Somebody who has a keyboard only."""

    def __init__(self, page: Page) -> None:
        self._keys = page.keyboard
        self._page = page

    async def to(self, part: str) -> None:
        """Tab until something with this in its name has the focus."""
        seen: list[str] = []
        for _ in range(60):
            await self._keys.press("Tab")
            stop = await focus(self._page)
            seen.append(stop["name"] if stop else "")
            if part in seen[-1]:
                return
        raise AssertionError(f"Tab does not come to {part}: {seen}")

    async def type(self, text: str) -> None:
        await self._keys.type(text)

    async def press(self, key: str) -> None:
        await self._keys.press(key)


async def test_a_validator_joins_without_a_mouse(visitor: Visitor, stage: Stage) -> None:
    await visitor.wallet()
    await visitor.open("/validators")
    page, typist = visitor.page, Typist(visitor.page)
    await visitor.heading("Pending validators")
    await typist.to("Join")
    await typist.press("Enter")
    await visitor.heading("Join the network")
    await page.wait_for_function("document.activeElement.matches('h1')")  # a new view is read from its title on
    await typist.to("moniker")
    await typist.type("keys only")
    await typist.to("url")
    await typist.type("https://keys.example.org")
    await typist.to("Keplr")
    await typist.press("ArrowDown")
    await page.get_by_label("Operator address").wait_for()
    await typist.press("ArrowUp")
    await typist.to("Connect Keplr")
    await typist.press("Enter")
    await visitor.shows("Connected as")
    await typist.to("Show the text")
    await typist.press("Space")
    await visitor.shows("This exact text is signed")
    await typist.to("Sign with Keplr and send")
    await typist.press("Enter")
    await visitor.heading("Waiting to be bonded")
    await page.wait_for_function("document.activeElement.matches('h1')")
    assert "keys only" in [one["moniker"] for one in (await stage.pending()).values()]


async def test_an_operator_opens_the_queue_without_a_mouse(visitor: Visitor) -> None:
    await visitor.open("/queue")
    typist = Typist(visitor.page)
    await typist.to("Skip to content")
    await typist.press("Enter")
    await visitor.page.wait_for_function("document.activeElement.matches('main')")
    await typist.to("token")
    await typist.type(TOKEN)
    await typist.press("Enter")
    await visitor.live()
    await typist.to("Show as table")
    await typist.press("Enter")
    await visitor.page.get_by_role("columnheader", name="Minutes from now").wait_for()
    await typist.to("System")
    await typist.press("ArrowRight")
    await typist.press("ArrowRight")
    assert await visitor.page.evaluate("document.documentElement.dataset.theme") == "dark"


async def test_what_goes_wrong_takes_the_focus_to_where_it_is_put_right(visitor: Visitor) -> None:
    await visitor.wallet()
    await visitor.open("/join")
    typist = Typist(visitor.page)
    await typist.to("Show the text")
    await typist.press("Enter")
    stop = await focus(visitor.page)
    assert stop is not None
    assert "moniker" in stop["name"]
    field = visitor.page.get_by_label("Name", exact=True)
    assert await field.get_attribute("aria-invalid") == "true"
    described = (await field.get_attribute("aria-describedby") or "").split()
    assert "Give your validator a name." in [await visitor.page.locator(f"#{one}").inner_text() for one in described]
