"""Selection of the circuit generation, and the effect of refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from helper.chain.chain_data import Anchor, Block, BlockHead, TxResult
from helper.chain.reveal_transaction import RevealMessage
from helper.errors import ChainUnavailable, StoreError, StoreFull
from helper.reveal.circuit_choice import PAUSE_SECONDS, CircuitChoice
from proofs import CircuitError, Statement
from tests.support.clock import FakeClock


class FakeMeta(dict[str, str]):
    """Stores the circuit that a chain accepted, as the store's meta table does, for choices with this clock."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()

    async def put(self, key: str, value: str) -> None:
        self[key] = value

    def create(self, setting: str = "auto") -> CircuitChoice:
        return CircuitChoice(setting, clock=self.clock, store_counted=self.put)

    def select(self, setting: str = "auto", *, version: str = "", stored: str | None = None) -> CircuitChoice:
        """Create a choice whose chain is known."""
        choice = self.create(setting)
        choice.select_initial("svote-1", version, stored)
        return choice


NODES = frozenset({"first:80", "second:80"})


@pytest.fixture
def meta() -> FakeMeta:
    return FakeMeta()


@pytest.mark.parametrize(
    ("version", "stored", "expected"),
    [
        ("v1.2.0", None, "k11"),
        ("", None, "k10"),
        ("v1.2.0", "k10", "k10"),
        ("", "k11", "k11"),
        ("v1.3.0", "k9", "k10"),
    ],
)
def test_last_accepted_circuit_is_preferred(meta: FakeMeta, version: str, stored: str | None, expected: str) -> None:
    auto = meta.select(version=version, stored=stored)
    assert auto.current == expected
    assert set(auto.required_circuits) == {"k10", "k11"}


async def test_refused_valid_proof_switches_circuit_once_and_is_stored(meta: FakeMeta) -> None:
    auto = meta.select()
    auto.record_refused("k10", 100, NODES, needed=2)
    assert auto.current == "k11"
    auto.record_refused("k10", 100, NODES, needed=2)
    assert auto.current == "k11", "a second refusal of the same generation does not switch back"
    await auto.record_counted("k11", 101)
    assert meta == {"circuit:svote-1": "k11"}
    restarted = meta.select(stored=meta[CircuitChoice.storage_key("svote-1")])
    assert restarted.current == "k11"


def test_share_refused_with_both_circuits_pauses_queue(meta: FakeMeta) -> None:
    auto = meta.select()
    auto.record_refused("k10", 100, NODES, needed=2)
    assert auto.pause_reason is None
    auto.record_refused("k11", 100, NODES, needed=2)
    assert auto.pause_reason is not None
    assert "both" in str(auto.pause_reason)
    assert auto.current == "k10", "the other generation is tried after the pause"


def test_nodes_of_which_each_refuses_another_circuit_pause_nothing(meta: FakeMeta) -> None:
    auto = meta.select()
    auto.record_refused("k10", 100, {"first:80"}, needed=2)
    auto.record_refused("k11", 100, {"second:80"}, needed=2)
    assert auto.pause_reason is None
    auto.record_refused("k10", 100, {"second:80"}, needed=2)
    auto.record_refused("k11", 100, {"first:80"}, needed=2)
    assert auto.pause_reason is not None


async def test_failed_store_of_accepted_circuit_is_retried(meta: FakeMeta) -> None:
    full = True

    async def remember(key: str, value: str) -> None:
        if full:
            raise StoreFull("no space")
        await meta.put(key, value)

    auto = CircuitChoice("auto", clock=meta.clock, store_counted=remember)
    auto.select_initial("svote-1", "", None)
    with pytest.raises(StoreFull):
        await auto.record_counted("k10", 101)
    full = False
    await auto.record_counted("k10", 101)
    assert meta == {"circuit:svote-1": "k10"}


async def test_refused_configured_circuit_pauses_queue_with_reason(meta: FakeMeta) -> None:
    by_hand = meta.select("k11", version="v1.3.0", stored="k10")
    assert (by_hand.current, by_hand.required_circuits) == ("k11", ("k11",))
    by_hand.record_refused("k11", 100, NODES, needed=2)
    assert by_hand.current == "k11"
    assert by_hand.pause_reason is not None
    assert '"k10"' in str(by_hand.pause_reason)
    meta.clock.advance(PAUSE_SECONDS)
    assert by_hand.pause_reason is None, "one share retries from time to time: the chain may have upgraded"
    by_hand.record_refused("k11", 100, NODES, needed=2)
    await by_hand.record_counted("k11", 101)
    assert by_hand.pause_reason is None
    assert meta == {}


