"""Every view in every state that looks different, and the ways in which each is looked at."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal

from playwright.async_api import ViewportSize

from tests.browser.browser_tab import PHONE, WIDE, Visitor
from tests.browser.environment import TOKEN

Scene = Callable[[Visitor], Awaitable[None]]
MODES: dict[str, tuple[Literal["light", "dark"], ViewportSize]] = {
    "light": ("light", WIDE),
    "dark": ("dark", WIDE),
    "phone": ("light", PHONE),
    "phone-dark": ("dark", PHONE),
}


async def in_every_mode(visitor: Visitor) -> AsyncIterator[str]:
    """The same state of the page, light and dark, wide and on a phone; the mode's name."""
    for name, (scheme, size) in MODES.items():
        await visitor.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        await visitor.page.set_viewport_size(size)
        await visitor.page.evaluate("scrollTo(0, 0)")
        yield name


async def join(visitor: Visitor) -> None:
    await visitor.wallet()
    await visitor.open("/join")
    await visitor.heading("Join the network")


async def filled_in(visitor: Visitor) -> None:
    await join(visitor)
    await visitor.page.get_by_label("Name", exact=True).fill("Lighthouse")
    await visitor.page.get_by_label("Helper URL").fill("https://helper.example.org")


async def reviewed(visitor: Visitor) -> None:
    await filled_in(visitor)
    await visitor.press("Connect Keplr")
    await visitor.shows("Connected as")
    await visitor.press("Show the text")
    await visitor.page.get_by_role("group", name="text to sign").wait_for()


async def refused(visitor: Visitor) -> None:
    await filled_in(visitor)
    await visitor.page.evaluate("wallet.conduct.locked = true")
    await visitor.press("Connect Keplr")
    await visitor.shows("Keplr is locked")


async def wrong_details(visitor: Visitor) -> None:
    await join(visitor)
    await visitor.page.get_by_label("Helper URL").fill("http://localhost")
    await visitor.press("Show the text")
    await visitor.shows("Give your validator a name")


async def key_tool(visitor: Visitor) -> None:
    await filled_in(visitor)
    await visitor.page.get_by_role("radio", name="Key tool").check()
    await visitor.page.get_by_label("Operator address").fill("sv1p2amg2qs5ze7h6hz85vqzwwg300sdunsvremn3")
    await visitor.press("Show the text")
    await visitor.press("Send the registration")
    await visitor.shows("Paste the signature")


async def command(visitor: Visitor) -> None:
    await filled_in(visitor)
    await visitor.page.get_by_role("radio", name="One command").check()
    await visitor.page.get_by_role("group", name="command to register").wait_for()


async def registered(visitor: Visitor) -> None:
    await reviewed(visitor)
    await visitor.press("Sign with Keplr and send")
    await visitor.heading("Waiting to be bonded")


async def validators(visitor: Visitor) -> None:
    await visitor.open("/validators")
    await visitor.page.get_by_role("row", name="Orchard Rising").wait_for()


async def no_match(visitor: Visitor) -> None:
    await validators(visitor)
    await visitor.page.get_by_label("Search").fill("nobody")
    await visitor.shows("No match")


async def network(visitor: Visitor) -> None:
    visitor.expected.append("ERR_CONNECTION_REFUSED")
    await visitor.open("/network")
    await visitor.shows("Not reachable")
    await visitor.page.get_by_text("Reachable", exact=True).wait_for()


async def network_json(visitor: Visitor) -> None:
    await network(visitor)
    await visitor.page.get_by_role("radio", name="JSON").check()
    await visitor.page.get_by_role("group", name="voting configuration as JSON").wait_for()


async def rounds(visitor: Visitor) -> None:
    await visitor.open("/rounds")
    await visitor.page.get_by_role("table", name="Result of").first.wait_for()


async def token(visitor: Visitor) -> None:
    visitor.expected.append("401")
    await visitor.open("/queue")
    await visitor.page.get_by_label("Operator token").fill("wrong")
    await visitor.press("Watch the queue")
    await visitor.shows("The token was refused")


async def queue(visitor: Visitor) -> None:
    await visitor.watch_queue(TOKEN)
    await visitor.page.locator(".chart canvas").wait_for()
    await visitor.page.get_by_text("Show as table").click()


async def not_found(visitor: Visitor) -> None:
    await visitor.open("/nowhere")
    await visitor.heading("Page not found")


SCENES: dict[str, Scene] = {
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
