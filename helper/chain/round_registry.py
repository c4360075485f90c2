"""Registry of the chain's voting rounds; decides whether a round is closed.

Each field of a round is what enough nodes list alike (`helper.chain.agreement`), at its first listing and at each
change. Only that is stored. A round that is not agreed yet is held in memory with what any node lists, so that its
shares are accepted and revealed: both are harmless if the node is false. Nothing is refused for good on its account, it
is never closed or purged, and it counts nowhere else.

A reported change that is not agreed takes no effect, and a due share is still revealed, because the chain refuses a
reveal outside the round, while a missed reveal is lost. Unless another node reports the known value, shares whose
validity depends on the difference wait.

A round is *frozen* while enough nodes omit it or list it with data that cannot be right: none of its shares is
accepted, revealed or purged. Other rounds are not affected.

A round is closed only by the chain: every block from its creation through its end was read, and enough nodes list it as
being tallied or finalized, or no longer list it or list it with a status that this version does not know. Otherwise it
would keep its witnesses for good (docs/decisions/0040-agreement-of-nodes.md).

A round that had ended when it was first agreed has no shares here. It is held in memory so that its shares are rejected
as posted to an inactive round, but it is never stored, closed, reported or purged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import structlog

from helper.chain.agreement import RoundFacts, Said, agreed_fact, agreed_height, agreed_height_at, agreed_round
from helper.chain.chain_data import ENDED_STATUSES, BlockHead, Proposal, Round, RoundStatus
from helper.chain.node import Node
from helper.chain.node_pool import NodePool
from helper.core.share import UNCONFIRMED_STATES
from helper.errors import ConfigError
from helper.store import blocks
from helper.store.ledger import Ledger, is_read
from helper.store.models import StoredRound
from helper.store.rounds import mark_closed, save_rounds
from helper.store.store import Store
from helper.store.table_rows import CHAIN_ID_KEY

MAX_PAST_ROUNDS: Final = 4096
"""Maximum number of rounds in memory that had ended when first listed, because a node can list any number of them."""
MAX_HELD_ROUNDS: Final = 64
"""Maximum number of rounds in memory that are not agreed yet, shared evenly by the nodes that list them."""

_EVENT_NAMES: Final = {"vote_end_time": "end", "status": "status", "proposals": "proposals"}
"""The fields of a round that may change, with their names in log events."""
_STATUS_GRACE_SECONDS: Final = 60
"""Seconds of chain time after a round's end in which nodes may legitimately differ about its status."""
_NOTHING_AGREED: Final = RoundFacts()
_OMITTED: Final = "no longer listed"


class RoundView(NamedTuple):
    """What is known of a round at one moment.

    Attributes:
        known: the round, None if no node lists it. A field that is not agreed is such that no share is missed.
        is_status_agreed: whether no other status is reported.
        are_proposals_agreed: whether no other proposals are reported.
        is_end_agreed: whether the end is agreed, and no node reports another one.
        latest_end: the latest end that is known or reported, in Unix seconds; 0 if there is none.
    """

    known: Round | None
    is_status_agreed: bool
    are_proposals_agreed: bool
    is_end_agreed: bool
    latest_end: int


class _Statement(NamedTuple):
    """What a node listed last.

    Attributes:
        sync: the number of the sync that requested it.
        height: the node's newest height before the request.
        unknown: why a listed round has a status that this version does not know.
    """

    sync: int
    height: int
    rounds: Mapping[bytes, Round]
    invalid: Mapping[bytes, str]
    unknown: Mapping[bytes, str]

    def problem(self, record: _Record) -> str | None:
        """Why the listing of a round that is not over cannot be right, or None. A node that is behind says nothing."""
        facts, listed = record.facts, self.rounds.get(record.round_id)
        if record.is_over or self.height < facts.height:
            return None
        if listed is not None:
            is_other = facts.created_at_height not in {None, listed.created_at_height}
            return "listed with a different created_at_height" if is_other else None
        may_be_omitted = not facts.is_complete or facts.status is RoundStatus.FINALIZED
        return self.unlisted(record.round_id) or (None if may_be_omitted else _OMITTED)

    def unlisted(self, round_id: bytes) -> str | None:
        """Why a listed round is not among the valid ones, None if the node does not list it."""
        return self.invalid.get(round_id) or self.unknown.get(round_id)


