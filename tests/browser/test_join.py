"""Validator registration in a real browser, with a wallet that signs."""

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

from tests.browser.browser_tab import BrowserTab, create_private_key
from tests.browser.environment import BrowserEnvironment


async def fill_in_form(tab: BrowserTab, moniker: str, url: str = "https://helper.example.org") -> None:
    await tab.page.get_by_label("Name", exact=True).fill(moniker)
    await tab.page.get_by_label("Helper URL").fill(url)


async def open_review(tab: BrowserTab, moniker: str) -> dict[str, Any]:
    """Fill in the form, connect, and read the text to be signed."""
    await fill_in_form(tab, moniker)
    await tab.press_button("Connect Keplr")
    await tab.wait_for_text("Connected as")
    await tab.press_button("Show the text")
    text = await tab.page.get_by_role("group", name="text to sign").inner_text()
    claim: dict[str, Any] = json.loads(text)
    return claim


async def test_registration_is_pending_until_validator_bonds(tab: BrowserTab, environment: BrowserEnvironment) -> None:
    await tab.page.clock.install()
    await tab.install_wallet()
    await tab.open_page("/join")
    claim = await open_review(tab, 'Höhle <b>&</b> "quoted" 🗳️')
    assert abs(claim["timestamp"] - time.time()) < 30
    assert await tab.wallet_requests("signArbitrary") == [], "nothing is signed before the text was shown"
    await tab.press_button("Sign with Keplr and send")
    await tab.wait_for_heading("Waiting to be bonded")
    await tab.wait_for_text("Expires in")
    (signed,) = await tab.wallet_requests("signArbitrary")
    assert signed[1:] == [claim["operator_address"], json.dumps(claim, ensure_ascii=False, separators=(",", ":"))]

    waiting = await environment.wait_for_pending(claim["operator_address"])
    assert (waiting["moniker"], waiting["url"]) == (claim["moniker"], claim["url"])
    await tab.page.get_by_role("link", name="Show pending validators").click()
    row = tab.page.get_by_role("row", name=claim["moniker"])
    await row.wait_for()

    await environment.bond_validator(claim["operator_address"])
    async with environment.helper.timeout("sees the validator bonded"):
        while claim["operator_address"] in await environment.pending_validators():
            await asyncio.sleep(0.2)
    await tab.page.clock.fast_forward("00:10")  # the view polls automatically
    await expect(row).to_have_count(0)

    await tab.page.get_by_role("navigation").get_by_role("link", name="Join").click()
    await open_review(tab, "bonded by now")
    await tab.press_button("Sign with Keplr and send")
    await tab.wait_for_heading("Registered")


async def test_join_suggests_chain_from_node_info(tab: BrowserTab, environment: BrowserEnvironment) -> None:
    await tab.install_wallet(lateMs=300)
    await tab.open_page("/join")
    await fill_in_form(tab, "node")
    await tab.press_button("Connect Keplr")
    await tab.wait_for_text("Connected as")
    ((info,),) = await tab.wallet_requests("experimentalSuggestChain")
    node = await environment.chain.get("/cosmos/base/tendermint/v1beta1/node_info")
    assert info["chainId"] == node["default_node_info"]["network"]
    assert (info["rest"], info["rpc"]) == (environment.chain.url, environment.chain.ready_data["rpc"])
    assert info["bech32Config"]["bech32PrefixAccAddr"] == "sv"
    assert info["stakeCurrency"] == {"coinDenom": "SVOTE", "coinMinimalDenom": "usvote", "coinDecimals": 6}


async def test_join_without_keplr_shows_command_and_form(tab: BrowserTab, environment: BrowserEnvironment) -> None:
    tab.expected_messages.append("401")
    await tab.open_page("/join")
    await fill_in_form(tab, "no wallet's node")
    await tab.press_button("Connect Keplr")
    await tab.wait_for_text("Keplr was not found in this browser")
    await tab.page.get_by_role("radio", name="Key tool").check()
    key = create_private_key()
    signer = await _sign_with_key_tool(tab, key, "")
    await tab.page.get_by_label("Operator address").fill(signer["address"])
    await tab.press_button("Show the text")
    text = await tab.page.get_by_role("group", name="text to sign").inner_text()
    command = tab.page.get_by_role("group", name="command to sign")
    await expect(command).to_contain_text('svoted sign-arbitrary \'{"operator_address":')
    other = (await _sign_with_key_tool(tab, key, "another text"))["printed"]
    await tab.page.get_by_label("Public key").fill(other["pub_key"])
    await tab.page.get_by_label("Signature").fill(other["signature"])
    await tab.press_button("Send the registration")
    await tab.wait_for_text("Signature: does not verify.")
    assert signer["address"] not in await environment.pending_validators()
    # The output of the tool is one line of JSON with signature and public key, pasted unchanged.
    response = await _sign_with_key_tool(tab, key, text)
    await tab.page.get_by_label("Public key").fill(json.dumps(response["printed"]))
    await tab.press_button("Send the registration")
    await tab.wait_for_heading("Waiting to be bonded")
    assert (await environment.wait_for_pending(signer["address"]))["moniker"] == "no wallet's node"


async def test_join_shown_command_registers_validator(
    tab: BrowserTab, environment: BrowserEnvironment, tmp_path: Path
) -> None:
    await tab.open_page("/join")
    await fill_in_form(tab, "it's one; command $HOME")
    await tab.page.get_by_role("radio", name="One command").check()
    command_text = await tab.page.get_by_role("group", name="command to register").inner_text()
    command = shlex.split(command_text)
    assert command[:5] == ["svote-helper", "admin", "register", "--key-file", "KEY"]
    (key_file := tmp_path / "operator.key").write_text(create_private_key())
    completed = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "helper", *command[1:4], str(key_file), *command[5:], "--json"],
        capture_output=True,
        check=True,
        text=True,
    )
    response = json.loads(completed.stdout)
    assert response["status"] == "pending"
    waiting = await environment.wait_for_pending(response["operator_address"])
    assert (waiting["moniker"], waiting["url"]) == ("it's one; command $HOME", "https://helper.example.org")


