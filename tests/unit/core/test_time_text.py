"""Formats of times and durations."""

from __future__ import annotations

import pytest

from helper.core.time_text import format_duration, format_time


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "1970-01-01 00:00:00"), (1795268195.25, "2026-11-21 13:36:35.250"), (2**63, "9223372036854775808")],
)
def test_format_time_is_utc(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


def test_format_time_local_appends_the_time_zone() -> None:
    text = format_time(1795268195, local=True)
    assert text[:4] == "2026"
    assert len(text.split(" ")) == 3
    assert format_time(2**63, local=True) == "9223372036854775808"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (-1, "ended"),
        (0, "0 s"),
        (0.4, "0 s"),
        (59, "59 s"),
        (119, "119 s"),
        (600, "10 min"),
        (3061, "51 min"),
        (9000, "2.5 h"),
        (200_000, "2.3 d"),
        (864_000, "10.0 d"),
    ],
)
def test_format_duration_fits_in_eight_columns(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text
    assert len(text) <= 8