@dataclass(slots=True, eq=False)
class _Record:
    """A round that nodes list or the store contains.

    Attributes:
        end_height: an agreed height at or after the round's end, the lowest that is known; None before the end.
        agreed: the round as agreed; None until every field is agreed, and after the purge.
        known: the agreed round, or while it is not agreed, what any node lists; None if none does.
        listed_ends: the ends that nodes list while the round is not agreed.
        is_past: whether it had ended when it was first agreed; it is held in memory only.
        is_in_store: whether the store contained it when it was last read again.
        frozen: why none of its shares may be accepted, revealed or purged, None if they may.
        frozen_shares: number of its unconfirmed shares, 0 while it is not frozen.
        problem: what is wrong with the listings of nodes; "" if nothing is.
        unconfirmed: reported values, by field, that are not agreed and that no node contradicts.
        is_wait_logged: whether the missing agreement on its end was logged.
    """

    round_id: bytes
    facts: RoundFacts = _NOTHING_AGREED
    end_height: int | None = None
    agreed: Round | None = None
    known: Round | None = None
    listed_ends: tuple[int, ...] = ()
    is_past: bool = False
    is_closed: bool = False
    is_purged: bool = False
    is_in_store: bool = False
    frozen: str | None = None
    frozen_shares: int = 0
    problem: str = ""
    unconfirmed: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    is_wait_logged: bool = False

    @property
    def is_stored(self) -> bool:
        """Whether the round is agreed and stored."""
        return self.agreed is not None and not self.is_past

    @property
    def is_open(self) -> bool:
        """Whether the round is neither closed nor purged."""
        return not self.is_closed and not self.is_purged

    @property
    def is_over(self) -> bool:
        """Whether nothing that nodes list matters any more."""
        return self.is_past or not self.is_open

    @property
    def is_needed(self) -> bool:
        """Whether the record contains more than what nodes have reported."""
        is_marked = self.is_closed or self.is_purged or self.is_in_store
        return is_marked or self.known is not None or self.frozen is not None

    def may_be_held(self, listed: Round) -> bool:
        """Whether the round is not agreed and a node lists it as one that accepts votes."""
        return self.is_open and self.agreed is None and listed.status not in ENDED_STATUSES

    def has_ended(self, chain_time: float | None) -> bool:
        """Whether the round is agreed, not closed, and the chain has reached its end."""
        if self.agreed is None or self.is_past or self.is_closed or chain_time is None:
            return False
        return self.agreed.vote_end_time <= chain_time

    def set_facts(self, facts: RoundFacts) -> None:
        """Record what is agreed."""
        if facts.vote_end_time != self.facts.vote_end_time:
            self.end_height = None
        self.facts, self.agreed = facts, _create_round(self.round_id, facts)
        if self.agreed is not None:
            self.known, self.listed_ends = self.agreed, ()

    def show(self, listed: Collection[Round]) -> None:
        """Update `known` by what nodes list now."""
        is_begun = self.agreed is not None and self.agreed.status is not RoundStatus.PENDING
        self.known = self.agreed if is_begun or not listed else _merge_listings(listed, self.facts)
        self.listed_ends = () if self.agreed is not None else tuple(each.vote_end_time for each in listed)

    def describe_unconfirmed(self, name: str) -> str:
        """Describe the unconfirmed values of a field for messages."""
        values = " or ".join(_describe_value(name, value) for value in self.unconfirmed[name])
        return f"{values} reported but not confirmed; known: {_describe_value(name, getattr(self.facts, name))}"


