"""Whether the circuit that is proven with is the one that the chain's nodes verify. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from helper.doctor.result import CheckResult, fail, ok, warn
from helper.reveal.circuit_selector import by_version


def judge_circuit(setting: str, current: str | None, versions: Sequence[str]) -> CheckResult:
    """The circuit against the nodes' versions.

    Args:
        setting: [prover] circuit: auto, k10 or k11.
        current: what the running daemon proves with; None where none runs.
        versions: of the nodes that answered, "" where a node tells none.
    """
    expected = {circuit for version in versions if (circuit := by_version(version)) is not None}
    told = ", ".join(sorted({version for version in versions if version})) or "none"
    facts = {"setting": setting, "current": current, "versions": sorted(set(versions)), "expected": sorted(expected)}
    if len(expected) > 1:
        advice = "The chain is being upgraded, or one node is not of its version: ask who runs it."
        return warn("circuit", f"the nodes are of versions with different circuits: {told}", advice, **facts)
    if setting != "auto":
        if expected and setting not in expected:
            (right,) = expected
            return fail(
                "circuit",
                f'[prover] circuit is "{setting}", and nodes of version {told} verify {right}',
                'Set [prover] circuit = "auto" and restart.',
                **facts,
            )
        return ok("circuit", f"{setting}, set by hand; the nodes' version: {told}", **facts)
    if current is not None and expected and current not in expected:
        advice = "If reveals are confirmed all is well: what the chain accepts counts, not its version."
        return warn("circuit", f"{current} was found to be accepted, though the version is {told}", advice, **facts)
    if expected:
        return ok("circuit", f"{next(iter(expected))}, by the nodes' version {told}", **facts)
    return ok("circuit", f"{current or 'k10 first'}; the nodes tell no version, the first reveals find it out", **facts)
