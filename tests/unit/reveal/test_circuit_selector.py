"""Selection of the circuit generation, and the effect of refusals."""

from __future__ import annotations

import pytest

from helper.errors import StoreFull
from helper.reveal.circuit_selector import PAUSE_SECONDS, CircuitSelector
from proofs import CircuitError
from tests.support.clock import FakeClock


class FakeMeta(dict[str, str]):
    """Stores the circuit that a chain accepted, as the store's meta table does."""

    async def put(self, key: str, value: str) -> None:
        self[key] = value


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def meta() -> FakeMeta:
    return FakeMeta()


def create_selector(setting: str, clock: FakeClock, memory: FakeMeta) -> CircuitSelector:
    return CircuitSelector(setting, clock=clock, store_accepted=memory.put)


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
def test_last_accepted_circuit_is_preferred(
    clock: FakeClock, meta: FakeMeta, version: str, stored: str | None, expected: str
) -> None:
    auto = create_selector("auto", clock, meta)
    auto.select_initial("svote-1", version, stored)
    assert auto.current == expected
    assert set(auto.required_circuits) == {"k10", "k11"}


@pytest.mark.anyio
async def test_refused_valid_proof_switches_circuit_once_and_is_stored(clock: FakeClock, meta: FakeMeta) -> None:
    auto = create_selector("auto", clock, meta)
    auto.select_initial("svote-1", "", None)
    auto.record_refused(1, "k10")
    assert auto.current == "k11"
    auto.record_refused(2, "k10")
    assert auto.current == "k11", "a second refusal of the same generation does not switch back"
    await auto.record_accepted("k11")
    assert meta == {"circuit:svote-1": "k11"}
    restarted = create_selector("auto", clock, meta)
    restarted.select_initial("svote-1", "", meta[CircuitSelector.storage_key("svote-1")])
    assert restarted.current == "k11"


def test_share_refused_with_both_circuits_pauses_queue(clock: FakeClock, meta: FakeMeta) -> None:
    auto = create_selector("auto", clock, meta)
    auto.select_initial("svote-1", "", None)
    auto.record_refused(1, "k10")
    assert auto.pause_reason is None
    auto.record_refused(1, "k11")
    assert auto.pause_reason is not None
    assert "both" in str(auto.pause_reason)
    assert auto.current == "k10", "the other generation is tried after the pause"


@pytest.mark.anyio
async def test_failed_store_of_accepted_circuit_is_retried(clock: FakeClock, meta: FakeMeta) -> None:
    full = True

    async def remember(key: str, value: str) -> None:
        if full:
            raise StoreFull("no space")
        await meta.put(key, value)

    auto = CircuitSelector("auto", clock=clock, store_accepted=remember)
    auto.select_initial("svote-1", "", None)
    with pytest.raises(StoreFull):
        await auto.record_accepted("k10")
    full = False
    await auto.record_accepted("k10")
    assert meta == {"circuit:svote-1": "k10"}


@pytest.mark.anyio
async def test_refused_configured_circuit_pauses_queue_with_reason(clock: FakeClock, meta: FakeMeta) -> None:
    by_hand = create_selector("k11", clock, meta)
    by_hand.select_initial("svote-1", "v1.3.0", "k10")
    assert (by_hand.current, by_hand.required_circuits) == ("k11", ("k11",))
    by_hand.record_refused(1, "k11")
    assert by_hand.current == "k11"
    assert by_hand.pause_reason is not None
    assert '"k10"' in str(by_hand.pause_reason)
    clock.advance(PAUSE_SECONDS)
    assert by_hand.pause_reason is None, "one share retries from time to time: the chain may have upgraded"
    by_hand.record_refused(1, "k11")
    await by_hand.record_accepted("k11")
    assert by_hand.pause_reason is None
    assert meta == {}


@pytest.mark.anyio
async def test_selection_is_tentative_until_chain_accepts_circuit(clock: FakeClock, meta: FakeMeta) -> None:
    auto = create_selector("auto", clock, meta)
    assert not auto.is_current_unproven, "no chain is known yet"
    auto.select_initial("svote-1", "", None)
    assert auto.is_current_unproven
    auto.record_refused(1, "k10")
    assert (auto.current, auto.is_current_unproven) == ("k11", True)
    await auto.record_accepted("k11")
    assert not auto.is_current_unproven
    assert auto.is_unproven("k10")
    auto.record_refused(2, "k11")
    assert auto.is_current_unproven, "one reveal detects an upgrade of the chain"


def test_configured_or_stored_selection_is_not_tentative(clock: FakeClock, meta: FakeMeta) -> None:
    by_hand, stored = create_selector("k11", clock, meta), create_selector("auto", clock, meta)
    by_hand.select_initial("svote-1", "", None)
    stored.select_initial("svote-1", "v1.2.0", "k10")
    assert not by_hand.is_current_unproven
    assert not stored.is_current_unproven


def test_prover_host_reads_accepted_circuit(clock: FakeClock, meta: FakeMeta) -> None:
    prover = create_selector("auto", clock, meta)
    prover.select_initial("svote-1", "", None)
    prover.apply_state("k11", None)
    assert (prover.current, prover.is_current_unproven) == ("k11", True)
    prover.apply_state("k11", "k11")
    assert not prover.is_current_unproven


@pytest.mark.parametrize("setting", ["auto", "k10"])
def test_paused_selector_allows_trial_after_block(setting: str, clock: FakeClock, meta: FakeMeta) -> None:
    selector = create_selector(setting, clock, meta)
    selector.select_initial("svote-1", "", None)
    selector.note_block()
    for _ in range(2):
        for circuit in ("k10", "k11"):
            selector.record_refused(1, circuit)
        assert selector.blocked_reason is not None, "a block before the refusal is no evidence"
        selector.note_block()
        assert selector.blocked_reason is None
        assert selector.pause_reason is not None, "it is reported until a proof is accepted"


@pytest.mark.anyio
@pytest.mark.rule("N21")
@pytest.mark.parametrize(("stored", "current"), [(None, "k10"), ("k10", "k10"), ("k11", "k11")])
async def test_version_newer_than_known_needs_one_trial_after_each_start(
    clock: FakeClock, meta: FakeMeta, stored: str | None, current: str
) -> None:
    auto = create_selector("auto", clock, meta)
    auto.select_initial("svote-1", "v1.8.0", stored)
    assert (auto.current, auto.is_current_unproven) == (current, True)
    await auto.record_accepted(current)
    assert not auto.is_current_unproven
    assert meta == {"circuit:svote-1": current}


def test_share_of_unknown_kind_has_no_circuit(clock: FakeClock, meta: FakeMeta) -> None:
    auto = create_selector("auto", clock, meta)
    auto.select_initial("svote-1", "v1.7.0", None)
    assert auto.circuit_for("") == "k10"
    with pytest.raises(CircuitError):
        auto.circuit_for("hidden-choice")
