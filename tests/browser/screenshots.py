"""The pictures in docs/images/, made of the running product: `make pictures` (needs chromium and pngquant)."""

from __future__ import annotations

import asyncio
import subprocess
from typing import Literal

from playwright.async_api import Browser, ViewportSize

from tests.browser.browser_tab import PHONE, ROOT, Visitor, browsing
from tests.browser.environment import Stage, in_seconds, on_stage
from tests.browser.view_states import SCENES, Scene

FOLDER = ROOT / "docs" / "images"
LARGEST = 300_000
"""Bytes of all pictures together."""
PAGE: ViewportSize = {"width": 1120, "height": 760}
COLOURS = "48"

PICTURES: dict[str, tuple[str, Literal["light", "dark"], ViewportSize]] = {
    "join": ("reviewed", "light", PAGE),
    "join-phone": ("reviewed", "dark", PHONE),
    "waiting": ("validators", "light", PAGE),
    "network": ("network", "light", PAGE),
    "rounds": ("rounds", "light", PAGE),
    "queue": ("queue", "dark", PAGE),
}


async def draw() -> None:
    """All of them."""
    FOLDER.mkdir(exist_ok=True)
    async with on_stage() as stage, browsing() as browser:
        for name, (scene, scheme, size) in PICTURES.items():
            await take(browser, stage, name, SCENES[scene], scheme, size)
    files = [FOLDER / f"{name}.png" for name in PICTURES]
    subprocess.run(["pngquant", "--force", "--ext", ".png", "--strip", "--speed", "1", COLOURS, *files], check=True)
    weight = sum(path.stat().st_size for path in files)
    print(f"{len(files)} pictures, {weight} bytes")
    if weight > LARGEST:
        raise SystemExit(f"more than {LARGEST} bytes")


async def take(
    browser: Browser, stage: Stage, name: str, scene: Scene, scheme: Literal["light", "dark"], size: ViewportSize
) -> None:
    """One picture of the whole page, as high as it is."""
    context = await browser.new_context(viewport=size, color_scheme=scheme, locale="en-GB", timezone_id="UTC")
    visitor = Visitor(await context.new_page(), stage.url, stage.servers)
    visitor.watch()
    if name == "queue":
        await stage.vote(in_seconds(12), proposal=2)
    await scene(visitor)
    if name == "queue":
        await visitor.page.get_by_text("Show as table").click()  # closed again
        await visitor.page.locator("dl.states .value").nth(3).filter(has_text="7").wait_for()
    await visitor.page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    await visitor.page.screenshot(path=FOLDER / f"{name}.png", full_page=True)
    await context.close()


if __name__ == "__main__":
    asyncio.run(draw())
