"""Every view, light and dark, wide and on a phone: what axe-core says of it, and pictures for people."""

from __future__ import annotations

import pytest

from tests.browser.scenes import SCENES, in_every_mode
from tests.browser.visitor import ARTIFACTS, Visitor

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
    await visitor.page.get_by_role("radio", name="As the system has it").check()
    assert await visitor.page.evaluate(paper) == light
