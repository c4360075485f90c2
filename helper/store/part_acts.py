"""The part of a store that does what operators ask for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from helper.store.action_store import Action, Actor, Checked, FailedBefore, ImportedShare, RowMark
from helper.store.engine import StorePart
from helper.store.operations import action_reads, failure_counts, import_
from helper.store.operations import actions as actions_module
from helper.store.rows import FailureGroup, QueueFilter


class ActsPart(StorePart):
    """`ActStore`; what each method means is told there."""

    async def begin_action(self, actor: Actor, what: str, wanted: Mapping[str, Any]) -> int:
        """Note that an act begins."""
        op = partial(actions_module.begin_action, actor=actor, what=what, wanted=dict(wanted), at_ms=self._now_ms())
        return await self._writer.run(op)

    async def end_action(self, number: int, outcome: Mapping[str, Any]) -> None:
        """Note what came of an act."""
        op = partial(actions_module.end_action, number=number, outcome=dict(outcome), at_ms=self._now_ms())
        await self._writer.run(op)

    async def actions(self, *, limit: int) -> list[Action]:
        """The latest acts, newest first."""
        return await action_reads.actions(self._operators.fetch, limit)

    async def failed_ids(self, round_id: bytes | None, *, after_id: int, limit: int) -> list[int]:
        """Failed shares beyond an id, by id; only an index is read."""
        return await action_reads.failed_ids(self._operators.fetch, round_id, after_id, limit)

    async def ids_of(self, ref: str) -> list[int]:
        """The live shares, at most two, whose name begins so."""
        return await action_reads.ids_of(self._operators.fetch, ref)

    async def retry_some(
        self, ids: Sequence[int], wanted: QueueFilter, *, closed: Collection[bytes], note: str, dry: bool
    ) -> Counter[str]:
        """FAILED -> RECEIVED for some shares, all attempts back; those of closed rounds stay."""
        op = partial(
            actions_module.retry_some,
            ids=tuple(ids),
            wanted=wanted,
            closed=frozenset(closed),
            note=note,
            at_ms=self._now_ms(),
            dry=dry,
        )
        return await self._writer.run(op)

    async def hand_over_some(self, marks: Sequence[RowMark], *, note: str, at_rest: bool) -> Counter[str]:
        """Give up some shares that an export carries to another machine."""
        op = partial(
            actions_module.hand_over_some, marks=tuple(marks), note=note, at_ms=self._now_ms(), at_rest=at_rest
        )
        return await self._writer.run(op)

    async def take_over_some(self, carried: Sequence[Checked], *, note: str, dry: bool) -> list[ImportedShare]:
        """Take over some shares of another machine's export."""
        op = partial(import_.take_over_some, carried=tuple(carried), note=note, at_ms=self._now_ms(), dry=dry)
        return await self._writer.run(op)

    async def failed_groups(self, wanted: QueueFilter, *, limit: int) -> list[FailureGroup]:
        """What failed for good and is not purged yet, by stage and reason."""
        return await action_reads.failed_groups(self._operators.fetch, wanted, limit)

    async def failed_before(self) -> list[FailedBefore]:
        """What had failed in rounds that are purged."""
        return await action_reads.failed_before(self._operators.fetch)

    async def sweep(self) -> int:
        """Forget what failed too long ago."""
        return await self._writer.run(partial(failure_counts.sweep, at_ms=self._now_ms()))

    async def tree_sizes(self) -> dict[bytes, int]:
        """How many leaves of each round's tree are kept."""
        return await action_reads.tree_sizes(self._operators.fetch)

    async def rounds_of_spent(self, nullifier: bytes) -> list[bytes]:
        """The rounds in which the chain has counted a nullifier, whoever revealed it."""
        return await action_reads.rounds_of_spent(self._operators.fetch, nullifier)
