"""The chain's rounds for the page: asked of the nodes at most every few seconds, totals of a finished round once."""

from __future__ import annotations

from typing import Any, Final

import structlog

from admin.cached import CachedQuery
from admin.registry import Chain
from helper.chain.round_listing import ListedRound, Total
from helper.clock import Clock
from helper.errors import ChainAnswerError, ChainError, ChainUnavailable

log = structlog.get_logger("helper.admin")

MOST: Final = 200
"""Rounds that the page gets, the newest first."""
FINALIZED: Final = 3


class RoundsView:
    """All rounds with their proposals, and totals where there are any."""

    def __init__(self, chain: Chain, *, clock: Clock) -> None:
        self._chain = chain
        self._ask_rarely = CachedQuery(self._ask, clock=clock)
        self._rounds: list[ListedRound] = []
        self._totals: dict[bytes, dict[tuple[int, int], int]] = {}

    async def as_json(self) -> list[dict[str, Any]]:
        """The newest rounds first; those known when no node can be asked.

        Raises:
            ChainError: no node could be asked, and none ever was.
        """
        await self._ask_rarely()
        return [self._shown(known) for known in self._rounds]

    async def _ask(self) -> None:
        try:
            found = await self._chain.call(lambda client: client.listing())
        except ChainError:
            if not self._rounds:
                raise
            return
        self._rounds = sorted(found, key=lambda known: -known.created_at_height)[:MOST]
        try:
            for known in self._rounds:
                if known.status == FINALIZED and known.round_id not in self._totals:
                    await self._ask_totals(known.round_id)
        except ChainUnavailable as error:
            log.info("not all totals could be asked for", error=str(error))

    async def _ask_totals(self, round_id: bytes) -> None:
        try:
            totals: list[Total] = await self._chain.call(lambda client: client.totals(round_id))
        except ChainAnswerError as error:
            log.info("a round's totals are not to be had", error=str(error))
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
