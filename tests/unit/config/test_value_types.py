"""Types of settings: URLs with a pinned checksum, as wallets write them."""

from __future__ import annotations

from hashlib import sha256

import pytest

from helper.config.value_types import PinnedUrl

HEX = "0a" * 32
PLAIN = "https://example.org/static.json"


@pytest.mark.parametrize(
    ("text", "url"),
    [
        (f"{PLAIN}?checksum=sha256:{HEX}", PLAIN),
        (f"{PLAIN}?a=b%20c&checksum=sha256:{HEX}&d=", f"{PLAIN}?a=b%20c&d="),
    ],
)
def test_parse_removes_checksum_and_keeps_other_parameters(text: str, url: str) -> None:
    assert PinnedUrl.parse(text) == PinnedUrl(url, bytes.fromhex(HEX))


@pytest.mark.parametrize("text", [PLAIN, f"{PLAIN}?checksums=1", f"{PLAIN}?a=checksum", f"{PLAIN}#checksum=sha256:"])
def test_parse_without_checksum_keeps_the_url(text: str) -> None:
    assert PinnedUrl.parse(text) == PinnedUrl(text, None)


@pytest.mark.parametrize(
    "query",
    [
        "checksum",
        "checksum=",
        f"checksum={HEX}",
        "checksum=sha256:",
        f"checksum=sha512:{HEX}",
        f"checksum=sha256:{HEX[:-1]}",
        f"checksum=sha256:{HEX.upper()}",
        f"checksum=sha256:{HEX}0",
        f"checksum=sha256:{HEX}&checksum=sha256:{HEX}",
        f"checksum=sha256%3A{HEX}",
    ],
)
def test_parse_invalid_or_repeated_checksum_is_refused(query: str) -> None:
    with pytest.raises(ValueError, match="not sha256: and 64 lower-case hexadecimal digits"):
        PinnedUrl.parse(f"{PLAIN}?{query}")


def test_matches_compares_the_hash_of_the_content() -> None:
    pinned = PinnedUrl(PLAIN, sha256(b"content").digest())
    assert pinned.matches(b"content")
    assert not pinned.matches(b"content ")
    assert PinnedUrl(PLAIN).matches(b"anything")
