"""Shared fixtures of the browser tests: one browser, one chain and one service."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser

from tests.browser.browser_tab import WIDE_VIEWPORT, BrowserTab, launch_browser
from tests.browser.environment import BrowserEnvironment, run_environment


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Session scope: the browser needs an event loop that outlives a test."""
    return "asyncio"


@pytest.fixture(scope="session")
async def environment(anyio_backend: str) -> AsyncIterator[BrowserEnvironment]:
    async with run_environment() as stage:
        yield stage


@pytest.fixture(scope="session")
async def browser(anyio_backend: str) -> AsyncIterator[Browser]:
    async with launch_browser() as browser:
        yield browser


@pytest.fixture
async def tab(environment: BrowserEnvironment, browser: Browser) -> AsyncIterator[BrowserTab]:
    """A tab without stored state. Unexpected messages or requests fail the test at its end."""
    context = await browser.new_context(viewport=WIDE_VIEWPORT, locale="en-GB", timezone_id="Europe/Berlin")
    try:
        tab = BrowserTab(await context.new_page(), environment.url, environment.vote_server_urls)
        tab.start_recording()
        yield tab
        tab.assert_clean()
    finally:
        await context.close()
