"""Which circuit generation is used, and what a refusal does to the choice."""

from __future__ import annotations

import pytest

from helper.errors import StoreFull
from helper.reveal.circuit_selector import PAUSE_SECONDS, CircuitSelector, by_version
from tests.support.clock import FakeClock


class Memory(dict[str, str]):
    """Remembers what a chain accepted, as the store's meta table does."""

    async def put(self, key: str, value: str) -> None:
        self[key] = value


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def memory() -> Memory:
    return Memory()


def choice(setting: str, clock: FakeClock, memory: Memory) -> CircuitSelector:
    return CircuitSelector(setting, clock=clock, remember=memory.put)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("v1.3.0", "k10"),
        ("1.3.0", "k10"),
        ("v1.2.9", "k11"),
        ("0.5.42", "k11"),
        ("v2.0.0-rc1", "k10"),
        ("", None),
        ("main-abc", None),
    ],
)
def test_the_version_tells_the_generation_where_it_tells_anything(version: str, expected: str | None) -> None:
    assert by_version(version) == expected


@pytest.mark.parametrize(
    ("version", "remembered", "expected"),
    [
        ("v1.2.0", None, "k11"),
        ("", None, "k10"),
        ("v1.2.0", "k10", "k10"),
        ("", "k11", "k11"),
        ("v1.3.0", "k9", "k10"),
    ],
)
def test_what_the_chain_accepted_before_comes_first(
    clock: FakeClock, memory: Memory, version: str, remembered: str | None, expected: str
) -> None:
    auto = choice("auto", clock, memory)
    auto.begin("svote-1", version, remembered)
    assert auto.current == expected
    assert set(auto.needed) == {"k10", "k11"}


@pytest.mark.anyio
async def test_a_refused_valid_proof_switches_once_and_the_accepted_generation_is_remembered(
    clock: FakeClock, memory: Memory
) -> None:
    auto = choice("auto", clock, memory)
    auto.begin("svote-1", "", None)
    auto.refused(1, "k10")
    assert auto.current == "k11"
    auto.refused(2, "k10")
    assert auto.current == "k11", "a second refusal of the same generation does not switch back"
    await auto.accepted("k11")
    assert memory == {"circuit:svote-1": "k11"}
    again = choice("auto", clock, memory)
    again.begin("svote-1", "", memory[CircuitSelector.key("svote-1")])
    assert again.current == "k11"


def test_a_share_refused_with_both_generations_pauses_the_queue(clock: FakeClock, memory: Memory) -> None:
    auto = choice("auto", clock, memory)
    auto.begin("svote-1", "", None)
    auto.refused(1, "k10")
    assert auto.paused is None
    auto.refused(1, "k11")
    assert auto.paused is not None
    assert "both" in str(auto.paused)
    assert auto.current == "k10", "and the other one is tried after the pause"


@pytest.mark.anyio
async def test_what_could_not_be_remembered_is_remembered_later(clock: FakeClock, memory: Memory) -> None:
    full = True

    async def remember(key: str, value: str) -> None:
        if full:
            raise StoreFull("no space")
        await memory.put(key, value)

    auto = CircuitSelector("auto", clock=clock, remember=remember)
    auto.begin("svote-1", "", None)
    with pytest.raises(StoreFull):
        await auto.accepted("k10")
    full = False
    await auto.accepted("k10")
    assert memory == {"circuit:svote-1": "k10"}


@pytest.mark.anyio
async def test_a_generation_set_by_hand_pauses_the_queue_and_says_why(clock: FakeClock, memory: Memory) -> None:
    by_hand = choice("k11", clock, memory)
    by_hand.begin("svote-1", "v1.3.0", "k10")
    assert (by_hand.current, by_hand.needed) == ("k11", ("k11",))
    by_hand.refused(1, "k11")
    assert by_hand.current == "k11"
    assert by_hand.paused is not None
    assert '"k10"' in str(by_hand.paused)
    clock.advance(PAUSE_SECONDS)
    assert by_hand.paused is None, "one share tries again now and then: the chain may have upgraded"
    by_hand.refused(1, "k11")
    await by_hand.accepted("k11")
    assert by_hand.paused is None
    assert memory == {}


@pytest.mark.anyio
async def test_choice_is_a_guess_until_the_chain_accepts_the_circuit(clock: FakeClock, memory: Memory) -> None:
    auto = choice("auto", clock, memory)
    assert not auto.is_guess, "no chain is known yet"
    auto.begin("svote-1", "", None)
    assert auto.is_guess
    auto.refused(1, "k10")
    assert (auto.current, auto.is_guess) == ("k11", True)
    await auto.accepted("k11")
    assert not auto.is_guess
    assert auto.is_unproven("k10")
    auto.refused(2, "k11")
    assert auto.is_guess, "an upgrade of the chain is found out by one reveal too"


def test_choice_by_hand_or_remembered_is_no_guess(clock: FakeClock, memory: Memory) -> None:
    by_hand, remembered = choice("k11", clock, memory), choice("auto", clock, memory)
    by_hand.begin("svote-1", "", None)
    remembered.begin("svote-1", "v1.2.0", "k10")
    assert not by_hand.is_guess
    assert not remembered.is_guess


def test_host_that_only_proves_hears_which_circuit_was_accepted(clock: FakeClock, memory: Memory) -> None:
    prover = choice("auto", clock, memory)
    prover.begin("svote-1", "", None)
    prover.hear("k11", None)
    assert (prover.current, prover.is_guess) == ("k11", True)
    prover.hear("k11", "k11")
    assert not prover.is_guess


@pytest.mark.parametrize("setting", ["auto", "k10"])
def test_paused_selector_allows_a_trial_once_a_block_came(setting: str, clock: FakeClock, memory: Memory) -> None:
    selector = choice(setting, clock, memory)
    selector.begin("svote-1", "", None)
    selector.note_block()
    for _ in range(2):
        for circuit in ("k10", "k11"):
            selector.refused(1, circuit)
        assert selector.blocked is not None, "a block before the refusal says nothing"
        selector.note_block()
        assert selector.blocked is None
        assert selector.paused is not None, "it is reported until a proof is accepted"