async def _sign_with_key_tool(tab: BrowserTab, key: str, text: str) -> dict[str, Any]:
    """Return the chain key tool's output for a text, signed by the wallet's code in a separate tab."""
    page = await tab.page.context.new_page()
    try:
        other = BrowserTab(page, tab.origin, tab.allowed_urls)
        await other.install_wallet(keys=[key], chains={"any": "sv"})
        await other.open_page("/favicon.ico")
        address = await page.evaluate("keplr.getKey('any').then(({ bech32Address }) => bech32Address)")
        signed = await page.evaluate("([signer, text]) => keplr.signArbitrary('any', signer, text)", [address, text])
    finally:
        await page.close()
    printed = {"pub_key": signed["pub_key"]["value"], "signature": signed["signature"]}
    assert len(base64.b64decode(printed["pub_key"])) == 33
    return {"address": address, "printed": printed}


@pytest.mark.parametrize(
    ("conduct", "expected_texts"),
    [
        ({"locked": True}, ("Keplr is locked", "unlock it with your password")),
        ({"keys": []}, ("Keplr has no account yet", "import your validator's operator key")),
        ({"refuses": ["experimentalSuggestChain"]}, ("The request was refused in Keplr", "Nothing was signed or sent")),
        ({"refuses": ["enable"]}, ("The request was refused in Keplr", "approve the request")),
        ({"chains": {"svote-devnet-1": "other"}}, ("Keplr does not know this chain", "remove it there first")),
    ],
    ids=["locked", "empty", "chain-refused", "access-refused", "another-chain"],
)
async def test_join_keplr_connection_error_shows_advice(
    tab: BrowserTab, conduct: dict[str, Any], expected_texts: tuple[str, str]
) -> None:
    await tab.install_wallet(**conduct)
    await tab.open_page("/join")
    await fill_in_form(tab, "node")
    await tab.press_button("Connect Keplr")
    for text in expected_texts:
        await tab.wait_for_text(text)
    # After the correction, the same button continues.
    await tab.page.evaluate(
        "Object.assign(wallet.conduct, { locked: false, refuses: [], keys: ['44'.repeat(32)], chains: {} })"
    )
    await tab.press_button("Connect Keplr")
    await tab.wait_for_text("Connected as")


async def test_join_rejected_signature_sends_nothing(tab: BrowserTab, environment: BrowserEnvironment) -> None:
    await tab.install_wallet(refuses=["signArbitrary"])
    await tab.open_page("/join")
    claim = await open_review(tab, "refusing")
    await tab.press_button("Sign with Keplr and send")
    await tab.wait_for_text("The request was refused in Keplr")
    assert not [url for url in tab.requested_urls if url.endswith("/api/register-validator")]
    await tab.page.evaluate("wallet.conduct.refuses = []")
    await tab.press_button("Sign with Keplr and send")
    await tab.wait_for_heading("Waiting to be bonded")
    assert claim["operator_address"] == (await tab.wallet_requests("signArbitrary"))[-1][1]


@pytest.mark.parametrize("when", ["before", "while"])
async def test_join_switched_account_sends_nothing(tab: BrowserTab, when: str) -> None:
    await tab.install_wallet(switchesTo=1 if when == "while" else None)
    await tab.open_page("/join")
    claim = await open_review(tab, "switching")
    if when == "before":
        await tab.page.evaluate("wallet.choose(1)")
    else:
        await tab.press_button("Sign with Keplr and send")
    await tab.wait_for_text("The account was switched in Keplr")
    await expect(tab.page.get_by_role("group", name="text to sign")).to_have_count(0)
    assert not [url for url in tab.requested_urls if url.endswith("/api/register-validator")]
    again = await open_review(tab, "switching")
    assert again["operator_address"] != claim["operator_address"], "the text is for the new account"


@pytest.mark.parametrize(("offset", "direction"), [(-600, "behind"), (600, "ahead of")])
async def test_join_wrong_clock_is_reported_and_server_time_used(
    tab: BrowserTab, environment: BrowserEnvironment, offset: int, direction: str
) -> None:
    await tab.page.clock.install(time=time.time() + offset)
    await tab.install_wallet()
    await tab.open_page("/join")
    warning = await tab.wait_for_text("This computer's clock is wrong")
    message = await warning.locator("xpath=..").inner_text()
    minutes = int(message.split("It is ")[1].split(" min")[0])
    assert abs(minutes - 10) <= 1
    assert f"{direction} the server's" in message
    claim = await open_review(tab, "late")
    assert abs(claim["timestamp"] - time.time()) < 30
    await tab.press_button("Sign with Keplr and send")
    await tab.wait_for_heading("Waiting to be bonded")
    assert (await environment.wait_for_pending(claim["operator_address"]))["moniker"] == "late"


async def test_join_invalid_details_are_not_signed(tab: BrowserTab) -> None:
    await tab.install_wallet()
    await tab.open_page("/join")
    await fill_in_form(tab, "node", "http://127.0.0.1:8090")
    await tab.wait_for_text("Must begin with https://")
    await tab.press_button("Connect Keplr")
    await tab.wait_for_text("Connected as")
    await tab.press_button("Show the text")
    await expect(tab.page.get_by_label("Helper URL")).to_be_focused()
    assert await tab.wallet_requests("signArbitrary") == []
