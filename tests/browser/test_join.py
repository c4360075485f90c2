"""Validators join in a real browser, with a wallet that really signs."""

from __future__ import annotations

import asyncio
import base64
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import expect

from tests.browser.browser_tab import Visitor, new_key
from tests.browser.environment import Stage

pytestmark = pytest.mark.anyio


async def fill_in(visitor: Visitor, moniker: str, url: str = "https://helper.example.org") -> None:
    await visitor.page.get_by_label("Name", exact=True).fill(moniker)
    await visitor.page.get_by_label("Helper URL").fill(url)


async def review(visitor: Visitor, moniker: str) -> dict[str, Any]:
    """Fill in, connect, and read the text that is to be signed."""
    await fill_in(visitor, moniker)
    await visitor.press("Connect Keplr")
    await visitor.shows("Connected as")
    await visitor.press("Show the text")
    text = await visitor.page.get_by_role("group", name="text to sign").inner_text()
    claim: dict[str, Any] = json.loads(text)
    return claim


async def test_a_registration_waits_until_its_validator_bonds(visitor: Visitor, stage: Stage) -> None:
    await visitor.page.clock.install()
    await visitor.wallet()
    await visitor.open("/join")
    claim = await review(visitor, 'Höhle <b>&</b> "quoted" 🗳️')
    assert abs(claim["timestamp"] - time.time()) < 30
    assert await visitor.wallet_asked("signArbitrary") == [], "nothing is signed before the text was seen"
    await visitor.press("Sign with Keplr and send")
    await visitor.heading("Waiting to be bonded")
    await visitor.shows("Expires in")
    (signed,) = await visitor.wallet_asked("signArbitrary")
    assert signed[1:] == [claim["operator_address"], json.dumps(claim, ensure_ascii=False, separators=(",", ":"))]

    waiting = (await stage.pending())[claim["operator_address"]]
    assert (waiting["moniker"], waiting["url"]) == (claim["moniker"], claim["url"])
    await visitor.page.get_by_role("link", name="Show pending validators").click()
    row = visitor.page.get_by_role("row", name=claim["moniker"])
    await row.wait_for()

    await stage.bond(claim["operator_address"])
    async with stage.helper.patience("sees the validator bonded"):
        while claim["operator_address"] in await stage.pending():
            await asyncio.sleep(0.2)
    await visitor.page.clock.fast_forward("00:10")  # the view asks again by itself
    await expect(row).to_have_count(0)

    await visitor.page.get_by_role("navigation").get_by_role("link", name="Join").click()
    await review(visitor, "bonded by now")
    await visitor.press("Sign with Keplr and send")
    await visitor.heading("Registered")


async def test_the_chain_is_suggested_by_what_its_node_says(visitor: Visitor, stage: Stage) -> None:
    await visitor.wallet(lateMs=300)
    await visitor.open("/join")
    await fill_in(visitor, "node")
    await visitor.press("Connect Keplr")
    await visitor.shows("Connected as")
    ((info,),) = await visitor.wallet_asked("experimentalSuggestChain")
    node = await stage.chain.get("/cosmos/base/tendermint/v1beta1/node_info")
    assert info["chainId"] == node["default_node_info"]["network"]
    assert (info["rest"], info["rpc"]) == (stage.chain.url, stage.chain.told["rpc"])
    assert info["bech32Config"]["bech32PrefixAccAddr"] == "sv"
    assert info["stakeCurrency"] == {"coinDenom": "SVOTE", "coinMinimalDenom": "usvote", "coinDecimals": 6}