async def test_selection_is_tentative_until_chain_accepts_circuit(meta: FakeMeta) -> None:
    auto = meta.create()
    assert not auto.is_current_unproven, "no chain is known yet"
    auto.select_initial("svote-1", "", None)
    assert auto.is_current_unproven
    auto.record_refused("k10", 100, NODES, needed=2)
    assert (auto.current, auto.is_current_unproven) == ("k11", True)
    await auto.record_counted("k11", 101)
    assert not auto.is_current_unproven
    assert auto.is_unproven("k10")
    auto.record_refused("k11", 100, NODES, needed=2)
    assert auto.is_current_unproven, "one reveal detects an upgrade of the chain"


async def test_response_of_a_node_changes_the_choice_only_until_a_reveal_is_counted(meta: FakeMeta) -> None:
    auto = meta.select(stored="k10")
    auto.record_refused("k10", 100, NODES, needed=2)
    auto.record_accepted("k11", "a")
    assert (auto.current, auto.is_current_unproven, meta) == ("k11", False, {})
    await auto.record_counted("k10", 101)
    assert (auto.current, auto.is_current_unproven, meta) == ("k10", False, {"circuit:svote-1": "k10"})
    auto.record_accepted("k11", "a")
    assert auto.current == "k10"


def test_node_that_accepts_every_proof_does_not_change_the_choice(meta: FakeMeta) -> None:
    auto = meta.select(stored="k11")
    auto.refusers["k11"] = {"honest"}
    auto.record_refused("k11", 100, NODES, needed=2)
    for circuit in ("k10", "k11", "k10"):
        auto.record_accepted(circuit, "false")
        assert (auto.current, auto.is_current_unproven) == ("k10", False)
    auto.refusers["k10"] = {"honest"}
    auto.record_accepted("k11", "honest")
    assert (auto.current, auto.refusers) == ("k11", {"k10": {"honest"}, "k11": set()}), "the chain has changed it back"


def test_configured_or_stored_selection_is_not_tentative(meta: FakeMeta) -> None:
    by_hand, stored = meta.select("k11"), meta.select(version="v1.2.0", stored="k10")
    assert not by_hand.is_current_unproven
    assert not stored.is_current_unproven


def test_prover_host_reads_accepted_circuit(meta: FakeMeta) -> None:
    prover = meta.select()
    sender = meta.select(version="v1.2.0")
    prover.apply_state(sender.publish_state())
    assert (prover.current, prover.is_current_unproven) == ("k11", True)
    sender.record_accepted("k11", "a")
    prover.apply_state(sender.publish_state())
    assert not prover.is_current_unproven


@pytest.mark.parametrize("setting", ["auto", "k10"])
def test_paused_selector_allows_trial_after_block(setting: str, meta: FakeMeta) -> None:
    selector = meta.select(setting)
    selector.note_block()
    for _ in range(2):
        for circuit in ("k10", "k11"):
            selector.record_refused(circuit, 100, NODES, needed=2)
        assert selector.blocked_reason is not None, "a block before the refusal is no evidence"
        selector.note_block()
        assert selector.blocked_reason is None
        assert selector.pause_reason is not None, "it is reported until a proof is accepted"


@pytest.mark.rule("N21")
@pytest.mark.parametrize(("stored", "current"), [(None, "k10"), ("k10", "k10"), ("k11", "k11")])
async def test_version_newer_than_known_needs_one_trial_after_each_start(
    meta: FakeMeta, stored: str | None, current: str
) -> None:
    auto = meta.select(version="v1.8.0", stored=stored)
    assert (auto.current, auto.is_current_unproven) == (current, True)
    await auto.record_counted(current, 101)
    assert not auto.is_current_unproven
    assert meta == {"circuit:svote-1": current}


def test_share_of_unknown_kind_has_no_circuit(meta: FakeMeta) -> None:
    auto = meta.select(version="v1.7.0")
    assert auto.circuit_for("") == "k10"
    with pytest.raises(CircuitError):
        auto.circuit_for("hidden-choice")


# ---------------------------------------------------------------- counted reveals


