"""Rounds and totals for `GET /api/rounds`, read from the nodes in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import orjson
import structlog

from admin.api_models import AuditResponse, RoundResponse
from helper.chain.chain_data import OptionTotal, Round, RoundStatus
from helper.chain.node_pool import ReadOnlyNodePool
from helper.chain.rest_client import ChainClient
from helper.clock import Clock
from helper.core.log_limits import LoggedProblem
from helper.errors import ChainError, ChainResponseError, ChainUnavailable
from helper.operations.archived_objects import digest_result

log = structlog.get_logger("helper.admin")

MAX_ROUNDS: Final = 200
"""Maximum number of rounds in the response, newest first."""
MAX_LIST_BYTES: Final = 2 << 20
"""Maximum size of the response; a round that does not fit is omitted."""
REFRESH_SECONDS: Final = 10.0
"""Seconds between two refreshes."""
INITIAL_REFRESH_SECONDS: Final = 1.0
"""Seconds between two refreshes until the first one succeeds."""
MAX_TOTALS_PER_REFRESH: Final = 32
"""Maximum number of rounds whose totals one refresh reads; the next refresh continues with the others."""
MAX_CONCURRENT_QUERIES: Final = 4
"""Maximum number of concurrent queries for totals."""

GetAudit = Callable[[bytes, str | None], AuditResponse | None]
"""Returns the helper's audit of a round, given `digest_result` of what is shown of it; None without one."""

RoundTotals = Mapping[tuple[int, int], int]
"""Totals of a round by proposal and option. The total of an absent option is 0."""


