"""Versions of the vote chain, as nodes report them. Pure."""

from __future__ import annotations

import re
from typing import Final

Version = tuple[int, int, int]

LATEST_KNOWN_VERSION: Final[Version] = (1, 7, 0)
"""Newest chain version whose circuit is known to this release. Newer ones are assumed to verify the same circuit."""

# A release tag, its pre-releases (v1.5.0-rc.0), builds after it (v1.3.0-12-gabc), with or without the "v". The number
# of digits is limited because the text comes from a node.
_VERSION: Final = re.compile(r"v?([0-9]{1,6})\.([0-9]{1,6})\.([0-9]{1,6})(?:[-+][0-9A-Za-z.+-]{1,100})?")


def parse_version(text: str) -> Version | None:
    """Return the release in a node's version; None for development builds, which report none or a branch.

    A pre-release counts as its release, because it already contains the release's changes.
    """
    match = _VERSION.fullmatch(text)
    if match is None:
        return None
    major, minor, patch = map(int, match.groups())
    return major, minor, patch


def is_newer_than_known(text: str) -> bool:
    """Whether a node's version is newer than all versions that this release knows."""
    version = parse_version(text)
    return version is not None and version > LATEST_KNOWN_VERSION


def format_version(version: Version) -> str:
    """Return a version as release tags spell it."""
    return f"v{'.'.join(map(str, version))}"
