"""The search for erased data finds content of a database file, and nothing else."""

from __future__ import annotations

import pytest

from tests.support.erasure_check import find_outside_public

POSITION = b"\x01\x11\x71"
BLOB = bytes(range(0x71, 0x91))
PAGE = 4096


@pytest.mark.parametrize(
    ("page", "found"),
    [
        (b"\0" * 100 + POSITION, [100]),
        (b"\0" * 4 + POSITION, [4]),
        (b"\0" * 4 + BLOB[:20] + POSITION + BLOB[20:], [24]),
        (b"\0\0\x01\x11" + BLOB, []),  # the number of the next page, and a blob that begins with the last byte
    ],
)
def test_position_is_found_unless_it_is_a_page_number(page: bytes, found: list[int]) -> None:
    header = (b"\0" * 28 + b"\0\0\0\2").ljust(PAGE, b"\0")
    files = header + page.ljust(PAGE, b"\0")
    assert find_outside_public(files, POSITION, [BLOB]) == [PAGE + at for at in found]
    log = b"\0\0" + POSITION  # at the place of a page's number, but behind the database
    assert find_outside_public(files + log, POSITION, [BLOB]) == [*(PAGE + at for at in found), 2 * PAGE + 2]
    assert find_outside_public(files, BLOB[:4], [BLOB]) == []