class RoundsView:
    """All rounds with their proposals, and the totals of finalized rounds.

    Nodes are queried by `run` in the background. Reading `body` sends no queries. The totals of a finalized round are
    read only once.

    Args:
        chain: the nodes.
        clock: the time.
        report_keys: called after each refresh with the election authorities' keys by round id.
        get_audit: returns the audit of a finalized round.
    """

    def __init__(
        self,
        chain: ReadOnlyNodePool,
        *,
        clock: Clock,
        report_keys: Callable[[Mapping[bytes, bytes]], None],
        get_audit: GetAudit = lambda *_: None,
    ) -> None:
        self._chain = chain
        self._report_keys = report_keys
        self._get_audit = get_audit
        self._clock = clock
        self._totals: dict[bytes, RoundTotals] = {}
        # finalized rounds without totals, in the order in which they are read
        self._missing_totals: list[Round] = []
        self._problem = LoggedProblem()
        self.body: bytes | None = None
        """Response body, see `admin.api_models.RoundsResponse`; None until the first refresh succeeds."""

    async def run(self) -> None:
        """Refresh until cancelled."""
        while True:
            await self.refresh()
            await self._clock.sleep(INITIAL_REFRESH_SECONDS if self.body is None else REFRESH_SECONDS)

    async def refresh(self) -> None:
        """Read the rounds, then missing totals. On failure, retain the previous data."""
        try:
            listed = (await self._chain.call(lambda client: client.rounds())).rounds
            self._report_keys({known.round_id: known.authority_key for known in listed if known.authority_key})
            rounds = await self._publish(listed)
            served = {known.round_id for known in rounds}
            self._totals = {round_id: totals for round_id, totals in self._totals.items() if round_id in served}
            self._queue_missing(rounds)
            if await self._read_missing():
                await self._publish(rounds)
        except ChainError as error:
            # Immediately after the start, no node is in sync yet.
            if self.body is not None or isinstance(error, ChainResponseError):
                self._report_problem(str(error))
            return
        self._report_problem(
            f"totals of {len(self._missing_totals)} rounds are missing" if self._missing_totals else ""
        )

    async def _publish(self, listed: Iterable[Round]) -> Sequence[Round]:
        """Set the response. Returns the rounds in it, newest first."""
        rounds, self.body = await asyncio.to_thread(_prepare_response, listed, self._totals, self._get_audit)
        return rounds

    def _queue_missing(self, rounds: Iterable[Round]) -> None:
        """Append newly finalized rounds. The queue's order ensures that each round is tried."""
        missing = {
            known.round_id: known
            for known in rounds
            if known.status == RoundStatus.FINALIZED and known.round_id not in self._totals
        }
        queued = [missing.pop(known.round_id) for known in self._missing_totals if known.round_id in missing]
        self._missing_totals = [*queued, *missing.values()]

    async def _read_missing(self) -> int:
        """Read up to `MAX_TOTALS_PER_REFRESH` missing totals and return their number.

        Stops when no node responds.
        """
        before = len(self._totals)
        batch, rest = self._missing_totals[:MAX_TOTALS_PER_REFRESH], self._missing_totals[MAX_TOTALS_PER_REFRESH:]
        for start in range(0, len(batch), MAX_CONCURRENT_QUERIES):
            group = batch[start : start + MAX_CONCURRENT_QUERIES]
            if not any(await asyncio.gather(*map(self._read_totals, group))):
                break
        unread = [known for known in batch if known.round_id not in self._totals]
        self._missing_totals = [*rest, *unread]
        return len(self._totals) - before

    async def _read_totals(self, known: Round) -> bool:
        """Read the totals of a round. Returns whether a node responded."""

        async def read(client: ChainClient) -> list[OptionTotal]:
            # A node that is one block behind has no totals yet; its response is that of a round without votes.
            reported = await client.round(known.round_id)
            if reported is None or reported.status is not RoundStatus.FINALIZED:
                raise ChainUnavailable("the node does not report the round as finalized")
            return await client.totals(known.round_id)

        try:
            totals = await self._chain.call(read)
        except ChainResponseError:
            return True
        except ChainError:
            return False
        # Drop totals of unknown options: a response may contain millions. The known ones are bounded by MAX_LIST_BYTES.
        options = {(proposal.id, option) for proposal in known.proposals for option in proposal.options}
        reported_totals = ((total.proposal_id, total.option, total.value) for total in totals)
        self._totals[known.round_id] = {
            (proposal, option): value for proposal, option, value in reported_totals if (proposal, option) in options
        }
        return True

    def _report_problem(self, problem: str) -> None:
        """Log when the rounds become unavailable or available again."""
        if not problem:
            if self._problem.clear():
                log.info("rounds_available")
        elif self._problem.note():
            log.info("rounds_unavailable", reason=problem)


def _prepare_response(
    listed: Iterable[Round], totals: Mapping[bytes, RoundTotals], get_audit: GetAudit
) -> tuple[Sequence[Round], bytes]:
    """The newest `MAX_ROUNDS` rounds, without those that would exceed `MAX_LIST_BYTES`."""
    rounds, entries = list[Round](), list[bytes]()
    size = len(b'{"rounds":[]}')
    for known in sorted(listed, key=lambda known: -known.created_at_height)[:MAX_ROUNDS]:
        entry = orjson.dumps(_round_response(known, totals.get(known.round_id), get_audit))
        if size + len(entry) + 1 > MAX_LIST_BYTES:
            continue
        size += len(entry) + 1  # with a comma
        rounds.append(known)
        entries.append(entry)
    return rounds, b'{"rounds":[' + b",".join(entries) + b"]}"


def _round_response(known: Round, totals: RoundTotals | None, get_audit: GetAudit) -> RoundResponse:
    if known.status != RoundStatus.FINALIZED:
        totals = None
    shown = None if totals is None else digest_result(known, totals)
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
                        "index": option,
                        "label": label,
                        "total": None if totals is None else totals.get((proposal.id, option), 0),
                    }
                    for option, label in zip(proposal.options, proposal.labels, strict=True)
                ],
            }
            for proposal in known.proposals
        ],
        "audit": get_audit(known.round_id, shown) if known.status == RoundStatus.FINALIZED else None,
    }
