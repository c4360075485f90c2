"""Comparison of IP addresses."""

from __future__ import annotations

import pytest

from helper.core.addresses import is_loopback


@pytest.mark.parametrize("text", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "::ffff:7f00:1"])
def test_is_loopback_of_loopback_address_is_true(text: str) -> None:
    assert is_loopback(text)


@pytest.mark.parametrize("text", ["", "localhost", "0.0.0.0", "::", "::ffff:192.0.2.1", "192.0.2.1", "/run/x"])
def test_is_loopback_of_anything_else_is_false(text: str) -> None:
    assert not is_loopback(text)
