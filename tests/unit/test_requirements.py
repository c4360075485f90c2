"""Product and test environments pin the same versions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "requirements"
PIN = re.compile(r"^([A-Za-z0-9._\[\]-]+)==([^ ;]+)", re.MULTILINE)


def read_pins(name: str) -> dict[str, str]:
    return dict(PIN.findall((FOLDER / name).read_text()))


@pytest.mark.parametrize("name", ["base.txt", "postgres.txt"])
def test_pins_equal_installed_versions(name: str) -> None:
    shipped, tested = read_pins(name), read_pins("dev.txt")
    assert len(shipped) > 30
    assert {package: (version, tested.get(package)) for package, version in shipped.items()} == {
        package: (version, version) for package, version in shipped.items()
    }