async def test_without_keplr_there_are_a_command_and_a_form(visitor: Visitor, stage: Stage) -> None:
    await visitor.open("/join")
    await fill_in(visitor, "no wallet's node")
    await visitor.press("Connect Keplr")
    await visitor.shows("Keplr was not found in this browser")
    await visitor.page.get_by_role("radio", name="Key tool").check()
    key = new_key()
    signer = await _tool(visitor, key, "")
    await visitor.page.get_by_label("Operator address").fill(signer["address"])
    await visitor.press("Show the text")
    text = await visitor.page.get_by_role("group", name="text to sign").inner_text()
    command = visitor.page.get_by_role("group", name="command to sign")
    await expect(command).to_contain_text('svoted sign-arbitrary \'{"operator_address":')
    # as the tool prints it: one line of JSON with both, pasted whole
    answer = await _tool(visitor, key, text)
    await visitor.page.get_by_label("Public key").fill(json.dumps(answer["printed"]))
    await visitor.press("Send the registration")
    await visitor.heading("Waiting to be bonded")
    assert (await stage.pending())[signer["address"]]["moniker"] == "no wallet's node"


async def test_the_command_that_is_shown_registers(visitor: Visitor, stage: Stage, tmp_path: Path) -> None:
    await visitor.open("/join")
    await fill_in(visitor, "it's one; command $HOME")
    await visitor.page.get_by_role("radio", name="One command").check()
    shown = await visitor.page.get_by_role("group", name="command to register").inner_text()
    command = shlex.split(shown)
    assert command[:5] == ["svote-helper", "admin", "register", "--key-file", "KEY"]
    (key_file := tmp_path / "operator.key").write_text(new_key())
    told = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "helper", *command[1:4], str(key_file), *command[5:], "--json"],
        capture_output=True,
        check=True,
        text=True,
    )
    answer = json.loads(told.stdout)
    assert answer["status"] == "pending"
    waiting = (await stage.pending())[answer["operator_address"]]
    assert (waiting["moniker"], waiting["url"]) == ("it's one; command $HOME", "https://helper.example.org")


async def test_a_pasted_signature_of_another_text_is_refused_with_the_reason(visitor: Visitor, stage: Stage) -> None:
    visitor.expected.append("401")
    await visitor.open("/join")
    await fill_in(visitor, "forged")
    await visitor.page.get_by_role("radio", name="Key tool").check()
    key = new_key()
    signer = await _tool(visitor, key, "")
    await visitor.page.get_by_label("Operator address").fill(signer["address"])
    await visitor.press("Show the text")
    printed = (await _tool(visitor, key, "another text"))["printed"]
    await visitor.page.get_by_label("Public key").fill(printed["pub_key"])
    await visitor.page.get_by_label("Signature").fill(printed["signature"])
    await visitor.press("Send the registration")
    await visitor.shows("Signature: does not verify.")
    assert "forged" not in [one["moniker"] for one in (await stage.pending()).values()]


async def _tool(visitor: Visitor, key: str, text: str) -> dict[str, Any]:
    """What the chain's key tool would say of a text: signed by the wallet's code, in a tab of its own."""
    tab = await visitor.page.context.new_page()
    try:
        other = Visitor(tab, visitor.origin, visitor.elsewhere)
        await other.wallet(keys=[key], chains={"any": "sv"})
        await other.open("/favicon.ico")
        address = await tab.evaluate("keplr.getKey('any').then(({ bech32Address }) => bech32Address)")
        signed = await tab.evaluate("([signer, text]) => keplr.signArbitrary('any', signer, text)", [address, text])
    finally:
        await tab.close()
    printed = {"pub_key": signed["pub_key"]["value"], "signature": signed["signature"]}
    assert len(base64.b64decode(printed["pub_key"])) == 33
    return {"address": address, "printed": printed}


