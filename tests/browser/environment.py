"""Environment of browser tests and screenshots: a chain and a helper with data for every view."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from admin import account_keys
from admin.registration_request import validator_address
from devnet import ballot
from devnet.wallet import CastVote, Wallet
from tests.support.devnet import DevChain
from tests.support.harness import HelperProcess, run_chain, run_helper, unix_time_in
from tests.support.process import find_free_port
from tests.unit.admin.fixtures import sign_registration

TOKEN = "operators-only"
PIR_LAYOUT = {"pir_depth": 19, "tier0_layers": 12, "tier1_layers": 7, "poly_len": 4096}
PROPOSALS = (
    {"title": "Fund the wallet's second audit", "options": ["Support", "Oppose", "Abstain"]},
    {"title": "Raise the quorum to a third", "options": ["Support", "Oppose"]},
)
PAST_ROUND_SECONDS = 110
"""Length of the past round.

The chain's clock is advanced to its end, so it must be below the permitted clock skew.
"""
OPEN_ROUND_SECONDS = 3 * 86_400
WAITING_MONIKERS = ("Höhle <&> node", "Orchard Rising", "Ελιά", "north-star-07")
"""Names of the pending validators."""


@dataclass(frozen=True)
class BrowserEnvironment:
    """A running chain and helper.

    Attributes:
        open_round_id: an active round; the shares of one vote are due in a few minutes.
        silent: URL of a published vote server that does not run.
    """

    chain: DevChain
    helper: HelperProcess
    http: httpx.AsyncClient
    open_round_id: bytes
    silent: str

    @property
    def url(self) -> str:
        return self.helper.url

    @property
    def vote_server_urls(self) -> tuple[str, ...]:
        """The external addresses that the page may request: the published vote servers' status."""
        return (f"{self.silent}/shielded-vote/v1/status",)

    async def cast_vote(
        self, times: Sequence[int], *, proposal: int = 1, decision: int = 0, weight: int = 100
    ) -> CastVote:
        """Cast a vote in the open round and post its shares with these times."""
        return await _cast_vote(self.chain, self.helper, self.open_round_id, times, proposal, decision, weight)

    async def pending_validators(self) -> dict[str, dict[str, Any]]:
        response = await self.http.get(f"{self.url}/api/pending-validators")
        response.raise_for_status()
        return {entry["operator_address"]: entry for entry in response.json()}

    async def wait_for_pending(self, account: str) -> dict[str, Any]:
        """Wait until a validator is on the list, which the helper publishes once per second, and return its entry."""
        async with self.helper.timeout("publishes a pending validator"):
            while (entry := (await self.pending_validators()).get(account)) is None:
                await asyncio.sleep(0.1)
        return entry

    async def bond_validator(self, account: str) -> None:
        await self.chain.post(
            "/devnet/validators", {"operator_address": validator_address(account), "moniker": "bonded"}
        )


@contextlib.asynccontextmanager
async def run_environment() -> AsyncIterator[BrowserEnvironment]:
    """Start the environment. Stops it at the end."""
    with tempfile.TemporaryDirectory(prefix="svote-stage-") as name:
        directory = Path(name)
        async with run_chain(directory, "--block-seconds", "0.3", "--stand-in-proofs") as chain:
            rpc, config_url = chain.ready_data["rpc"], f"{chain.url}/devnet/voting-config?wait=9"
            sections: dict[str, Any] = {
                "admin": {"db_path": str(directory / "admin.db"), "config_url": config_url},
                "ui": {"enable": True, "chain_denom": "usvote", "chain_rest": chain.url, "chain_rpc": rpc},
                "operator": {"token": TOKEN, "socket": str(directory / "helper.sock")},
            }
            async with run_helper(directory, chain.http, chain, until="listening", **sections) as helper:
                yield await _set_up(chain, helper, chain.http)


async def _set_up(chain: DevChain, helper: HelperProcess, http: httpx.AsyncClient) -> BrowserEnvironment:
    silent = f"http://127.0.0.1:{find_free_port()}"
    # The helper fetches the configuration at startup and then once per minute.
    await chain.post("/devnet/voting-config", _publish_voting_config(helper.url, silent))
    await helper.wait_until_ready()
    for number, moniker in enumerate(WAITING_MONIKERS):
        url = "" if number == 3 else f"https://vote-{number}.example.org"
        key = bytes([number + 1]) * 32
        registration = sign_registration(key, url=url, moniker=moniker, timestamp=int(time.time()))
        response = await http.post(f"{helper.url}/api/register-validator", json=registration)
        response.raise_for_status()
    await _create_past_round(chain, helper, http)
    opened = await chain.open_round(OPEN_ROUND_SECONDS, proposals=list(PROPOSALS))
    stage = BrowserEnvironment(chain, helper, http, opened, silent)
    rng = random.Random(5)
    await stage.cast_vote(ballot.spread_times(time.time() + 900, 2400, rng))
    return stage


def _publish_voting_config(helper: str, silent: str) -> dict[str, Any]:
    operator, _, _ = account_keys.sign_data(b"", bytes([1]) * 32)
    return {
        "version": "7",
        "snapshot_height": 3_214_500,
        "vote_servers": [
            {"url": helper, "label": "This helper", "operator_address": operator},
            {"url": silent, "label": "Harbour"},
            {"url": "http://192.0.2.7:8090", "label": "Attic"},
        ],
        "pir_endpoints": [{"url": "https://pir.example.org", "label": "Lookups"}],
        "pir_layout": PIR_LAYOUT,
        "min_wallet": "2.1.0",
    }


async def _create_past_round(chain: DevChain, helper: HelperProcess, http: httpx.AsyncClient) -> None:
    """Create a finalized round with a tally, of one confirmed vote, and a vote that was too late."""
    round_id = await chain.open_round(PAST_ROUND_SECONDS, proposals=list(PROPOSALS))
    end = int((await chain.get(f"/shielded-vote/v1/round/{round_id.hex()}"))["round"]["vote_end_time"])
    counted = await _cast_vote(chain, helper, round_id, ballot.immediate_times(), 1, 0, 1_260)
    # A due time equal to the end is accepted but cannot be confirmed.
    await _cast_vote(chain, helper, round_id, ballot.same_second_times(end), 2, 1, 20)
    await helper.wait_until_confirmed(counted)
    await chain.post("/devnet/mine", {"blocks": 1, "advance_seconds": max(0.0, end - time.time())})
    async with helper.timeout("has seen the round's tally"):
        while (await chain.get(f"/shielded-vote/v1/round/{round_id.hex()}"))["round"]["status"] != 3:
            await asyncio.sleep(0.1)
        while (await http.get(f"{helper.url}/shielded-vote/v1/queue-status")).json()[round_id.hex()]["failed"] == 0:
            await asyncio.sleep(0.1)


async def _cast_vote(
    chain: DevChain,
    helper: HelperProcess,
    round_id: bytes,
    times: Sequence[int],
    proposal: int,
    decision: int,
    weight: int,
) -> CastVote:
    async with Wallet(chain.url, [helper.url], mode="parallel") as wallet:
        return await wallet.cast_vote(round_id, proposal, decision, weight=weight, times=times)


def times_within(seconds: int) -> list[int]:
    """Return 16 due times over this many seconds from the next second on."""
    start = unix_time_in(1)
    return [start + index * seconds // ballot.SHARE_COUNT for index in range(ballot.SHARE_COUNT)]
