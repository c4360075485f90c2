"""Every distinct state of every view, and the modes in which it is checked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal

from playwright.async_api import ViewportSize

from tests.browser.browser_tab import PHONE_VIEWPORT, WIDE_VIEWPORT, BrowserTab
from tests.browser.environment import TOKEN

ViewState = Callable[[BrowserTab], Awaitable[None]]
MODES: dict[str, tuple[Literal["light", "dark"], ViewportSize]] = {
    "light": ("light", WIDE_VIEWPORT),
    "dark": ("dark", WIDE_VIEWPORT),
    "phone": ("light", PHONE_VIEWPORT),
    "phone-dark": ("dark", PHONE_VIEWPORT),
}


async def iterate_modes(tab: BrowserTab) -> AsyncIterator[str]:
    """Yield the mode's name after switching the page to it: light and dark, wide and narrow."""
    for name, (scheme, size) in MODES.items():
        await tab.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        await tab.page.set_viewport_size(size)
        await tab.page.evaluate("scrollTo(0, 0)")
        yield name


async def join(tab: BrowserTab) -> None:
    await tab.install_wallet()
    await tab.open_page("/join")
    await tab.wait_for_heading("Join the network")


async def filled_in(tab: BrowserTab) -> None:
    await join(tab)
    await tab.page.get_by_label("Name", exact=True).fill("Lighthouse")
    await tab.page.get_by_label("Helper URL").fill("https://helper.example.org")


async def reviewed(tab: BrowserTab) -> None:
    await filled_in(tab)
    await tab.press_button("Connect Keplr")
    await tab.wait_for_text("Connected as")
    await tab.press_button("Show the text")
    # The text's heading receives the focus after it is painted.
    await tab.page.locator(":focus", has_text="This exact text is signed").wait_for()
    await tab.page.get_by_role("group", name="text to sign").wait_for()


async def refused(tab: BrowserTab) -> None:
    await filled_in(tab)
    await tab.page.evaluate("wallet.conduct.locked = true")
    await tab.press_button("Connect Keplr")
    await tab.wait_for_text("Keplr is locked")


async def wrong_details(tab: BrowserTab) -> None:
    await join(tab)
    await tab.page.get_by_label("Helper URL").fill("http://localhost")
    await tab.press_button("Show the text")
    await tab.wait_for_text("Give your validator a name")


async def key_tool(tab: BrowserTab) -> None:
    await filled_in(tab)
    await tab.page.get_by_role("radio", name="Key tool").check()
    await tab.page.get_by_label("Operator address").fill("sv1p2amg2qs5ze7h6hz85vqzwwg300sdunsvremn3")
    await tab.press_button("Show the text")
    await tab.press_button("Send the registration")
    await tab.wait_for_text("Paste the signature")


async def command(tab: BrowserTab) -> None:
    await filled_in(tab)
    await tab.page.get_by_role("radio", name="One command").check()
    await tab.page.get_by_role("group", name="command to register").wait_for()


async def registered(tab: BrowserTab) -> None:
    await reviewed(tab)
    await tab.press_button("Sign with Keplr and send")
    await tab.wait_for_heading("Waiting to be bonded")


async def validators(tab: BrowserTab) -> None:
    await tab.open_page("/validators")
    await tab.page.get_by_role("row", name="Orchard Rising").wait_for()


async def no_match(tab: BrowserTab) -> None:
    await validators(tab)
    await tab.page.get_by_label("Search").fill("unknown")
    await tab.wait_for_text("No match")


async def network(tab: BrowserTab) -> None:
    tab.expected_messages.append("ERR_CONNECTION_REFUSED")
    await tab.open_page("/network")
    await tab.wait_for_text("Not reachable")
    await tab.page.get_by_text("Reachable", exact=True).wait_for()


async def network_json(tab: BrowserTab) -> None:
    await network(tab)
    await tab.page.get_by_role("radio", name="JSON").check()
    await tab.page.get_by_role("group", name="voting configuration as JSON").wait_for()


async def rounds(tab: BrowserTab) -> None:
    await tab.open_page("/rounds")
    await tab.page.get_by_role("table", name="Result of").first.wait_for()


async def token(tab: BrowserTab) -> None:
    tab.expected_messages.append("401")
    await tab.open_page("/queue")
    await tab.page.get_by_label("Operator token").fill("wrong")
    await tab.press_button("Watch the queue")
    await tab.wait_for_text("The token was refused")


async def queue(tab: BrowserTab) -> None:
    await tab.open_queue(TOKEN)
    await tab.page.locator(".chart canvas").wait_for()
    await tab.page.get_by_text("Show as table").click()


async def not_found(tab: BrowserTab) -> None:
    await tab.open_page("/nowhere")
    await tab.wait_for_heading("Page not found")


VIEW_STATES: dict[str, ViewState] = {
    scene.__name__.replace("_", "-"): scene
    for scene in (
        join,
        wrong_details,
        refused,
        reviewed,
        key_tool,
        command,
        registered,
        validators,
        no_match,
        network,
        network_json,
        rounds,
        token,
        queue,
        not_found,
    )
}