@pytest.mark.parametrize(
    ("conduct", "told"),
    [
        ({"locked": True}, ("Keplr is locked", "unlock it with your password")),
        ({"keys": []}, ("Keplr has no account yet", "import your validator's operator key")),
        ({"refuses": ["experimentalSuggestChain"]}, ("The request was refused in Keplr", "Nothing was signed or sent")),
        ({"refuses": ["enable"]}, ("The request was refused in Keplr", "approve the request")),
        ({"chains": {"svote-devnet-1": "other"}}, ("Keplr does not know this chain", "remove it there first")),
    ],
    ids=["locked", "empty", "chain-refused", "access-refused", "another-chain"],
)
async def test_what_keeps_keplr_from_connecting_is_told_with_what_to_do(
    visitor: Visitor, conduct: dict[str, Any], told: tuple[str, str]
) -> None:
    await visitor.wallet(**conduct)
    await visitor.open("/join")
    await fill_in(visitor, "node")
    await visitor.press("Connect Keplr")
    for text in told:
        await visitor.shows(text)
    # and once it is put right, the same button goes on
    await visitor.page.evaluate(
        "Object.assign(wallet.conduct, { locked: false, refuses: [], keys: ['44'.repeat(32)], chains: {} })"
    )
    await visitor.press("Connect Keplr")
    await visitor.shows("Connected as")


async def test_a_signature_that_is_refused_sends_nothing(visitor: Visitor, stage: Stage) -> None:
    await visitor.wallet(refuses=["signArbitrary"])
    await visitor.open("/join")
    claim = await review(visitor, "refusing")
    await visitor.press("Sign with Keplr and send")
    await visitor.shows("The request was refused in Keplr")
    assert not [url for url in visitor.asked if url.endswith("/api/register-validator")]
    await visitor.page.evaluate("wallet.conduct.refuses = []")
    await visitor.press("Sign with Keplr and send")
    await visitor.heading("Waiting to be bonded")
    assert claim["operator_address"] == (await visitor.wallet_asked("signArbitrary"))[-1][1]


@pytest.mark.parametrize("when", ["before", "while"])
async def test_an_account_that_is_switched_signs_for_nobody(visitor: Visitor, when: str) -> None:
    await visitor.wallet(switchesTo=1 if when == "while" else None)
    await visitor.open("/join")
    claim = await review(visitor, "switching")
    if when == "before":
        await visitor.page.evaluate("wallet.choose(1)")
    else:
        await visitor.press("Sign with Keplr and send")
    await visitor.shows("The account was switched in Keplr")
    await expect(visitor.page.get_by_role("group", name="text to sign")).to_have_count(0)
    assert not [url for url in visitor.asked if url.endswith("/api/register-validator")]
    again = await review(visitor, "switching")
    assert again["operator_address"] != claim["operator_address"], "the text is the new account's"


@pytest.mark.parametrize(("off", "word"), [(-600, "behind"), (600, "ahead of")])
async def test_a_wrong_clock_is_told_of_and_the_text_has_the_servers_time(
    visitor: Visitor, stage: Stage, off: int, word: str
) -> None:
    await visitor.page.clock.install(time=time.time() + off)
    await visitor.wallet()
    await visitor.open("/join")
    warning = await visitor.shows("This computer's clock is wrong")
    told = await warning.locator("xpath=..").inner_text()
    minutes = int(told.split("It is ")[1].split(" min")[0])
    assert abs(minutes - 10) <= 1
    assert f"{word} the server's" in told
    claim = await review(visitor, "late")
    assert abs(claim["timestamp"] - time.time()) < 30
    await visitor.press("Sign with Keplr and send")
    await visitor.heading("Waiting to be bonded")
    assert (await stage.pending())[claim["operator_address"]]["moniker"] == "late"


async def test_details_that_would_be_refused_are_never_signed(visitor: Visitor) -> None:
    await visitor.wallet()
    await visitor.open("/join")
    await fill_in(visitor, "node", "http://127.0.0.1:8090")
    await visitor.shows("Must begin with https://")
    await visitor.press("Connect Keplr")
    await visitor.shows("Connected as")
    await visitor.press("Show the text")
    await expect(visitor.page.get_by_label("Helper URL")).to_be_focused()
    assert await visitor.wallet_asked("signArbitrary") == []
