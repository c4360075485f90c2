"""Versions of chain nodes, and the circuits that they verify."""

from __future__ import annotations

from typing import get_args

import pytest

import proofs
from helper.circuits import GENERATIONS, circuit_for_version, is_newer_than_known, parse_version
from helper.config.sections import ProverSection


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("v1.5.0", (1, 5, 0)),
        ("1.5.0", (1, 5, 0)),
        ("v1.5.0-rc.0", (1, 5, 0)),
        ("v1.3.0-12-gabc", (1, 3, 0)),
        ("v1.3.0+build.7", (1, 3, 0)),
        ("v0.10.12", (0, 10, 12)),
        ("", None),
        ("v1.5", None),
        ("main-abc", None),
        ("v1.5.0garbage", None),
        ("v1.5.0\n", None),
        ("v1.5." + "9" * 5000, None),
        ("v\u0661.5.0", None),
    ],
)
def test_parse_version(text: str, expected: tuple[int, int, int] | None) -> None:
    assert parse_version(text) == expected


@pytest.mark.rule("N21")
@pytest.mark.parametrize(
    ("versions", "circuit"),
    [
        (("v0.5.42", "0.9.3", "v0.10.0", "v1.0.2", "v1.1.0", "v1.2.0", "v1.2.9"), "k11"),
        (("v1.3.0-rc.1", "v1.3.0", "v1.3.1", "v1.4.0", "v1.4.1", "v1.5.0-rc.0", "v1.5.0", "v1.6.0", "v1.7.0"), "k10"),
        (("v1.3.0-12-gabc", "v1.8.0", "v2.0.0-rc1"), "k10"),
        (("", "main-abc"), None),
    ],
)
def test_version_selects_circuit(versions: tuple[str, ...], circuit: str | None) -> None:
    assert {circuit_for_version(version) for version in versions} == {circuit}


@pytest.mark.rule("N21")
def test_versions_after_the_newest_known_one_are_newer() -> None:
    assert [is_newer_than_known(text) for text in ("v1.7.0", "v1.6.9", "", "v1.7.1", "v1.8.0-rc.0", "v2.0.0")] == [
        False,
        False,
        False,
        True,
        True,
        True,
    ]


def test_registry_and_setting_name_the_circuits_of_proofs() -> None:
    assert {name: generation.info for name, generation in GENERATIONS.items()} == proofs.CIRCUITS
    setting = ProverSection.model_fields["circuit"].annotation
    assert set(get_args(setting)) == {"auto", *GENERATIONS}
