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


async def iterate_modes(visitor: BrowserTab) -> AsyncIterator[str]:
    """Yield the mode's name after switching the page to it: light and dark, wide and narrow."""
    for name, (scheme, size) in MODES.items():
        await visitor.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        await visitor.page.set_viewport_size(size)
        await visitor.page.evaluate("scrollTo(0, 0)")
        yield name


async def join(visitor: BrowserTab) -> None:
    await visitor.install_wallet()
    await visitor.open_page("/join")
    await visitor.wait_for_heading("Join the network")


async def filled_in(visitor: BrowserTab) -> None:
    await join(visitor)
    await visitor.page.get_by_label("Name", exact=True).fill("Lighthouse")
    await visitor.page.get_by_label("Helper URL").fill("https://helper.example.org")


async def reviewed(visitor: BrowserTab) -> None:
    await filled_in(visitor)
    await visitor.press_button("Connect Keplr")
    await visitor.wait_for_text("Connected as")
    await visitor.press_button("Show the text")
    await visitor.page.get_by_role("group", name="text to sign").wait_for()


async def refused(visitor: BrowserTab) -> None:
    await filled_in(visitor)
    await visitor.page.evaluate("wallet.conduct.locked = true")
    await visitor.press_button("Connect Keplr")
    await visitor.wait_for_text("Keplr is locked")


async def wrong_details(visitor: BrowserTab) -> None:
    await join(visitor)
    await visitor.page.get_by_label("Helper URL").fill("http://localhost")
    await visitor.press_button("Show the text")
    await visitor.wait_for_text("Give your validator a name")


async def key_tool(visitor: BrowserTab) -> None:
    await filled_in(visitor)
    await visitor.page.get_by_role("radio", name="Key tool").check()
    await visitor.page.get_by_label("Operator address").fill("sv1p2amg2qs5ze7h6hz85vqzwwg300sdunsvremn3")
    await visitor.press_button("Show the text")
    await visitor.press_button("Send the registration")
    await visitor.wait_for_text("Paste the signature")


async def command(visitor: BrowserTab) -> None:
    await filled_in(visitor)
    await visitor.page.get_by_role("radio", name="One command").check()
    await visitor.page.get_by_role("group", name="command to register").wait_for()


async def registered(visitor: BrowserTab) -> None:
    await reviewed(visitor)
    await visitor.press_button("Sign with Keplr and send")
    await visitor.wait_for_heading("Waiting to be bonded")


async def validators(visitor: BrowserTab) -> None:
    await visitor.open_page("/validators")
    await visitor.page.get_by_role("row", name="Orchard Rising").wait_for()


async def no_match(visitor: BrowserTab) -> None:
    await validators(visitor)
    await visitor.page.get_by_label("Search").fill("nobody")
    await visitor.wait_for_text("No match")


async def network(visitor: BrowserTab) -> None:
    visitor.expected_messages.append("ERR_CONNECTION_REFUSED")
    await visitor.open_page("/network")
    await visitor.wait_for_text("Not reachable")
    await visitor.page.get_by_text("Reachable", exact=True).wait_for()


async def network_json(visitor: BrowserTab) -> None:
    await network(visitor)
    await visitor.page.get_by_role("radio", name="JSON").check()
    await visitor.page.get_by_role("group", name="voting configuration as JSON").wait_for()


async def rounds(visitor: BrowserTab) -> None:
    await visitor.open_page("/rounds")
    await visitor.page.get_by_role("table", name="Result of").first.wait_for()


async def token(visitor: BrowserTab) -> None:
    visitor.expected_messages.append("401")
    await visitor.open_page("/queue")
    await visitor.page.get_by_label("Operator token").fill("wrong")
    await visitor.press_button("Watch the queue")
    await visitor.wait_for_text("The token was refused")


async def queue(visitor: BrowserTab) -> None:
    await visitor.open_queue(TOKEN)
    await visitor.page.locator(".chart canvas").wait_for()
    await visitor.page.get_by_text("Show as table").click()


async def not_found(visitor: BrowserTab) -> None:
    await visitor.open_page("/nowhere")
    await visitor.wait_for_heading("Page not found")


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
