"""Texts: untrusted ones, times and durations, addresses."""

from __future__ import annotations

import sys
import unicodedata

import pytest

from helper.core.text_forms import clean_text, format_duration, format_time, is_loopback


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("out of gas\x00", "out of gas "),
        ("\x1b[2Jerased", " [2Jerased"),
        ("\x9b2J", " 2J"),
        ("one\r\ntwo\u2028three", "one  two three"),
        ("a\u202eb\u2066c", "a b c"),
        ("a\ud800b\udfffc", "a b c"),
        ("", ""),
    ],
)
def test_clean_text_unsafe_character_becomes_a_space(text: str, cleaned: str) -> None:
    assert clean_text(text) == cleaned


@pytest.mark.parametrize("text", ["plain", "Größe", "شما\u200cهم", "👩\u200d🚀", "e\u0301", "日本", "a\u00a0b"])
def test_clean_text_letters_of_all_scripts_are_kept(text: str) -> None:
    assert clean_text(text) == text


def test_clean_text_leaves_no_control_character_or_surrogate() -> None:
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    cleaned = clean_text(every)
    assert not {unicodedata.category(char) for char in cleaned} & {"Cc", "Cs", "Zl", "Zp"}
    assert len(cleaned) == len(every)
    cleaned.encode()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-0.001, "unknown"),
        (0, "1970-01-01 00:00:00"),
        (1795268195.25, "2026-11-21 13:36:35.250"),
        (2**63, "9223372036854775808"),
    ],
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


@pytest.mark.parametrize("text", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "::ffff:7f00:1"])
def test_is_loopback_of_loopback_address_is_true(text: str) -> None:
    assert is_loopback(text)


@pytest.mark.parametrize("text", ["", "localhost", "0.0.0.0", "::", "::ffff:192.0.2.1", "192.0.2.1", "/run/x"])
def test_is_loopback_of_anything_else_is_false(text: str) -> None:
    assert not is_loopback(text)
