"""A tab of a real browser that records unexpected messages and requests."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, ConsoleMessage, Locator, Page, Request, ViewportSize, async_playwright, expect

from tests.support.process import TIMEOUT_SECONDS

ROOT = Path(__file__).resolve().parents[2]
ARTIFACTS = ROOT / "build" / "browser"
"""Screenshots of the tests; ignored by git."""
WALLET_SCRIPT = ARTIFACTS / "keplr.js"
"""The fake of the Keplr wallet, which `make` builds from ui/tests/browser/."""
AXE_SCRIPT = ROOT / "ui" / "node_modules" / "axe-core" / "axe.min.js"
_KEY_NUMBERS = itertools.count(1000)
WIDE_VIEWPORT: ViewportSize = {"width": 1280, "height": 800}
expect.set_options(timeout=1000 * TIMEOUT_SECONDS)
PHONE_VIEWPORT: ViewportSize = {"width": 375, "height": 812}


def create_private_key() -> str:
    return f"{next(_KEY_NUMBERS):064x}"


@asynccontextmanager
async def launch_browser() -> AsyncIterator[Browser]:
    """Launch Debian's Chromium. Playwright's own would have to be downloaded."""
    chromium = shutil.which("chromium")
    assert chromium, "the browser tests need chromium (Debian: apt install chromium)"
    for needed in (WALLET_SCRIPT, AXE_SCRIPT):
        assert needed.is_file(), (
            f"{needed.relative_to(ROOT)} does not exist: run make {WALLET_SCRIPT.relative_to(ROOT)}"
        )
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium, args=["--disable-background-networking", "--disable-component-update"]
        )
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class BrowserTab:
    """One tab.

    Attributes:
        allowed_urls: external addresses that the page may request.
        expected_messages: substrings of console messages that a test causes deliberately.
        console_messages: all other console messages and uncaught errors.
    """

    page: Page
    origin: str
    allowed_urls: Sequence[str]
    expected_messages: list[str] = field(default_factory=list)
    console_messages: list[str] = field(default_factory=list)
    requested_urls: list[str] = field(default_factory=list)

    def start_recording(self) -> None:
        self.page.set_default_timeout(1000 * TIMEOUT_SECONDS)
        self.page.on("console", self._record_console)
        self.page.on("pageerror", lambda error: self.console_messages.append(f"uncaught: {error}"))
        self.page.on("request", self._record_request)

    def _record_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.console_messages.append(f"{message.type}: {message.text} ({message.location.get('url', '')})")

    def _record_request(self, request: Request) -> None:
        self.requested_urls.append(request.url)

    def assert_clean(self) -> None:
        """Assert that there were no unexpected console messages and no requests to other addresses."""
        assert [
            line for line in self.console_messages if not any(part in line for part in self.expected_messages)
        ] == []
        allowed = (f"{self.origin}/", "data:")
        assert [
            url for url in self.requested_urls if not url.startswith(allowed) and url not in self.allowed_urls
        ] == []

    async def open_page(self, path: str) -> None:
        await self.page.goto(f"{self.origin}{path}")

    async def wait_for_text(self, text: str) -> Locator:
        locator = self.page.get_by_text(text).first
        await locator.wait_for()
        return locator

    async def wait_for_heading(self, name: str) -> Locator:
        locator = self.page.get_by_role("heading", level=1, name=name)
        await locator.wait_for()
        return locator

    async def press_button(self, name: str) -> None:
        await self.page.get_by_role("button", name=name).click()

    async def open_queue(self, token: str) -> None:
        """Open the queue view with a token and wait until it is live."""
        await self.open_page("/queue")
        await self.page.get_by_label("Operator token").fill(token)
        await self.press_button("Watch the queue")
        await self.wait_until_live()
        await self.page.get_by_role("heading", name="Due in the next hour").wait_for()

    async def wait_until_live(self) -> None:
        await self.page.locator(".badge", has_text="Live").wait_for()

    async def install_wallet(self, **behavior: Any) -> None:
        """Install the fake wallet in all pages opened from now on. See ui/tests/browser/keplr.ts for its behavior."""
        settings = {"keys": [create_private_key(), create_private_key()], **behavior}
        await self.page.add_init_script(script=f"globalThis.walletConduct = {json.dumps(settings)};")
        await self.page.add_init_script(path=WALLET_SCRIPT)

    async def wallet_requests(self, method: str) -> list[list[Any]]:
        calls: list[dict[str, Any]] = await self.page.evaluate("wallet.calls")
        return [call["with"] for call in calls if call["method"] == method]

    async def find_accessibility_violations(self, mode: str = "light") -> list[str]:
        """Return the violations that axe-core finds on the current page. Only colors differ in a dark mode."""
        if not await self.page.evaluate("'axe' in globalThis"):
            await self.page.evaluate(AXE_SCRIPT.read_text())
        rules = ["color-contrast"] if "dark" in mode else None
        results = await self.page.evaluate(
            "(rules) => axe.run(document, { resultTypes: ['violations'], ...(rules && { runOnly: rules }) })", rules
        )
        return [
            f"{rule['id']}: {node['html']} {node['failureSummary']}"
            for rule in results["violations"]
            for node in rule["nodes"]
        ]
