"""Compares the store with a model in plain Python under random operations from hypothesis."""

from __future__ import annotations

import asyncio
import random
import secrets
import sqlite3
from collections.abc import Awaitable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from helper.core.share import TRANSITIONS, ShareState
from helper.errors import StoreError
from helper.store import exported_shares, messages, shares
from helper.store import rounds as round_operations
from helper.store.blocks import apply_blocks
from helper.store.exported_shares import ExportedShare, ImportResult
from helper.store.models import MOVED, EnqueueResult, QueueFilter, SpentNullifier
from helper.store.rounds import fail_unconfirmed, save_rounds
from helper.store.table_rows import RevealRow
from tests.support.clock import FakeClock
from tests.unit.store.conformance.backends import PostgresBackend, SqliteBackend, StoreBackend
from tests.unit.store.conformance.conftest import BACKEND_KINDS
from tests.unit.store.conformance.test_chain_data import make_stored_round
from tests.unit.store.fixtures import (
    NOW,
    OTHER_ROUND,
    ROUND,
    greatest_height,
    make_posted_share,
    make_reveal,
    retry_as_operator,
)

T = TypeVar("T")

NUMBERS = st.integers(0, 4)
ROUNDS = st.sampled_from([ROUND, OTHER_ROUND])
DELAYS_SECONDS = st.sampled_from([0, 0, 0, 1, 30])
RARELY_TRUE = st.sampled_from([False] * 5 + [True])
EXPORTED_STATES = [ShareState.FAILED, ShareState.SENT]
IN_PROGRESS = {ShareState.PROVING, ShareState.SENT}
UNFINISHED = {ShareState.WAITING, *IN_PROGRESS}
ShareKey = tuple[bytes, int]


@dataclass
class ModelShare:
    """A live share in the model."""

    share_id: int
    state: ShareState
    due_ms: int
    attempts: int = 0
    crashes: int = 0
    sends: int = 0
    failed_by_closure: bool = False
    submit_at: int = 0
    is_moved: bool = False
    """Failed because it was moved to another machine."""
    received_ms: int = 0

    @property
    def first_due_ms(self) -> int:
        return max(self.submit_at * 1000, self.received_ms)

    @property
    def can_be_retried(self) -> bool:
        """Whether an operator can retry the share: it has failed, or it waits for a retry."""
        return self.state is ShareState.FAILED or (self.state is ShareState.WAITING and self.attempts > 0)

    @property
    def waits_for_first_attempt(self) -> bool:
        """Whether an earlier due time of another post applies."""
        return self.state is ShareState.WAITING and not self.attempts

    def retry(self) -> None:
        self.state, self.attempts, self.crashes = ShareState.WAITING, 0, 0
        self.failed_by_closure = self.is_moved = False
        self.due_ms = min(self.due_ms, self.first_due_ms)


