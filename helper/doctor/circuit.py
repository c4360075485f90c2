"""Checks that the nodes verify the selected circuit. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from helper.doctor.result import CheckResult, fail, ok, warn
from helper.reveal.circuit_selector import circuit_for_version


def judge_circuit(setting: str, current: str | None, versions: Sequence[str]) -> CheckResult:
    """Compare the circuit with the nodes' versions.

    Args:
        setting: [prover] circuit: auto, k10 or k11.
        current: circuit of the running helper; None if none runs.
        versions: versions of the nodes that responded; "" for a node that reports none.
    """
    expected = {circuit for version in versions if (circuit := circuit_for_version(version)) is not None}
    reported = ", ".join(sorted({version for version in versions if version})) or "none"
    facts = {"setting": setting, "current": current, "versions": sorted(set(versions)), "expected": sorted(expected)}
    if len(expected) > 1:
        advice = "The chain is being upgraded, or one node runs another version: ask its operator."
        return warn("circuit", f"the nodes' versions have different circuits: {reported}", advice, **facts)
    if setting != "auto":
        if expected and setting not in expected:
            (verified,) = expected
            return fail(
                "circuit",
                f'[prover] circuit is "{setting}", and nodes of version {reported} verify {verified}',
                'Set [prover] circuit = "auto" and restart.',
                **facts,
            )
        return ok("circuit", f"{setting}, set in [prover] circuit; node versions: {reported}", **facts)
    if current is not None and expected and current not in expected:
        advice = "If reveals are confirmed, nothing needs to be done: acceptance takes precedence over versions."
        return warn(
            "circuit", f"the chain accepts {current}, although the nodes report version {reported}", advice, **facts
        )
    if expected:
        return ok("circuit", f"{next(iter(expected))}, according to node version {reported}", **facts)
    return ok(
        "circuit", f"{current or 'k10 first'}; the nodes report no version, the first reveals determine it", **facts
    )
