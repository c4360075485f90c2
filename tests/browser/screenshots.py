"""Generates docs/images/ from the running product: `make pictures` (needs chromium and pngquant).

`python -m tests.browser.screenshots NAME …` generates some of the pictures only.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Collection
from typing import Literal

from playwright.async_api import Browser, ViewportSize

from audit.auditor import audit_round
from audit.evidence import RecordingSource
from audit.html_report import create_report
from tests.browser.browser_tab import PHONE_VIEWPORT, ROOT, BrowserTab, launch_browser
from tests.browser.environment import BrowserEnvironment, run_environment, times_within
from tests.browser.view_states import VIEW_STATES, ViewState
from tests.recorded.test_audit import heads
from tests.support.audit_rounds import threshold_round

FOLDER = ROOT / "docs" / "images"
MAX_BYTES = 320_000
"""Maximum total size of all screenshots, in bytes."""
PAGE_VIEWPORT: ViewportSize = {"width": 1120, "height": 760}
REPORT_VIEWPORT: ViewportSize = {"width": 940, "height": 760}
COLOR_COUNT = "48"
AUDIT_REPORT = "audit-report"

PICTURES: dict[str, tuple[str, Literal["light", "dark"], ViewportSize]] = {
    "join": ("reviewed", "light", PAGE_VIEWPORT),
    "join-phone": ("reviewed", "dark", PHONE_VIEWPORT),
    "waiting": ("validators", "light", PAGE_VIEWPORT),
    "network": ("network", "light", PAGE_VIEWPORT),
    "rounds": ("rounds", "light", PAGE_VIEWPORT),
    "queue": ("queue", "dark", PAGE_VIEWPORT),
}


async def draw(names: Collection[str]) -> None:
    """Take these screenshots."""
    FOLDER.mkdir(exist_ok=True)
    if AUDIT_REPORT in names:
        async with launch_browser() as browser:
            await draw_audit_report(browser)
    views = {name: picture for name, picture in PICTURES.items() if name in names}
    if views:
        async with run_environment() as stage, launch_browser() as browser:
            for name, (scene, scheme, size) in views.items():
                await take_screenshot(browser, stage, name, VIEW_STATES[scene], scheme, size)
    drawn = [FOLDER / f"{name}.png" for name in names]
    subprocess.run(["pngquant", "--force", "--ext", ".png", "--strip", "--speed", "1", COLOR_COUNT, *drawn], check=True)
    files = [FOLDER / f"{name}.png" for name in (*PICTURES, AUDIT_REPORT)]
    weight = sum(path.stat().st_size for path in files)
    print(f"{len(files)} pictures, {weight} bytes")
    if weight > MAX_BYTES:
        raise SystemExit(f"more than {MAX_BYTES} bytes")


async def draw_audit_report(browser: Browser) -> None:
    """Take a screenshot of the report about the recorded round, with the same head reported by two nodes."""
    source = threshold_round()
    source.documents["heads"] = heads(("one", "A", "S"), ("two", "A", "S"))
    recording = RecordingSource(source, source.round_id)
    audit = await audit_round(recording, source.round_id)
    recording.finish()
    context = await browser.new_context(viewport=REPORT_VIEWPORT, color_scheme="light", locale="en-GB")
    page = await context.new_page()
    await page.set_content(create_report(audit, recording.hashes, "svote-helper audit --from evidence.zip"))
    await page.screenshot(path=FOLDER / f"{AUDIT_REPORT}.png", full_page=True)
    await context.close()


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
    asyncio.run(draw(sys.argv[1:] or (*PICTURES, AUDIT_REPORT)))
