"""A person at the page: a tab of a real browser that notes whatever should not happen in it."""

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

from tests.support.process import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
ARTIFACTS = ROOT / "build" / "browser"
"""Pictures of what the tests saw; git does not keep them."""
WALLET = ARTIFACTS / "keplr.js"
"""The wallet in Keplr's place, as `make` builds it from ui/tests/browser/."""
AXE = ROOT / "ui" / "node_modules" / "axe-core" / "axe.min.js"
_NUMBERS = itertools.count(1000)
WIDE: ViewportSize = {"width": 1280, "height": 800}
expect.set_options(timeout=1000 * PATIENCE)
PHONE: ViewportSize = {"width": 375, "height": 812}


def new_key() -> str:
    """A private key in hex that no other test has."""
    return f"{next(_NUMBERS):064x}"


@asynccontextmanager
async def browsing() -> AsyncIterator[Browser]:
    """Debian's chromium: playwright's own would have to be downloaded."""
    chromium = shutil.which("chromium")
    assert chromium, "the browser tests need chromium (Debian: apt install chromium)"
    for needed in (WALLET, AXE):
        assert needed.is_file(), f"{needed.relative_to(ROOT)} is not there: make {WALLET.relative_to(ROOT)}"
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium, args=["--disable-background-networking", "--disable-component-update"]
        )
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Visitor:
    """One tab.

    Attributes:
        page: the tab.
        origin: the service that it looks at.
        elsewhere: addresses beyond it that the page may ask.
        expected: parts of console messages that a test brings about on purpose.
        told: what the console and uncaught errors said beyond that.
        asked: every request.
    """

    page: Page
    origin: str
    elsewhere: Sequence[str]
    expected: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def watch(self) -> None:
        """Begin to take notes."""
        self.page.set_default_timeout(1000 * PATIENCE)
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.told.append(f"uncaught: {error}"))
        self.page.on("request", self._request)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.told.append(f"{message.type}: {message.text} ({message.location.get('url', '')})")

    def _request(self, request: Request) -> None:
        self.asked.append(request.url)

    def judge(self) -> None:
        """Nothing was said on the console that no test meant, and nothing was asked elsewhere."""
        assert [line for line in self.told if not any(part in line for part in self.expected)] == []
        allowed = (f"{self.origin}/", "data:")
        assert [url for url in self.asked if not url.startswith(allowed) and url not in self.elsewhere] == []

    async def open(self, path: str) -> None:
        """Go there as with a link from elsewhere."""
        await self.page.goto(f"{self.origin}{path}")

    async def shows(self, text: str) -> Locator:
        """Wait until a text is there to be seen."""
        found = self.page.get_by_text(text).first
        await found.wait_for()
        return found

    async def heading(self, name: str) -> Locator:
        """Wait for the view with this heading."""
        found = self.page.get_by_role("heading", level=1, name=name)
        await found.wait_for()
        return found

    async def press(self, name: str) -> None:
        """Press a button."""
        await self.page.get_by_role("button", name=name).click()

    async def watch_queue(self, token: str) -> None:
        """Open the queue with a token and wait until it is live."""
        await self.open("/queue")
        await self.page.get_by_label("Operator token").fill(token)
        await self.press("Watch the queue")
        await self.live()
        await self.page.get_by_role("heading", name="Due in the next hour").wait_for()

    async def live(self) -> None:
        """Wait until the queue is."""
        await self.page.locator(".badge", has_text="Live").wait_for()

    async def wallet(self, **conduct: Any) -> None:
        """Have a wallet in every page from now on; see ui/tests/browser/keplr.ts for how it may behave."""
        settings = {"keys": [new_key(), new_key()], **conduct}
        await self.page.add_init_script(script=f"globalThis.walletConduct = {json.dumps(settings)};")
        await self.page.add_init_script(path=WALLET)

    async def wallet_asked(self, method: str) -> list[list[Any]]:
        """With what the wallet was asked for this."""
        calls: list[dict[str, Any]] = await self.page.evaluate("wallet.asked")
        return [call["with"] for call in calls if call["method"] == method]

    async def violations(self) -> list[str]:
        """What axe-core finds wrong with the page as it is, all of its rules asked."""
        if not await self.page.evaluate("'axe' in globalThis"):
            await self.page.evaluate(AXE.read_text())
        found = await self.page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
        return [
            f"{rule['id']}: {node['html']} {node['failureSummary']}"
            for rule in found["violations"]
            for node in rule["nodes"]
        ]