class StoreModel(RuleBasedStateMachine):
    """Applies every operation to the store and to the model; the results must be equal."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.new_event_loop()
        # The order of shares within a second depends on the database's keys; fix them.
        keys = random.Random(1)
        self._patches: list[Any] = [
            patch.object(secrets, "token_bytes", keys.randbytes),
            patch.object(secrets, "token_hex", lambda size: keys.randbytes(size).hex()),
        ]
        for patcher in self._patches:
            patcher.start()
        self._backend = self.create_backend()
        self.clock = FakeClock(NOW)
        self.live: dict[ShareKey, ModelShare] = {}
        self.confirmed: set[ShareKey] = set()
        self.spent: set[ShareKey] = set()
        self.cursor: int | None = None
        self.height = 1

    def create_backend(self) -> StoreBackend:
        raise NotImplementedError

    def run_until_complete(self, operation: Awaitable[T]) -> T:
        async def await_work() -> T:
            return await operation

        return self._loop.run_until_complete(await_work())

    @initialize()
    def open(self) -> None:
        self.store = self._backend.create_store(self.clock)
        self.run_until_complete(self.store.open())
        self.run_until_complete(self._backend.prepare_store(self.store))
        for round_id in (ROUND, OTHER_ROUND):
            self.run_until_complete(self.store.run(save_rounds, [make_stored_round(round_id)], NOW))

    def teardown(self) -> None:
        self.run_until_complete(self.store.close())
        self._loop.close()
        for patcher in self._patches:
            patcher.stop()

    @property
    def now_ms(self) -> int:
        return int(self.clock.now() * 1000)

    def apply_transition(
        self, name: ShareKey, operation: Awaitable[object], sources: set[ShareState], target: ShareState
    ) -> ModelShare | None:
        """Apply a transition: a legal one changes the row, an illegal one is refused without a change."""
        model = self.live[name]
        if model.state in sources:
            assert self.run_until_complete(operation)
            model.state = target
            model.failed_by_closure = model.is_moved = False
            return model
        if model.failed_by_closure:
            assert not self.run_until_complete(operation)
            return None
        with pytest.raises(StoreError, match=f"{model.state.name} cannot become {target.name}"):
            self.run_until_complete(operation)
        return None

    # Enqueue

    @rule(round_id=ROUNDS, numbers=st.sets(NUMBERS, min_size=1), wait=st.one_of(st.none(), DELAYS_SECONDS))
    def enqueue(self, round_id: bytes, numbers: set[int], wait: int | None) -> None:
        for number in sorted(numbers):
            self.enqueue_one(round_id, number, wait)

    def enqueue_one(self, round_id: bytes, number: int, wait: int | None) -> None:
        name = (round_id, number)
        submit_at = 0 if wait is None else int(self.clock.now()) + wait
        posted = make_posted_share(number, submit_at=submit_at, round_id=round_id)
        outcome = self.run_until_complete(
            self.store.run(shares.EnqueueOperation(posted.share, posted.nullifier, now=self.clock.now()))
        )
        model, due_ms = self.live.get(name), max(submit_at * 1000, self.now_ms)
        is_earlier = model is not None and model.waits_for_first_attempt and due_ms < model.submit_at * 1000
        if not is_earlier and (model is not None or name in self.confirmed or name in self.spent):
            assert outcome is EnqueueResult.DUPLICATE
            return
        assert outcome is (EnqueueResult.MOVED_UP if is_earlier else EnqueueResult.QUEUED)
        ((row, stored_due_ms),) = self._backend.query_rows("SELECT id, due_ms FROM shares ORDER BY id DESC LIMIT 1")
        assert stored_due_ms == due_ms
        if model is None:
            model = self.live[name] = ModelShare(row, ShareState.WAITING, due_ms, received_ms=self.now_ms)
        model.share_id, model.due_ms, model.submit_at = row, due_ms, submit_at

    # Claims and transitions

    @precondition(lambda self: self.live)
    @rule(limit=st.integers(1, 9), rounds=st.sampled_from([(ROUND,), (OTHER_ROUND,), (ROUND, OTHER_ROUND)]))
    def claim(self, limit: int, rounds: tuple[bytes, ...]) -> None:
        due = sorted(
            model.due_ms
            for (round_id, _), model in self.live.items()
            if round_id in rounds and model.state is ShareState.WAITING and model.due_ms <= self.now_ms
        )
        claimed = self.run_until_complete(
            self.store.run(shares.claim_due, now=self.clock.now(), limit=limit, rounds=rounds)
        )
        assert [queued.due_ms for queued in claimed] == due[:limit]
        rows = {model.share_id: model for model in self.live.values()}
        for queued in claimed:
            model = rows[queued.id]
            assert (model.state, queued.attempts, queued.crashes) == (
                ShareState.WAITING,
                model.attempts,
                model.crashes,
            )
            model.state = ShareState.PROVING

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def prepare(self, data: st.DataObject) -> None:
        if name := self.draw_key(data):
            operation = self.store.run(messages.prepare, self.live[name].share_id, make_reveal(name[1]))
            if model := self.apply_transition(name, operation, {ShareState.PROVING}, ShareState.SENT):
                model.sends = 0

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        if name := self.draw_key(data):
            model = self.live[name]
            sent = self.run_until_complete(
                self.store.run(messages.mark_sending, model.share_id, height=self.height, endpoint="node:80")
            )
            assert sent is (model.state is ShareState.SENT)
            model.sends += sent

    @precondition(lambda self: self.live)
    @rule(data=st.data(), wait=st.one_of(st.none(), DELAYS_SECONDS))
    def requeue(self, data: st.DataObject, wait: int | None) -> None:
        if name := self.draw_key(data):
            due_ms = None if wait is None else self.now_ms + wait * 1000
            operation = self.store.run(
                shares.requeue, self.live[name].share_id, due_ms=due_ms, stage="tree", note="later"
            )
            if model := self.apply_transition(name, operation, IN_PROGRESS, ShareState.WAITING):
                model.due_ms = model.due_ms if due_ms is None else due_ms

    @precondition(lambda self: self.live)
    @rule(data=st.data(), wait=DELAYS_SECONDS)
    def record_crash(self, data: st.DataObject, wait: int) -> None:
        if name := self.draw_key(data):
            due_ms = self.now_ms + wait * 1000
            operation = self.store.run(shares.record_crash, self.live[name].share_id, due_ms=due_ms, note="killed")
            if model := self.apply_transition(name, operation, {ShareState.PROVING}, ShareState.WAITING):
                model.crashes, model.due_ms = model.crashes + 1, due_ms

    @precondition(lambda self: self.live)
    @rule(data=st.data(), wait=DELAYS_SECONDS)
    def retry(self, data: st.DataObject, wait: int) -> None:
        if name := self.draw_key(data):
            due_ms = self.now_ms + wait * 1000
            operation = self.store.run(
                shares.retry, self.live[name].share_id, due_ms=due_ms, stage="proof", note="failed"
            )
            if model := self.apply_transition(name, operation, UNFINISHED, ShareState.WAITING):
                model.attempts, model.due_ms = model.attempts + 1, due_ms

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        if name := self.draw_key(data):
            operation = self.store.run(shares.fail, self.live[name].share_id, stage="proof", note="for good")
            self.apply_transition(name, operation, UNFINISHED, ShareState.FAILED)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def operator_retry(self, data: st.DataObject) -> None:
        if name := self.draw_key(data):
            model = self.live[name]
            retried = self.run_until_complete(retry_as_operator(self.store, model.share_id))
            assert retried == (model.can_be_retried and not model.is_moved)
            if retried:
                model.retry()

    # Operator actions on many shares

    @rule(
        numbers=st.sets(NUMBERS, min_size=1),
        closed=st.sampled_from([(), (), (ROUND,)]),
        stage=st.sampled_from([None, MOVED]),
        dry=RARELY_TRUE,
    )
    def retry_failed(self, numbers: set[int], closed: tuple[bytes, ...], stage: str | None, dry: bool) -> None:
        names = [(round_id, number) for round_id in (ROUND, OTHER_ROUND) for number in sorted(numbers)]
        selected = [self.live[name] for name in names if name in self.live]
        failed = [
            name
            for name in names
            if name in self.live and self.live[name].can_be_retried and (stage is None or self.live[name].is_moved)
        ]
        ids = [model.share_id for model in selected]
        counts = self.run_until_complete(
            self.store.run(
                shares.retry_failed, ids, QueueFilter(stage=stage), closed=closed, note="asked for", dry_run=dry
            )
        )
        of_open_round = [name for name in failed if name[0] not in closed]
        retried = [name for name in of_open_round if stage == MOVED or not self.live[name].is_moved]
        assert (counts["retried"], counts["closed"], counts["moved"]) == (
            len(retried),
            len(failed) - len(of_open_round),
            len(of_open_round) - len(retried),
        )
        for name in [] if dry else retried:
            self.live[name].retry()

    @rule(numbers=st.sets(NUMBERS, min_size=1), at_rest=st.booleans(), stale=RARELY_TRUE)
    def mark_moved(self, numbers: set[int], at_rest: bool, stale: bool) -> None:
        selected = [self.live[name] for name in sorted(self.live) if name[1] in numbers]
        checks = dict(self._backend.query_rows("SELECT id, row_check FROM shares"))
        marks = [(model.share_id, b"12345678" if stale else checks[model.share_id]) for model in selected]
        counts = self.run_until_complete(
            self.store.run(exported_shares.mark_moved, marks, note="gone", idle_only=at_rest)
        )
        at_rest_states = {ShareState.WAITING, ShareState.FAILED}
        moved = [] if stale else [model for model in selected if model.state in at_rest_states or not at_rest]
        assert (counts["moved"], counts["stayed"]) == (len(moved), len(selected) - len(moved))
        for model in moved:
            model.state, model.failed_by_closure, model.is_moved = ShareState.FAILED, False, True

    @rule(
        round_id=ROUNDS,
        number=NUMBERS,
        state=st.sampled_from([ShareState.WAITING, *EXPORTED_STATES]),
        wait=DELAYS_SECONDS,
    )
    def import_shares(self, round_id: bytes, number: int, state: ShareState, wait: int) -> None:
        name, posted = (
            (round_id, number),
            make_posted_share(number, submit_at=int(self.clock.now()) + wait, round_id=round_id),
        )
        sent = RevealRow(*make_reveal(number)[:6], 2, 1, 1, "node:80", None) if state is ShareState.SENT else None
        exported = ExportedShare(posted.share, 5, state, self.now_ms, 3, 1, None, "proof", "as it was", (), sent)
        known_round = any(stored.round_id == round_id for stored in self.run_until_complete(self.store.list_rounds()))
        (outcome,) = self.run_until_complete(
            self.store.run(exported_shares.import_shares, [(exported, posted.nullifier)], note="taken", dry_run=False)
        )
        result, model = outcome.result, self.live.get(name)
        early = state is ShareState.SENT and posted.share.submit_at * 1000 > self.now_ms
        if not known_round:
            assert result is ImportResult.UNKNOWN
        elif name in self.spent:
            assert result is ImportResult.CONFIRMED
        elif model is not None and model.is_moved:
            assert result is ImportResult.RESTORED
            early = early or model.submit_at * 1000 > self.now_ms
            model.state = state if state is ShareState.SENT and not early else ShareState.WAITING
            model.attempts, model.crashes, model.is_moved = 0, 0, False
            model.due_ms = min(model.due_ms, model.first_due_ms)
            model.sends = 2 if model.state is ShareState.SENT else 0
        elif model is not None:
            assert result is (ImportResult.FAILED if model.state is ShareState.FAILED else ImportResult.QUEUED)
        elif name in self.confirmed:
            assert result is ImportResult.CONFIRMED
        else:
            assert result is ImportResult.IMPORTED
            ((row, due_ms),) = self._backend.query_rows("SELECT id, due_ms FROM shares ORDER BY id DESC LIMIT 1")
            assert due_ms == max(self.now_ms, posted.share.submit_at * 1000)
            moved_to = ShareState.WAITING if early else state
            self.live[name] = ModelShare(row, moved_to, due_ms, 3, 1, 2, submit_at=posted.share.submit_at)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if name := self.draw_key(data):
            model = self.live[name]
            assert self.run_until_complete(self.store.run(shares.release_claim, model.share_id)) is (
                model.state is ShareState.PROVING
            )
            if model.state is ShareState.PROVING:
                model.state = ShareState.WAITING

    # The chain

    @rule(round_id=ROUNDS, numbers=st.sets(NUMBERS, max_size=2), again=st.booleans())
    def apply_block(self, round_id: bytes, numbers: set[int], again: bool) -> None:
        self.height += 1
        names = [(round_id, number) for number in sorted(numbers)]
        spent = [(round_id, make_posted_share(number, round_id=round_id).nullifier) for _, number in names]
        confirmed = {self.live[name].share_id for name in names if name in self.live}
        assert self.apply_newest_block(spent) == confirmed
        for name in names:
            if self.live.pop(name, None) is not None:
                self.confirmed.add(name)
        self.spent.update(names)
        self.cursor = self.height
        if again:
            assert self.apply_newest_block(spent) == set()

    def apply_newest_block(self, spent: list[SpentNullifier]) -> set[int]:
        blocks = [(self.height, self.height)]
        return set(self.run_until_complete(self.store.run(apply_blocks, blocks, spent)))

    @rule(round_id=ROUNDS, confirmed=RARELY_TRUE)
    def close_round(self, round_id: bytes, confirmed: bool) -> None:
        if not confirmed:
            return
        unfinished = [model for name, model in self.live.items() if name[0] == round_id and model.state in UNFINISHED]
        assert self.run_until_complete(self.store.run_batches(fail_unconfirmed, round_id, note="closed")) == len(
            unfinished
        )
        for model in unfinished:
            model.state, model.failed_by_closure = ShareState.FAILED, True

    @rule(round_id=ROUNDS, confirmed=RARELY_TRUE)
    def purge(self, round_id: bytes, confirmed: bool) -> None:
        if not confirmed:
            return
        purged = [name for name in (*self.live, *self.confirmed) if name[0] == round_id]
        assert self.run_until_complete(self.store.run_batches(round_operations.purge, round_id)) == len(purged)
        self.live = {name: model for name, model in self.live.items() if name[0] != round_id}
        self.confirmed = {name for name in self.confirmed if name[0] != round_id}
        self.spent = {name for name in self.spent if name[0] != round_id}

    # Time, restarts, and refused operations

    @rule(seconds=st.integers(1, 100))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @rule(confirmed=RARELY_TRUE)
    def restart(self, confirmed: bool) -> None:
        if not confirmed:
            return
        self.run_until_complete(self.store.close())
        self.store = self._backend.create_store(self.clock)
        self.run_until_complete(self.store.open())
        self.run_until_complete(self._backend.prepare_store(self.store))
        witnessed = [model for model in self.live.values() if model.state is ShareState.PROVING]
        assert self.run_until_complete(self.store.run_batches(shares.recover)) == len(witnessed)
        for model in witnessed:
            model.state = ShareState.WAITING

    @precondition(lambda self: self.live)
    @rule(data=st.data(), new_state=st.sampled_from(ShareState))
    def refuse_illegal_update(self, data: st.DataObject, new_state: ShareState) -> None:
        """The schema refuses illegal transitions from any writer. No row has the state CONFIRMED."""
        name = self.draw_key(data)
        if name is None:
            return
        old_state = self.live[name].state
        if new_state is not ShareState.CONFIRMED and new_state in TRANSITIONS[old_state] | {old_state}:
            return
        with pytest.raises((sqlite3.IntegrityError, psycopg.errors.IntegrityError)):
            self._backend.execute(f"UPDATE shares SET state = {int(new_state)} WHERE id = {self.live[name].share_id}")

    def draw_key(self, data: st.DataObject) -> ShareKey | None:
        return data.draw(st.sampled_from(sorted(self.live))) if self.live else None

    @invariant()
    def store_matches_model(self) -> None:
        actual = {
            row: (state, due_ms, attempts, crashes, sends)
            for row, state, due_ms, attempts, crashes, sends in self._backend.query_rows(
                "SELECT s.id, s.state, s.due_ms, s.attempts, s.crashes, r.sends"
                " FROM shares s LEFT JOIN reveals r ON r.share_id = s.id AND s.state = 4"
            )
        }
        assert actual == {
            model.share_id: (
                model.state.value,
                model.due_ms,
                model.attempts,
                model.crashes,
                model.sends if model.state is ShareState.SENT else None,
            )
            for model in self.live.values()
        }
        counts: dict[bytes, dict[ShareState, int]] = {}
        states = [(name[0], model.state) for name, model in self.live.items()]
        for round_id, state in states + [(name[0], ShareState.CONFIRMED) for name in self.confirmed]:
            of_round = counts.setdefault(round_id, {})
            of_round[state] = of_round.get(state, 0) + 1
        assert self.run_until_complete(self.store.count_shares()) == counts
        assert self.run_until_complete(greatest_height(self.store)) == self.cursor


MAX_EXAMPLES = {"sqlite": 40, "encrypted sqlite": 10, "postgres": 5}
"""PostgreSQL gets fewer examples, because each write costs a network round trip."""


@pytest.mark.parametrize("kind", BACKEND_KINDS)
def test_store_matches_model_over_random_operations(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    numbers = count()

    class BackendModel(StoreModel):
        def create_backend(self) -> StoreBackend:
            if kind != "postgres":
                directory = tmp_path / f"{next(numbers)}"
                directory.mkdir()
                return SqliteBackend(directory, is_encrypted=kind == "encrypted sqlite")
            return PostgresBackend(request.getfixturevalue("cluster").url, f"model_{next(numbers)}")

    run_state_machine_as_test(
        BackendModel,
        settings=settings(
            max_examples=MAX_EXAMPLES[kind],
            stateful_step_count=60,
            derandomize=True,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
