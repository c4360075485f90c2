"""Keyboard operation of the page: Tab reaches every control in order, with a visible focus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page

from tests.browser.browser_tab import BrowserTab
from tests.browser.environment import TOKEN, BrowserEnvironment
from tests.browser.view_states import VIEW_STATES

KEYS_SCRIPT = (Path(__file__).parent / "keys.js").read_text()
TABBED_VIEWS = (
    "join",
    "wrong-details",
    "reviewed",
    "key-tool",
    "registered",
    "validators",
    "network",
    "rounds",
    "queue",
)


async def read_focus(page: Page) -> dict[str, Any] | None:
    """Return the focused element and its appearance; None if no element has the focus."""
    focused: dict[str, Any] | None = await page.evaluate(KEYS_SCRIPT, "focus")
    return focused


async def collect_tab_stops(page: Page, max_stops: int) -> list[dict[str, Any]]:
    """Return every tab stop until the focus leaves the document.

    Stops after `max_stops` + 1 entries, so that callers detect additional stops.
    """
    await page.evaluate(KEYS_SCRIPT, "reset")
    stops: list[dict[str, Any]] = []
    while len(stops) <= max_stops:
        await page.keyboard.press("Tab")
        stop = await read_focus(page)
        if stop is None:
            break
        stops.append(stop)
    return stops


@pytest.mark.parametrize("scene", TABBED_VIEWS)
async def test_tab_reaches_every_control_with_visible_focus(tab: BrowserTab, scene: str) -> None:
    await VIEW_STATES[scene](tab)
    page = tab.page
    expected_stops: list[str] = await page.evaluate(KEYS_SCRIPT, "stops")
    visited = await collect_tab_stops(page, len(expected_stops))
    assert [stop["name"] for stop in visited] == expected_stops
    assert [stop["name"] for stop in visited if not stop["visible"]] == []
    assert [stop["name"] for stop in visited if not stop["uncovered"]] == []


async def test_shift_tab_visits_same_stops_in_reverse(tab: BrowserTab) -> None:
    await VIEW_STATES["reviewed"](tab)
    page = tab.page
    forward = [stop["name"] for stop in await collect_tab_stops(page, 60)]
    await page.evaluate(KEYS_SCRIPT, "reset")
    for _ in forward:
        await page.keyboard.press("Tab")
    backward = []
    for _ in forward:
        stop = await read_focus(page)
        backward.append(stop["name"] if stop else None)
        await page.keyboard.press("Shift+Tab")
    assert backward == forward[::-1]


async def tab_to(page: Page, name_part: str) -> None:
    """Press Tab until an element with this text in its name has the focus."""
    names: list[str] = []
    for _ in range(60):
        await page.keyboard.press("Tab")
        stop = await read_focus(page)
        names.append(stop["name"] if stop else "")
        if name_part in names[-1]:
            return
    raise AssertionError(f"Tab does not come to {name_part}: {names}")


async def test_join_works_with_keyboard_only(tab: BrowserTab, environment: BrowserEnvironment) -> None:
    await tab.install_wallet()
    await tab.open_page("/validators")
    page, keyboard = tab.page, tab.page.keyboard
    await tab.wait_for_heading("Pending validators")
    await tab_to(page, "Join")
    await keyboard.press("Enter")
    await tab.wait_for_heading("Join the network")
    await page.wait_for_function("document.activeElement.matches('h1')")  # a new view starts at its heading
    await tab_to(page, "moniker")
    await keyboard.type("keys only")
    await tab_to(page, "url")
    await keyboard.type("https://keys.example.org")
    await tab_to(page, "Keplr")
    await keyboard.press("ArrowDown")
    await page.get_by_label("Operator address").wait_for()
    await keyboard.press("ArrowUp")
    await tab_to(page, "Connect Keplr")
    await keyboard.press("Enter")
    await tab.wait_for_text("Connected as")
    await tab_to(page, "Show the text")
    await keyboard.press("Space")
    await tab.wait_for_text("This exact text is signed")
    await tab_to(page, "Sign with Keplr and send")
    await keyboard.press("Enter")
    await tab.wait_for_heading("Waiting to be bonded")
    await page.wait_for_function("document.activeElement.matches('h1')")
    ((_, signer, _),) = await tab.wallet_requests("signArbitrary")
    assert (await environment.wait_for_pending(signer))["moniker"] == "keys only"


async def test_queue_opens_with_keyboard_only(tab: BrowserTab) -> None:
    await tab.open_page("/queue")
    page, keyboard = tab.page, tab.page.keyboard
    await tab_to(page, "Skip to content")
    await keyboard.press("Enter")
    await tab.page.wait_for_function("document.activeElement.matches('main')")
    await tab_to(page, "token")
    await keyboard.type(TOKEN)
    await keyboard.press("Enter")
    await tab.wait_until_live()
    await tab_to(page, "Show as table")
    await keyboard.press("Enter")
    await tab.page.get_by_role("columnheader", name="Minutes from now").wait_for()
    await tab_to(page, "System")
    await keyboard.press("ArrowRight")
    await keyboard.press("ArrowRight")
    assert await tab.page.evaluate("document.documentElement.dataset.theme") == "dark"


async def test_form_error_moves_focus_to_field(tab: BrowserTab) -> None:
    await tab.install_wallet()
    await tab.open_page("/join")
    page, keyboard = tab.page, tab.page.keyboard
    await tab_to(page, "Show the text")
    await keyboard.press("Enter")
    stop = await read_focus(tab.page)
    assert stop is not None
    assert "moniker" in stop["name"]
    field = tab.page.get_by_label("Name", exact=True)
    assert await field.get_attribute("aria-invalid") == "true"
    described = (await field.get_attribute("aria-describedby") or "").split()
    assert "Give your validator a name." in [
        await tab.page.locator(f"#{element_id}").inner_text() for element_id in described
    ]
