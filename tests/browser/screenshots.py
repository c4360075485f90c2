"""Generates docs/images/ from the running product: `make pictures` (needs chromium and pngquant)."""

from __future__ import annotations

import asyncio
import subprocess
from typing import Literal

from playwright.async_api import Browser, ViewportSize

from tests.browser.browser_tab import PHONE_VIEWPORT, ROOT, BrowserTab, launch_browser
from tests.browser.environment import BrowserEnvironment, run_environment, times_within
from tests.browser.view_states import VIEW_STATES, ViewState

FOLDER = ROOT / "docs" / "images"
MAX_BYTES = 300_000
"""Maximum total size of all screenshots, in bytes."""
PAGE_VIEWPORT: ViewportSize = {"width": 1120, "height": 760}
COLOR_COUNT = "48"

PICTURES: dict[str, tuple[str, Literal["light", "dark"], ViewportSize]] = {
    "join": ("reviewed", "light", PAGE_VIEWPORT),
    "join-phone": ("reviewed", "dark", PHONE_VIEWPORT),
    "waiting": ("validators", "light", PAGE_VIEWPORT),
    "network": ("network", "light", PAGE_VIEWPORT),
    "rounds": ("rounds", "light", PAGE_VIEWPORT),
    "queue": ("queue", "dark", PAGE_VIEWPORT),
}


async def draw_all() -> None:
    """Take all screenshots."""
    FOLDER.mkdir(exist_ok=True)
    async with run_environment() as stage, launch_browser() as browser:
        for name, (scene, scheme, size) in PICTURES.items():
            await take_screenshot(browser, stage, name, VIEW_STATES[scene], scheme, size)
    files = [FOLDER / f"{name}.png" for name in PICTURES]
    subprocess.run(["pngquant", "--force", "--ext", ".png", "--strip", "--speed", "1", COLOR_COUNT, *files], check=True)
    weight = sum(path.stat().st_size for path in files)
    print(f"{len(files)} pictures, {weight} bytes")
    if weight > MAX_BYTES:
        raise SystemExit(f"more than {MAX_BYTES} bytes")


async def take_screenshot(
    browser: Browser,
    stage: BrowserEnvironment,
    name: str,
    view: ViewState,
    scheme: Literal["light", "dark"],
    size: ViewportSize,
) -> None:
    """Take one screenshot of the whole page at its full height."""
    context = await browser.new_context(viewport=size, color_scheme=scheme, locale="en-GB", timezone_id="UTC")
    tab = BrowserTab(await context.new_page(), stage.url, stage.vote_server_urls)
    tab.start_recording()
    if name == "queue":
        await stage.cast_vote(times_within(12), proposal=2)
    await view(tab)
    if name == "queue":
        await tab.page.get_by_text("Show as table").click()  # close it again
        await tab.page.locator("dl.states .value").nth(3).filter(has_text="7").wait_for()
    await tab.page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    await tab.page.screenshot(path=FOLDER / f"{name}.png", full_page=True)
    await context.close()


if __name__ == "__main__":
    asyncio.run(draw_all())
