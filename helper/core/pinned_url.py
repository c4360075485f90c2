"""URLs with a pinned SHA-256 of what they return, as wallets write them: `URL?checksum=sha256:HEX`. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256
from typing import Final
from urllib.parse import urlsplit

_NAME: Final = "checksum"
_CHECKSUM: Final = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class PinnedUrl:
    """A URL, and the SHA-256 that its content must have.

    Attributes:
        url: the URL to request, without the checksum.
        sha256: 32 bytes; None if the content is not pinned.
    """

    url: str
    sha256: bytes | None = None

    @classmethod
    def parse(cls, text: str) -> PinnedUrl:
        """Split a URL and the query parameter `checksum`. Other parameters stay in the URL.

        Raises:
            ValueError: the checksum is not `sha256:` and 64 lower-case hexadecimal digits, or given twice.
        """
        parts = urlsplit(text)
        parameters = parts.query.split("&")
        checksums = [parameter for parameter in parameters if parameter.partition("=")[0] == _NAME]
        if not checksums:
            return cls(text)
        match = _CHECKSUM.fullmatch(checksums[0].partition("=")[2])
        if match is None or len(checksums) > 1:
            raise ValueError("has a checksum that is not sha256: and 64 lower-case hexadecimal digits")
        query = "&".join(parameter for parameter in parameters if parameter not in checksums)
        return cls(parts._replace(query=query).geturl(), bytes.fromhex(match[1]))

    def matches(self, content: bytes) -> bool:
        """Whether content has the pinned SHA-256, or none is pinned."""
        return self.sha256 is None or sha256(content).digest() == self.sha256
