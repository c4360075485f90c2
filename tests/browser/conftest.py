"""One browser, one chain and one service for all tests of the page."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser

from tests.browser.browser_tab import WIDE, Visitor, browsing
from tests.browser.environment import Stage, on_stage


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The same as elsewhere, with an event loop that the browser outlives a test in."""
    return "asyncio"


@pytest.fixture(scope="session")
async def stage(anyio_backend: str) -> AsyncIterator[Stage]:
    async with on_stage() as stage:
        yield stage


@pytest.fixture(scope="session")
async def browser(anyio_backend: str) -> AsyncIterator[Browser]:
    async with browsing() as browser:
        yield browser


@pytest.fixture
async def visitor(stage: Stage, browser: Browser) -> AsyncIterator[Visitor]:
    """A tab with nothing kept from others; what should not have happened in it fails its test at the end."""
    context = await browser.new_context(viewport=WIDE, locale="en-GB", timezone_id="Europe/Berlin")
    try:
        visitor = Visitor(await context.new_page(), stage.url, stage.servers)
        visitor.watch()
        yield visitor
        visitor.judge()
    finally:
        await context.close()