class RoundRegistry:
    """All rounds that the chain has listed, and the chain's id.

    Attributes:
        is_synced: whether enough nodes to agree have listed their rounds since the start.
        revision: increases with every event after which a round may be closed or purged: a new or read block while a
            round has ended and is not closed, and a round that is new, changed, frozen, unfrozen or closed by another
            host.
    """

    def __init__(self, store: Store, node_pool: NodePool) -> None:
        self._store = store
        self._node_pool = node_pool
        self._clock = node_pool.clock
        self._log = structlog.get_logger("helper.chain")
        self._said: dict[str, _Statement] = {}  # by node
        self._syncs = 0
        self._records: dict[bytes, _Record] = {}  # those that had ended when first listed are in listing order
        self._stored: list[_Record] = []  # the stored rounds, oldest first
        self._held: list[_Record] = []  # the rounds that are not agreed
        self._chain_time: float | None = None
        self._ledger: Ledger | None = None
        self._chain_time_at = 0.0  # monotonic time at which that block was reported
        self._chain_id_stored = False
        self.is_synced = False
        self.revision = 0

    # ------------------------------------------------------------------ store

    async def restore(self) -> None:
        """Load the rounds, their closed marks and the chain's id from the store.

        Raises:
            ConfigError: the store belongs to another chain than the configured one.
        """
        chain_id = await self._store.get_meta(CHAIN_ID_KEY)
        if None not in {chain_id, self._node_pool.chain_id} and self._node_pool.chain_id != chain_id:
            raise ConfigError(
                f"the database belongs to chain {chain_id}, not {self._node_pool.chain_id}",
                advice="Use a separate database for this chain ([helper] db_path), or correct [chain] chain_id.",
            )
        if chain_id is not None:
            self._node_pool.chain_id = self._node_pool.reported_chain_id = chain_id
        self._chain_id_stored = chain_id is not None
        ledger = await self._store.get_ledger()
        for row in await self._store.list_rounds():
            record = self._record(row.round_id)
            record.is_in_store, record.is_closed = True, row.closed_at is not None
            # A node that is behind the blocks read so far may not know the latest change.
            record.set_facts(_parse_facts(row, 0 if ledger is None else ledger.top))
        self._sort()

    async def reload_from_store(self) -> None:
        """Apply what other hosts have stored: closed and purged rounds, and agreed changes.

        Raises:
            StoreError: the rounds could not be read.
        """
        stored = list(self._stored)  # before the read, which finds them if they still exist
        rows = {row.round_id: row for row in await self._store.list_rounds()}
        for record in stored:
            if record.round_id not in rows:  # purged, or lost: when it is listed again, it has ended or is stored again
                self._records[record.round_id] = _Record(record.round_id)
        self._sort()
        for record in self._records.values():
            record.is_in_store = record.round_id in rows
        for row in rows.values():
            record = self._record(row.round_id)
            record.is_in_store = True
            if row.closed_at is not None and not record.is_closed:
                # The host that closed it may stop before it reports or purges the round, and no further block would
                # make this host check it.
                record.is_closed = True
                self.revision += 1
            facts = _parse_facts(row, self._node_pool.agreed_height or 0)
            if record.is_stored:
                facts = record.facts._replace(vote_end_time=facts.vote_end_time, height=facts.height)
            if not record.is_purged and not record.is_past and facts[:4] != record.facts[:4]:
                self._apply([(record, facts)])

    # ------------------------------------------------------------------ reading

    def get(self, round_id: bytes) -> Round | None:
        """The round, None if the chain has not listed it. Includes frozen rounds and those that had already ended."""
        return self._find(round_id).known

    def view(self, round_id: bytes) -> RoundView:
        """What is known of a round now."""
        record = self._find(round_id)
        known, unconfirmed = record.known, record.unconfirmed
        is_agreed = known is None or record.agreed is not None
        is_active = known is not None and known.status is RoundStatus.ACTIVE
        ends = unconfirmed.get("vote_end_time", ()) + record.listed_ends
        return RoundView(
            known,
            is_status_agreed="status" not in unconfirmed if is_agreed else is_active,
            are_proposals_agreed=is_agreed and "proposals" not in unconfirmed,
            is_end_agreed=not ends,
            latest_end=max([*ends, 0 if known is None else known.vote_end_time]),
        )

    def is_agreed(self, round_id: bytes) -> bool:
        """Whether every field of the round is agreed."""
        return self._find(round_id).agreed is not None

    def is_doubted(self, round_id: bytes) -> bool:
        """Whether the round is not agreed, and too few nodes list it for that."""
        listed = sum(round_id in statement.rounds for statement in self._said.values())
        return not self.is_agreed(round_id) and listed < self._node_pool.needed

    def frozen_reason(self, round_id: bytes) -> str | None:
        """Why no share of the round may be accepted, revealed or purged now, None if they may.

        Also covers rounds that were only ever listed with invalid data.
        """
        return self._find(round_id).frozen

    def unconfirmed_reports(self) -> dict[bytes, str]:
        """Reports of nodes that are not accepted, as text, by round id.

        These are unconfirmed changes and the reasons why rounds are frozen.
        """
        records = self._records.values()
        changes = {
            record.round_id: "; ".join(map(record.describe_unconfirmed, record.unconfirmed))
            for record in records
            if record.unconfirmed
        }
        waiting = {record.round_id: "listed, but not agreed yet" for record in self._held}
        problems = {record.round_id: record.problem for record in records if record.is_stored and record.problem}
        frozen = {record.round_id: record.frozen for record in records if record.frozen is not None}
        return {**problems, **changes, **waiting, **frozen}

    def frozen_shares(self) -> dict[bytes, int]:
        """Number of unconfirmed shares by frozen round, as of the last sync."""
        return {record.round_id: record.frozen_shares for record in self._records.values() if record.frozen_shares}

    def agreed_rounds(self) -> list[Round]:
        """Every agreed round that is stored, oldest first."""
        return [record.known for record in self._stored if record.known is not None]

    def all_rounds(self) -> list[Round]:
        """Every stored round, oldest first, and then those that are not agreed yet."""
        return [record.known for record in (*self._stored, *self._held) if record.known is not None]

    def active_rounds(self, *, with_frozen: bool = False) -> list[Round]:
        """The rounds that are not closed and accept votes, agreed or not, in the order of `all_rounds`."""
        return [
            known
            for record in (*self._stored, *self._held)
            if not record.is_closed and (with_frozen or record.frozen is None)
            if (known := record.known) is not None and known.status is RoundStatus.ACTIVE
        ]

    def open_rounds(self) -> list[Round]:
        """The agreed rounds that are not closed, oldest first."""
        return [record.known for record in self._stored if record.known is not None and not record.is_closed]

    def chain_now(self) -> float | None:
        """The chain's time in Unix seconds, None before the first block.

        It is the time of the newest agreed block plus the monotonic time since then; the wall clock is not used.
        """
        if self._chain_time is None:
            return None
        return self._chain_time + self._clock.monotonic() - self._chain_time_at

    @property
    def has_stored_state(self) -> bool:
        """Whether the database has seen a chain; false for a new one."""
        return self._chain_id_stored or bool(self._records)

    # ------------------------------------------------------------------ closing

    def forget(self, round_id: bytes) -> None:
        """Remove a purged round. After a restart it counts as ended when first listed."""
        record = self._record(round_id)
        self._records[round_id] = _Record(round_id, is_closed=record.is_closed, is_purged=True)
        self._sort()

    def record_blocks(self, heads: Mapping[str, BlockHead], ledger: Ledger) -> None:
        """Record the newest blocks of the nodes in sync, and which blocks are read."""
        needed = self._node_pool.needed
        time = agreed_height({name: head.time for name, head in heads.items()}, needed)
        if time is None or (time, ledger) == (self._chain_time, self._ledger):
            return
        if time != self._chain_time:
            self._chain_time, self._chain_time_at = time, self._clock.monotonic()
        self._ledger = ledger
        open_records = [record for record in self._stored if record.is_open]
        for record in open_records:
            height = agreed_height_at(heads.values(), needed, record.facts.vote_end_time or 0)
            if height is not None and record.end_height is not None:
                height = min(height, record.end_height)
            record.end_height = height
        self.revision += any(record.end_height is not None for record in open_records)

    def note_reset(self, height: int) -> None:
        """Have statements from this height on count again, because the chain was reset to it."""
        for record in self._records.values():
            record.facts = record.facts._replace(height=min(height, record.facts.height))

    async def is_closed(self, round_id: bytes) -> bool:
        """Whether the chain has closed the round. False while it is frozen.

        Raises:
            StoreError: the closed mark could not be stored.
        """
        record = self._find(round_id)
        if record.frozen is not None:
            return False
        if record.agreed is not None and record.agreed.status in ENDED_STATUSES and self._may_close(record):
            await self._close(record, _describe_value("status", record.agreed.status))
        return record.is_closed

    def _may_close(self, record: _Record) -> bool:
        """Whether every block from the round's creation through its end was read. Later blocks have no reveal of it."""
        created, end = record.facts.created_at_height, record.end_height
        if self._ledger is None or not record.is_open or created is None or end is None:
            return False
        return is_read(self._ledger, created + 1, end)

    async def _close(self, record: _Record, reason: str) -> None:
        await self._store.run(mark_closed, record.round_id, self.chain_now() or self._clock.now())
        record.is_closed, record.frozen, record.frozen_shares = True, None, 0
        record.unconfirmed.clear()
        self.revision += 1
        self._log.info("round_closed", round=record.round_id.hex()[:8], reason=reason)

    async def _close_unlisted(self) -> None:
        """Close ended rounds that enough nodes omit or list with the same unknown status."""
        for record in [record for record in self._stored if not record.unconfirmed and self._may_close(record)]:
            reasons = {
                name: statement.unknown.get(record.round_id)
                or ("" if record.round_id in statement.rounds or record.round_id in statement.invalid else _OMITTED)
                for name, statement in self._said.items()
                if statement.height >= (record.end_height or 0)
            }
            if reason := agreed_fact(reasons, self._node_pool.needed):
                await self._close(record, reason)

    # ------------------------------------------------------------------ synchronizing

    async def sync(self, head: int = 0) -> None:
        """Ask nodes for their rounds, and apply what they agree on.

        The next node is asked first each time, so that each makes its statement. If it lists what is agreed, no other
        node is asked.

        Args:
            head: the height that the responding node should have reached.

        Raises:
            ChainUnavailable: no node returned a list.
            StoreError: the rounds could not be stored.
        """
        self._syncs += 1
        await self._node_pool.call_until(self._ask, is_enough=self._is_enough, min_height=head, turn=self._syncs)
        await self._store_chain_id()
        said: dict[bytes, dict[str, Said[Round]]] = {}
        for name, statement in self._said.items():
            for listed in statement.rounds.values():
                said.setdefault(listed.round_id, {})[name] = Said(statement.height, listed)
        await self._agree(said)
        self._hold(said)
        await self._freeze()
        for record in self._stored:
            self._note_unconfirmed(record, said.get(record.round_id, {}))
        await self._close_unlisted()
        self._records = {round_id: record for round_id, record in self._records.items() if record.is_needed}
        self.is_synced = self.is_synced or len(self._said) >= self._node_pool.needed

    async def _ask(self, node: Node) -> _Statement:
        head = node.health.head
        listed = await node.client.rounds()
        statement = self._said[node.name] = _Statement(
            self._syncs,
            0 if head is None else head.height,
            {each.round_id: each for each in listed.rounds},
            listed.invalid,
            listed.unknown_status,
        )
        return statement

    def _is_enough(self, _statement: _Statement) -> bool:
        """Whether the nodes asked in this sync list what is agreed, so that no other needs to be asked."""
        return all(self._is_agreed(each) for each in self._said.values() if each.sync == self._syncs)

    def _is_agreed(self, statement: _Statement) -> bool:
        """Whether a node lists what is agreed."""
        if self._held or any(statement.problem(record) for record in self._records.values()):
            return False
        listed = [(self._find(each.round_id), each) for each in statement.rounds.values()]
        unknown = {*statement.invalid, *statement.unknown} - self._records.keys()
        return not unknown and all(not record.is_open or record.agreed == each for record, each in listed)

    async def _agree(self, said: Mapping[bytes, Mapping[str, Said[Round]]]) -> None:
        """Store the rounds and the changes that enough nodes list alike.

        What nodes listed that are no longer in sync changes no agreed round: it may be from before the last change.
        """
        needed, height = self._node_pool.needed, self._node_pool.agreed_height or 0
        in_sync = self._node_pool.in_sync_heads
        changes: list[tuple[_Record, RoundFacts]] = []
        for round_id, listed in said.items():
            record = self._find(round_id)
            statements = {name: fact for name, fact in listed.items() if record.agreed is None or name in in_sync}
            is_known = record.agreed is not None and all(fact == record.agreed for _, fact in statements.values())
            if record.is_purged or is_known or len(statements) < needed:
                continue
            facts = agreed_round(statements, needed, known=record.facts, height=height)
            if record.is_over:
                facts = record.facts._replace(status=facts.status)
            if facts != record.facts:
                changes.append((record, facts))
        ended = [r for r, facts in changes if r.agreed is None and facts.is_complete and facts.status in ENDED_STATUSES]
        with_shares = await self._store.count_shares() if ended else {}
        for record in ended:
            record.is_past = record.round_id not in with_shares and not record.is_in_store
        rounds = [_create_round(record.round_id, facts) for record, facts in changes if not record.is_past]
        if new := [to_stored_round(each) for each in rounds if each is not None]:
            await self._store.run(save_rounds, new, self._clock.now())
        self._apply(changes)

    def _apply(self, changes: Iterable[tuple[_Record, RoundFacts]]) -> None:
        """Record what is agreed and stored."""
        for record, facts in changes:
            before = record.agreed
            self._records.pop(record.round_id, None)  # past rounds are in listing order
            self._records[record.round_id] = record
            record.set_facts(facts)
            if record.agreed is not None and not record.is_past:
                self._log_change(record.agreed, before)
                self.revision += 1
        past = [round_id for round_id, record in self._records.items() if record.is_past]
        for round_id in past[: max(0, len(past) - MAX_PAST_ROUNDS)]:
            del self._records[round_id]
        self._sort()

    def _log_change(self, after: Round, before: Round | None) -> None:
        name, height = after.round_id.hex()[:8], self._node_pool.agreed_height
        if before is None or before.status is not after.status:
            self._log.info("round_updated", round=name, status=after.status.name, height=height)
        if before is None:
            return
        if before.vote_end_time != after.vote_end_time:
            reason = f"vote_end_time is {after.vote_end_time}, was {before.vote_end_time}"
            self._log.warning("round_end_changed", round=name, height=height, reason=reason)
        if before.proposals != after.proposals:
            reason = _describe_value("proposals", after.proposals)
            self._log.warning("round_proposals_changed", round=name, height=height, reason=reason)

    def _hold(self, said: Mapping[bytes, Mapping[str, Said[Round]]]) -> None:
        """Hold the rounds in memory that are not agreed and may accept votes, equally many of each node."""
        ranks: dict[bytes, int] = {}
        for statement in self._said.values():
            new = [each.round_id for each in statement.rounds.values() if self._find(each.round_id).may_be_held(each)]
            for rank, round_id in enumerate(new):
                ranks[round_id] = min(rank, ranks.get(round_id, rank))
        held = [self._record(round_id) for round_id in sorted(ranks, key=ranks.__getitem__)[:MAX_HELD_ROUNDS]]
        for record in [record for record in self._held if record not in held]:
            record.show(())
        self._held = held
        for record in (*self._stored, *held):
            record.show([fact for _, fact in said.get(record.round_id, {}).values()])

    async def _freeze(self) -> None:
        """Freeze the rounds that enough nodes omit or list with impossible data, and unfreeze all others."""
        unlisted = [round_id for each in self._said.values() for round_id in (*each.invalid, *each.unknown)]
        reasons: dict[bytes, str] = {}
        for round_id in dict.fromkeys([*self._records, *unlisted]):
            record = self._find(round_id)
            problems = {name: each.problem(record) for name, each in self._said.items()}
            found = {name: problem for name, problem in problems.items() if problem is not None}
            said = {name: name in found for name, each in self._said.items() if each.height >= record.facts.height}
            if agreed_fact(said, self._node_pool.needed):
                reasons[round_id] = next(iter(found.values()))
            record.problem = "; ".join(f"{problem} by {name}" for name, problem in found.items())
            if record.frozen is not None and round_id not in reasons:
                self._log.info("round_unfrozen", round=round_id.hex()[:8])
                record.frozen, record.frozen_shares = None, 0
                self.revision += 1
        counts = await self._store.count_shares() if reasons else {}
        for round_id, reason in reasons.items():
            record = self._record(round_id)
            if record.frozen is None:
                log = self._log.error if record.is_stored else self._log.warning
                advice = "Check the nodes in [chain] endpoints. `svote-helper rounds` shows whether it is still frozen."
                log("round_frozen", round=round_id.hex()[:8], reason=reason, advice=advice)
                self.revision += 1
            shares = counts.get(round_id, {})
            record.frozen, record.frozen_shares = reason, sum(shares.get(state, 0) for state in UNCONFIRMED_STATES)

    def _note_unconfirmed(self, record: _Record, statements: Mapping[str, Said[Round]]) -> None:
        """Replace the unconfirmed values of a round; each is logged once."""
        listed = [fact for at, fact in statements.values() if at >= record.facts.height]
        current = [fact for name, (_, fact) in statements.items() if self._said[name].sync == self._syncs]
        found: dict[str, tuple[Any, ...]] = {}
        for name in _EVENT_NAMES if not record.is_closed else ():
            values = tuple(dict.fromkeys(getattr(each, name) for each in listed if _differs(name, each, record.facts)))
            if values and all(_differs(name, each, record.facts) for each in current):
                found[name] = values
        before, record.unconfirmed = record.unconfirmed, found
        for name, event in _EVENT_NAMES.items():
            if name in found and found[name] != before.get(name):
                # At the end of a round, nodes report it before the follower has processed that block.
                head = self._node_pool.last_head
                is_expected = name == "status" and record.has_ended(None if head is None else head.time)
                log = self._log.info if is_expected else self._log.warning
                reason = record.describe_unconfirmed(name)
                log(f"round_{event}_unconfirmed", round=record.round_id.hex()[:8], reason=reason)
            elif name in before and name not in found:
                self._log.info(f"round_{event}_report_withdrawn", round=record.round_id.hex()[:8])
        if found.keys() != before.keys():
            self.revision += 1
        self._log_late_end(record, statements)

    def _log_late_end(self, record: _Record, statements: Mapping[str, Said[Round]]) -> None:
        """Log once per round which nodes do not report yet that it has ended, while others do."""
        ended = {name for name, (_, fact) in statements.items() if fact.status in ENDED_STATUSES}
        is_late = self._chain_time is not None and record.has_ended(self._chain_time - _STATUS_GRACE_SECONDS)
        if is_late and ended and record.facts.status not in ENDED_STATUSES and not record.is_wait_logged:
            record.is_wait_logged = True
            self._log.warning(
                "round_closing_unconfirmed",
                round=record.round_id.hex()[:8],
                reason="too few nodes report that the round has ended",
                endpoint=", ".join(node.name for node in self._node_pool.nodes if node.name not in ended),
            )

    async def _store_chain_id(self) -> None:
        """Store the chain's id, so that the database is never used for another chain."""
        if not self._chain_id_stored and self._node_pool.chain_id is not None:
            await self._store.run(blocks.set_meta, CHAIN_ID_KEY, self._node_pool.chain_id)
            self._chain_id_stored = True

    def _find(self, round_id: bytes) -> _Record:
        """The record of a round; an empty one if there is none."""
        return self._records.get(round_id) or _Record(round_id)

    def _record(self, round_id: bytes) -> _Record:
        """The record of a round; created if there is none."""
        record = self._records[round_id] = self._find(round_id)
        return record

    def _sort(self) -> None:
        stored = [record for record in self._records.values() if record.is_stored]
        self._stored = sorted(stored, key=lambda record: (record.facts.created_at_height or 0, record.round_id))
        self._held = [record for record in self._held if record.agreed is None and not record.is_purged]


