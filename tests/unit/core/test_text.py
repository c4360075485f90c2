"""Untrusted text: removed and preserved characters."""

from __future__ import annotations

import sys
import unicodedata

import pytest

from helper.core.text import clean_text


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
