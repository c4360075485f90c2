"""Every view in light and dark, wide and narrow: axe-core checks and screenshots for review."""

from __future__ import annotations

import pytest

from tests.browser.browser_tab import ARTIFACTS, BrowserTab
from tests.browser.view_states import VIEW_STATES, iterate_modes


@pytest.mark.parametrize("scene", VIEW_STATES)
async def test_view_is_accessible_and_fits_in_every_mode(tab: BrowserTab, scene: str) -> None:
    await VIEW_STATES[scene](tab)
    violations: dict[str, list[str]] = {}
    async for mode in iterate_modes(tab):
        await tab.page.screenshot(path=ARTIFACTS / f"{scene}-{mode}.png", full_page=True)
        violations[mode] = await tab.find_accessibility_violations(mode)
        width, available = await tab.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        if width > available:
            violations[mode].append(f"the page is {width} wide, there is room for {available}")
    assert [f"{mode}: {fault}" for mode, faults in violations.items() for fault in faults] == []


LONG_WORD = "W" * 140
HOSTILE_DATA = {
    "/validators": (
        "pending-validators",
        [
            {
                "operator_address": f"sv1{number:039}",
                "moniker": moniker,
                "url": f"https://{'b' * 60}.example.org/{'p' * 400}",
                "requested_at": 1,
                "expires_at": 2_000_000_000,
            }
            for number, moniker in enumerate((LONG_WORD, "a" + "\u0301" * 139, "עברית <b>שם</b> " * 9))
        ],
    ),
    "/network": (
        "voting-config",
        {
            "version": LONG_WORD,
            LONG_WORD: 1,
            "vote_servers": [
                {"url": f"http:{LONG_WORD}", "label": LONG_WORD, "operator_address": LONG_WORD},
                {"url": LONG_WORD},
            ],
            "pir_endpoints": [{"url": f"javascript:{LONG_WORD}", "label": "<img src=x onerror=alert(1)>"}],
        },
    ),
    "/rounds": (
        "rounds",
        {
            "rounds": [
                {
                    "round_id": f"{status}" * 64,
                    "status": status,
                    "vote_end_time": 2_000_000_000 if status == 1 else 1,
                    "proposals": [
                        {
                            "id": 1,
                            "title": LONG_WORD * 2,
                            "options": [{"index": 0, "label": LONG_WORD, "total": 2**53}],
                        },
                        {"id": 2, "title": "word " * 60, "options": []},
                    ],
                }
                for status in (1, 3)
            ]
        },
    ),
}


@pytest.mark.parametrize("path", HOSTILE_DATA)
async def test_view_with_hostile_text_keeps_layout(tab: BrowserTab, path: str) -> None:
    """Anyone with a key can choose a validator's name: without spaces, in other scripts, with stacked accents."""
    route, response = HOSTILE_DATA[path]
    await tab.page.route(f"**/api/{route}", lambda intercepted: intercepted.fulfill(json=response))
    await tab.open_page(path)
    await tab.wait_for_text(LONG_WORD)
    async for mode in iterate_modes(tab):
        await tab.page.screenshot(path=ARTIFACTS / f"weird{path.replace('/', '-')}-{mode}.png", full_page=True)
        # No part of the view may be wider than the view.
        wide = await tab.page.evaluate(
            """[...document.querySelectorAll("main *")]
              .filter((part) => part.getBoundingClientRect().right > innerWidth && !part.closest(".sr-only, thead"))
              .map((part) => part.outerHTML.slice(0, 80))"""
        )
        assert wide == [], mode
        assert await tab.find_accessibility_violations(mode) == [], mode


async def test_accessibility_check_planted_fault_is_reported(tab: BrowserTab) -> None:
    await VIEW_STATES["join"](tab)
    assert await tab.find_accessibility_violations() == []
    await tab.page.evaluate(
        """() => {
          document.querySelector("label[for=moniker]").remove();
          document.querySelector(".lede").style.color = "#999";
        }"""
    )
    for mode, rules in (("light", {"label", "label-title-only", "color-contrast"}), ("dark", {"color-contrast"})):
        assert {line.split(":")[0] for line in await tab.find_accessibility_violations(mode)} == rules


async def test_page_with_reduced_motion_has_no_animation(tab: BrowserTab) -> None:
    """The loading indicator must not move if reduced motion is preferred."""
    page = tab.page
    await page.route("**/api/rounds", lambda _: None)  # a response that never arrives
    running_animations = "document.getAnimations().filter(({ playState }) => playState === 'running').length"
    await page.emulate_media(reduced_motion="no-preference")
    await tab.open_page("/rounds")
    await page.locator(".bone").first.wait_for()
    assert await page.evaluate(running_animations) > 0
    await page.emulate_media(reduced_motion="reduce")
    assert await page.evaluate(running_animations) == 0
    assert await page.locator(".bone").first.is_visible()


async def test_color_scheme_choice_persists(tab: BrowserTab) -> None:
    await tab.page.emulate_media(color_scheme="light")
    await tab.open_page("/rounds")
    background = "getComputedStyle(document.documentElement).backgroundColor"
    light = await tab.page.evaluate(background)
    await tab.page.get_by_role("radio", name="Dark").check()
    dark = await tab.page.evaluate(background)
    assert dark != light
    await tab.page.reload()
    await tab.wait_for_heading("Rounds")
    assert await tab.page.evaluate(background) == dark
    await tab.page.get_by_role("radio", name="System").check()
    assert await tab.page.evaluate(background) == light