def to_stored_round(known: Round) -> StoredRound:
    """The stored part of a round."""
    proposals = tuple((proposal.id, proposal.options) for proposal in known.proposals)
    return StoredRound(known.round_id, int(known.status), known.vote_end_time, known.created_at_height, proposals)


def _parse_facts(row: StoredRound, height: int) -> RoundFacts:
    """The stored facts of a round, which were agreed at this height or below it."""
    proposals = tuple(Proposal(number, tuple(options)) for number, options in row.proposals)
    height = max(height, row.created_at_height)
    return RoundFacts(row.created_at_height, row.vote_end_time, proposals, RoundStatus(row.status), height)


def _create_round(round_id: bytes, facts: RoundFacts) -> Round | None:
    """The round, None until every field is agreed."""
    created, end, proposals, status, _ = facts
    if created is None or end is None or proposals is None or status is None:
        return None
    return Round(round_id, status, end, proposals, created)


def _merge_listings(listed: Collection[Round], facts: RoundFacts) -> Round:
    """A round with the agreed fields; the others are such that no leaf, share or reveal is missed."""
    options: dict[int, set[int]] = {}
    for proposal in (proposal for each in listed for proposal in each.proposals):
        options.setdefault(proposal.id, set()).update(proposal.options)
    proposals = tuple(Proposal(number, tuple(sorted(options[number]))) for number in options)
    first, status = next(iter(listed)), facts.status
    if status in {None, RoundStatus.PENDING} and any(each.status is RoundStatus.ACTIVE for each in listed):
        status = RoundStatus.ACTIVE  # a rejected share is lost, and an early acceptance does no harm
    heights, ends = [each.created_at_height for each in listed], [each.vote_end_time for each in listed]
    return Round(
        first.round_id,
        first.status if status is None else status,
        max(ends) if facts.vote_end_time is None else facts.vote_end_time,
        proposals if facts.proposals is None else facts.proposals,
        min(heights) if facts.created_at_height is None else facts.created_at_height,
    )


def _differs(name: str, listed: Round, facts: RoundFacts) -> bool:
    """Whether a listed field is a change that is not agreed. A status before the agreed one is none."""
    if name == "status":
        return listed.status in ENDED_STATUSES and facts.status not in ENDED_STATUSES
    return bool(getattr(listed, name) != getattr(facts, name))


def _describe_value(name: str, value: RoundStatus | int | tuple[Proposal, ...]) -> str:
    if isinstance(value, tuple):
        return f"{len(value) or 'no'} {name}"
    return f"{name} {value.name if isinstance(value, RoundStatus) else value}"
