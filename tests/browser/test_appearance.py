"""Every view, light and dark, wide and on a phone: what axe-core says of it, and pictures for people."""

from __future__ import annotations

import pytest

from tests.browser.browser_tab import ARTIFACTS, Visitor
from tests.browser.view_states import SCENES, in_every_mode

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("scene", SCENES)
async def test_a_view_is_accessible_and_fits_in_every_mode(visitor: Visitor, scene: str) -> None:
    await SCENES[scene](visitor)
    found: dict[str, list[str]] = {}
    async for mode in in_every_mode(visitor):
        await visitor.page.screenshot(path=ARTIFACTS / f"{scene}-{mode}.png", full_page=True)
        found[mode] = await visitor.violations()
        width, room = await visitor.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        if width > room:
            found[mode].append(f"the page is {width} wide, there is room for {room}")
    assert [f"{mode}: {fault}" for mode, faults in found.items() for fault in faults] == []


LONG = "W" * 140
WEIRD = {
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
            for number, moniker in enumerate((LONG, "a" + "\u0301" * 139, "עברית <b>שם</b> " * 9))
        ],
    ),
    "/network": (
        "voting-config",
        {
            "version": LONG,
            LONG: 1,
            "vote_servers": [{"url": f"http:{LONG}", "label": LONG, "operator_address": LONG}, {"url": LONG}],
            "pir_endpoints": [{"url": f"javascript:{LONG}", "label": "<img src=x onerror=alert(1)>"}],
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
                        {"id": 1, "title": LONG * 2, "options": [{"index": 0, "label": LONG, "total": 2**53}]},
                        {"id": 2, "title": "word " * 60, "options": []},
                    ],
                }
                for status in (1, 3)
            ]
        },
    ),
}


@pytest.mark.parametrize("path", WEIRD)
async def test_what_others_write_stays_in_its_place(visitor: Visitor, path: str) -> None:
    """Anybody who has a key names a validator: without a space, in other scripts, with a tower of accents."""
    route, answer = WEIRD[path]
    await visitor.page.route(f"**/api/{route}", lambda asked: asked.fulfill(json=answer))
    await visitor.open(path)
    await visitor.shows(LONG)
    async for mode in in_every_mode(visitor):
        await visitor.page.screenshot(path=ARTIFACTS / f"weird{path.replace('/', '-')}-{mode}.png", full_page=True)
        # no part of the view is wider than the view
        wide = await visitor.page.evaluate(
            """[...document.querySelectorAll("main *")]
              .filter((part) => part.getBoundingClientRect().right > innerWidth && !part.closest(".sr-only, thead"))
              .map((part) => part.outerHTML.slice(0, 80))"""
        )
        assert wide == [], mode
        assert await visitor.violations() == [], mode


async def test_a_fault_that_is_planted_is_found(visitor: Visitor) -> None:
    await SCENES["join"](visitor)
    assert await visitor.violations() == []
    await visitor.page.evaluate(
        """() => {
          document.querySelector("label[for=moniker]").remove();
          document.querySelector(".lede").style.color = "#999";
        }"""
    )
    assert {line.split(":")[0] for line in await visitor.violations()} == {
        "label",
        "label-title-only",
        "color-contrast",
    }


async def test_who_wants_less_motion_gets_none(visitor: Visitor) -> None:
    """While something is being waited for there is a thing that moves, unless it is not wanted."""
    page = visitor.page
    await page.route("**/api/rounds", lambda _: None)  # an answer that does not come
    moving = "document.getAnimations().filter(({ playState }) => playState === 'running').length"
    await page.emulate_media(reduced_motion="no-preference")
    await visitor.open("/rounds")
    await page.locator(".bone").first.wait_for()
    assert await page.evaluate(moving) > 0
    await page.emulate_media(reduced_motion="reduce")
    assert await page.evaluate(moving) == 0
    assert await page.locator(".bone").first.is_visible()


async def test_the_visitors_choice_of_colours_stays(visitor: Visitor) -> None:
    await visitor.page.emulate_media(color_scheme="light")
    await visitor.open("/rounds")
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    light = await visitor.page.evaluate(paper)
    await visitor.page.get_by_role("radio", name="Dark").check()
    dark = await visitor.page.evaluate(paper)
    assert dark != light
    await visitor.page.reload()
    await visitor.heading("Rounds")
    assert await visitor.page.evaluate(paper) == dark
    await visitor.page.get_by_role("radio", name="System").check()
    assert await visitor.page.evaluate(paper) == light
