"""Tags of the transactions that concern a round: the first byte of each."""

from __future__ import annotations

from typing import Final

from helper.chain.reveal_transaction import REVEAL_TAG

DELEGATE, CAST, REVEAL, TALLY, CAST_BATCH, DELEGATE_BATCH, PARTIAL, CONTRIBUTION = (
    0x02,
    0x03,
    REVEAL_TAG[0],
    0x05,
    0x06,
    0x07,
    0x0D,
    0x0E,
)
ROUND_TAGS: Final = frozenset({DELEGATE, CAST, REVEAL, TALLY, CAST_BATCH, DELEGATE_BATCH, PARTIAL, CONTRIBUTION})
"""Tags of the transactions that an audit reads."""
