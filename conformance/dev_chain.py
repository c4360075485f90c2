"""The control routes of a dev chain: rounds, votes, request log and reveals. They are not in the request log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from helper.errors import ChainUnavailable
from helper.runtime.network_clients import create_async_client

TIMEOUT_SECONDS: Final = 30.0
_LEAVES_AHEAD: Final = 5000
"""Leaves by which a position exceeds every height of the run, so that a position in a request is unambiguous."""

PROPOSALS: Final = [{"title": f"Proposal {number}", "options": ["Support", "Oppose"]} for number in (1, 2)]
"""Proposals 1 and 2 with the options 0 and 1."""


@dataclass(frozen=True, slots=True)
class ChainRound:
    """A round of the dev chain: id, election key, and end in Unix seconds."""

    round_id: bytes
    ea_pk: bytes = field(repr=False)
    end: int


@dataclass(frozen=True, slots=True)
class Reveal:
    """A reveal that counted: ciphertext c1‖c2, choice, and height and time (Unix seconds) of its block."""

    nullifier: bytes
    enc_share: bytes = field(repr=False)
    proposal_id: int
    vote_decision: int
    height: int
    time: float


class DevChain:
    """Client of one dev chain.

    Args:
        url: REST URL of one of its nodes.

    Raises:
        ChainUnavailable: by every method, if the chain does not respond or refuses.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._http = create_async_client(timeout=TIMEOUT_SECONDS)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def height(self) -> int:
        """The newest block's height."""
        return int((await self._request("GET", "stats"))["height"])

    async def open_round(self, seconds: float) -> ChainRound:
        """Create an active round that ends in `seconds`."""
        created = await self._request("POST", "rounds", {"proposals": PROPOSALS, "seconds": seconds, "status": 1})
        await self.mine()
        round_id, ea_pk = (bytes.fromhex(created[name]) for name in ("vote_round_id", "ea_pk"))
        return ChainRound(round_id, ea_pk, int(created["vote_end_time"]))

    async def add_leaves(self, round_id: bytes) -> None:
        """Append leaves to a round's tree until positions exceed the heights of this run."""
        count = await self.height() + _LEAVES_AHEAD
        await self._request("POST", "delegate", {"round_id": round_id.hex(), "count": count})
        await self.mine()

    async def cast(self, round_id: bytes, commitments: list[bytes]) -> list[int]:
        """Cast votes in the next block. Returns the positions of their commitments."""
        sent = [
            await self._request(
                "POST", "cast", {"round_id": round_id.hex(), "vote_commitment": commitment.hex(), "proposal_id": 1}
            )
            for commitment in commitments
        ]
        await self.mine()
        included = [await self._request("GET", f"cast/{vote['tx_hash']}?wait=10") for vote in sent]
        if failed := next((vote["log"] for vote in included if vote["code"]), None):
            raise ChainUnavailable(f"{self.url}: a vote failed in its block: {failed}")
        return [int(vote["vc_position"]) for vote in included]

    async def end_round(self, round_id: bytes) -> None:
        """End a round now."""
        await self._request("POST", "rounds/end", {"round_id": round_id.hex()})
        await self.mine()

    async def reveal_elsewhere(self, reveal: dict[str, Any]) -> None:
        """Add a reveal to the next block, as if another helper had sent it."""
        await self._request("POST", "reveals", reveal)
        await self.mine()

    async def mine(self) -> None:
        """Produce a block now."""
        await self._request("POST", "mine", {"blocks": 1})

    async def reveals(self, round_id: bytes) -> list[Reveal]:
        """The reveals of a round that counted, in their order."""
        rows = (await self._request("GET", f"reveals/{round_id.hex()}"))["reveals"]
        return [
            Reveal(
                bytes.fromhex(row["nullifier"]),
                bytes.fromhex(row["enc_share"]),
                row["proposal_id"],
                row["vote_decision"],
                row["height"],
                row["time"],
            )
            for row in rows
        ]

    async def requests_after(self, seq: int) -> list[dict[str, Any]]:
        """The entries of the request log after this one, oldest first."""
        entries: list[dict[str, Any]] = []
        while True:
            after = entries[-1]["seq"] if entries else seq
            page = (await self._request("GET", f"requests?after={after}"))["requests"]
            if not page:
                return entries
            entries += page

    async def _request(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        try:
            response = await self._http.request(method, f"{self.url}/devnet/{path}", json=body)
            response.raise_for_status()
            result: dict[str, Any] = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise ChainUnavailable(
                f"the dev chain {self.url} does not respond to /devnet/{path.partition('?')[0]}: {error}",
                advice="Start one with `svote-helper devnet`, and point the helper under test at it.",
            ) from None
        return result