class Chain:
    """A block with one reveal, as two nodes serve it, and what the store and the trees know of it.

    Attributes:
        is_lie: whether only one node reports the result.
    """

    def __init__(self) -> None:
        self.message = RevealMessage(b"n" * 32, bytes(64), 1, 0, b"proof", b"r" * 32, 90)
        self.result: TxResult | None = TxResult(0, 101, "")
        self.is_spent, self.has_anchor, self.is_own, self.valid_circuit = True, True, False, "k11"
        self.is_lie = False
        self.blocks_read: list[int] = []

    async def learn(self, choice: CircuitChoice, height: int = 101) -> None:
        honest = AsyncMock(return_value=None if self.is_lie else self.result)
        nodes = [SimpleNamespace(client=self), SimpleNamespace(client=SimpleNamespace(tx=honest))]
        chain = SimpleNamespace(
            call=self.call, is_spent=self.is_counted, anchor_at=self.anchor_at, usable_nodes=nodes, needed=2
        )
        given: Any = dict.fromkeys(("node_pool", "store", "trees"), chain)
        given["verifier"] = SimpleNamespace(root_of=self.root_of, verify=self.verify)
        await choice.learn(height, **given)

    async def call(self, request: Any, **_: Any) -> Any:
        return await request(self)

    async def block(self, height: int) -> Block:
        self.blocks_read.append(height)
        return Block(BlockHead("svote-1", height, 1.0), (b"another transaction", self.message.to_tx()))

    async def tx(self, tx_hash: bytes) -> TxResult | None:
        assert tx_hash == self.message.tx_hash()
        return self.result

    async def is_counted(self, round_id: bytes, nullifier: bytes) -> bool:
        assert (round_id, nullifier) == (self.message.round_id, self.message.nullifier)
        return self.is_spent

    def anchor_at(self, round_id: bytes, height: int) -> Anchor | None:
        return Anchor(height, 1, b"t" * 32) if self.has_anchor else None

    def root_of(self, proof: bytes) -> bytes | None:
        return b"o" * 32 if self.is_own and proof == b"proof" else None

    async def verify(self, circuit: str, proof: bytes, statement: Statement) -> bool:
        root = (b"o" if self.is_own else b"t") * 32
        return (circuit, proof, statement.root) == (self.valid_circuit, b"proof", root)


@pytest.mark.parametrize(
    ("facts", "learnt"),
    [
        ({}, "k11"),
        ({"valid_circuit": "k10"}, "k10"),
        ({"valid_circuit": "another"}, None),
        ({"is_spent": False}, None),
        ({"has_anchor": False}, None),
        ({"has_anchor": False, "is_own": True}, "k11"),
        ({"is_own": True}, "k11"),
        ({"result": None}, None),
        ({"is_lie": True}, None),
        ({"result": TxResult(1, 101, "invalid zero-knowledge proof")}, None),
        ({"result": TxResult(0, 100, "")}, None),  # the same bytes were counted in an earlier block
    ],
)
async def test_circuit_is_learnt_from_a_reveal_that_the_block_counted(
    meta: FakeMeta, facts: dict[str, Any], learnt: str | None
) -> None:
    chain, auto = Chain(), meta.create()
    vars(chain).update(facts)
    await chain.learn(auto)
    assert chain.blocks_read == [], "no chain is known yet"
    auto.select_initial("svote-1", "", None)
    await chain.learn(auto)
    assert (meta.get("circuit:svote-1"), auto.is_current_unproven) == (learnt, learnt is None)
    for height in (101, 102):
        await chain.learn(auto, height)
    assert chain.blocks_read == ([101] if learnt else [101, 102]), "blocks are read only until it is known"


@pytest.mark.parametrize(
    ("source", "error"), [("block", ChainUnavailable("no node responded")), ("is_counted", StoreError("I/O error"))]
)
async def test_block_that_could_not_be_read_is_read_again(
    meta: FakeMeta, monkeypatch: pytest.MonkeyPatch, source: str, error: Exception
) -> None:
    chain, auto = Chain(), meta.select()
    with monkeypatch.context() as patch:
        patch.setattr(chain, source, AsyncMock(side_effect=error))
        await chain.learn(auto)
    assert auto.is_current_unproven
    await chain.learn(auto)
    assert not auto.is_current_unproven


async def test_blocks_before_a_refusal_and_for_a_configured_circuit_teach_nothing(meta: FakeMeta) -> None:
    chain, auto, by_hand = Chain(), meta.select(stored="k10"), meta.select("k10", stored="k10")
    auto.record_refused("k10", 101, NODES, needed=2)
    await chain.learn(auto, 101)
    await chain.learn(by_hand, 101)
    assert (chain.blocks_read, auto.current) == ([], "k11")
