"""The chain's rounds for the page: asked of the nodes at most every few seconds, totals of a finished round once."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import structlog

from admin.registry import Chain
from helper.chain.listing import ListedRound, Total
from helper.clock import Clock
from helper.errors import ChainError

log = structlog.get_logger("helper.admin")

LOOK_AGAIN: Final = 5.0
"""Seconds for which the nodes are not asked again."""
MOST: Final = 200
"""Rounds that the page gets, the newest first."""
FINALIZED: Final = 3


class RoundsView:
    """All rounds with their proposals, and totals where there are any."""

    def __init__(self, chain: Chain, *, clock: Clock) -> None:
        self._chain = chain
        self._clock = clock
        self._asking = asyncio.Lock()
        self._asked_at = float("-inf")
        self._rounds: list[ListedRound] = []
        self._totals: dict[bytes, dict[tuple[int, int], int]] = {}

    async def as_json(self) -> list[dict[str, Any]]:
        """The newest rounds first; those known when no node can be asked.

        Raises:
            ChainError: no node could be asked, and none ever was.
        """
        async with self._asking:
            if self._clock.monotonic() - self._asked_at >= LOOK_AGAIN:
                await self._ask()
        newest = sorted(self._rounds, key=lambda known: -known.created_at_height)[:MOST]
        return [self._shown(known) for known in newest]

    async def _ask(self) -> None:
        try:
            self._rounds = await self._chain.call(lambda client: client.listing())
            self._asked_at = self._clock.monotonic()
        except ChainError:
            if not self._rounds:
                raise
            return
        for known in self._rounds:
            if known.status == FINALIZED and known.round_id not in self._totals:
                await self._ask_totals(known.round_id)

    async def _ask_totals(self, round_id: bytes) -> None:
        try:
            totals: list[Total] = await self._chain.call(lambda client: client.totals(round_id))
        except ChainError as error:
            log.info("a round's totals could not be asked for", error=str(error))
            return
        self._totals[round_id] = {(total.proposal_id, total.option): total.value for total in totals}

    def _shown(self, known: ListedRound) -> dict[str, Any]:
        totals = self._totals.get(known.round_id) if known.status == FINALIZED else None
        return {
            "round_id": known.round_id.hex(),
            "status": known.status,
            "vote_end_time": known.vote_end_time,
            "proposals": [
                {
                    "id": proposal.id,
                    "title": proposal.title,
                    "options": [
                        {
                            "index": option.index,
                            "label": option.label,
                            "total": None if totals is None else totals.get((proposal.id, option.index), 0),
                        }
                        for option in proposal.options
                    ],
                }
                for proposal in known.proposals
            ],
        }
