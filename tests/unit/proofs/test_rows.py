"""The row check's formula, which existing databases depend on."""

from __future__ import annotations

import struct
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proofs import row_check, row_checks

KEY = b"k" * 32
LETTERS = {int: b"i", bytes: b"b", str: b"s", type(None): b"n"}
Column = int | bytes | str | None

columns = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.binary(max_size=600),
    st.text(st.characters(), max_size=40),
)
rows = st.lists(columns, max_size=30).map(tuple)


def reference_check(key: bytes, row: tuple[Column, ...]) -> bytes:
    """The check as specified, field by field."""
    numbers = [value for value in row if isinstance(value, int)]
    texts = [value for value in row if isinstance(value, bytes)]
    texts += [value.encode("utf-8", "surrogatepass") for value in row if isinstance(value, str)]
    letters = b"".join(LETTERS[type(value)] for value in row).rstrip(LETTERS[type(None)])
    kinds = b"%d:" % len(letters) + letters
    numbers_packed = struct.pack(f">{len(numbers) + len(texts)}q", *numbers, *map(len, texts))
    data = b"".join((kinds, numbers_packed, *texts))
    return blake2b(data, digest_size=8, key=key, person=b"svote-row").digest()


@given(rows, st.binary(max_size=64))
def test_row_check_equals_reference(row: tuple[Column, ...], key: bytes) -> None:
    assert row_check(key, row) == reference_check(key, row)


@given(st.lists(rows, max_size=5))
def test_row_checks_of_batch_equal_single_checks(rows: list[tuple[Column, ...]]) -> None:
    assert row_checks(KEY, list(rows)) == [row_check(KEY, row) for row in rows]


def test_row_check_depends_on_text_boundaries() -> None:
    assert row_check(KEY, ("ab", "c")) != row_check(KEY, ("a", "bc"))
    assert row_check(KEY, (b"a", "b")) != row_check(KEY, ("a", b"b"))
    assert row_check(KEY, (1, None)) != row_check(KEY, (None, 1))


def test_nulls_at_the_end_do_not_change_the_row_check() -> None:
    """A column that a migration adds has NULL in every row that is already there."""
    assert row_check(KEY, (1, "a", None, None)) == row_check(KEY, (1, "a"))
    assert row_check(KEY, (1, "a", None, 0)) != row_check(KEY, (1, "a"))


@pytest.mark.parametrize("value", [1.0, True, [1], bytearray(b"1")])
def test_row_check_of_unsupported_type_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match=rf"^unsupported column type: {type(value).__name__}$"):
        row_check(KEY, (1, value))
    with pytest.raises(TypeError):
        row_checks(KEY, [(1,), (value,)])


def test_row_check_of_oversized_value_is_refused() -> None:
    with pytest.raises(OverflowError):
        row_check(KEY, (2**63,))
    with pytest.raises(ValueError, match="too long"):
        row_check(b"k" * 65, (1,))
    assert len(row_check(b"k" * 64, (2**63 - 1, -(2**63)))) == 8
