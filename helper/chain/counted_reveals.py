"""Decides whether a reveal in a block was counted there. The only implementation of this decision.

A block also contains failed transactions, and the same bytes may be in many blocks, because reveals are resent
until they are counted. A node's index stores only the last occurrence of a transaction (CometBFT's `IndexerService`
overwrites entries) and may lag behind the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from helper.chain.broadcast_outcome import Verdict, classify_refusal
from helper.chain.chain_data import TxResult
from helper.chain.reveal_transaction import RevealMessage
from helper.errors import ChainResponseError, ChainUnavailable


@dataclass(frozen=True, slots=True)
class CountedReveal:
    """A counted reveal: block height, transaction bytes and decoded message."""

    height: int
    raw: bytes
    message: RevealMessage


def parse_reveal(raw: bytes) -> RevealMessage | None:
    """The reveal in a transaction, None if it is another transaction."""
    try:
        return RevealMessage.from_tx(raw)
    except ChainResponseError:
        return None


def is_counted(result: TxResult | None, height: int) -> bool | None:
    """Whether a reveal was counted in the block at `height`; None while unknown.

    - A success is unique: the chain counts a nullifier once, in the block of the success.
    - A failure at a lower height means that the index lags behind the block.
    - A failure at a greater height because the nullifier is spent means that the reveal was counted before.
    - Any other failure at a greater height hides the result in this block, usually because the round had ended by then.
      It counts as a failure in this block too: the result is no longer available, so waiting would not help.

    Args:
        result: the transaction's entry in a node's index, None without one.
        height: height of a block that contains the transaction.
    """
    if result is None:
        return None
    if result.code == 0:
        return result.height == height
    if result.height < height:
        return None
    return result.height > height and shows_spent(result)


def require_counted(result: TxResult | None, height: int) -> bool:
    """Return `is_counted`, or raise while the result is unknown.

    Raises:
        ChainUnavailable: the result is not known yet.
    """
    counted = is_counted(result, height)
    if counted is None:
        raise ChainUnavailable(f"block {height}: the result of a reveal in it is not known yet")
    return counted


def shows_spent(result: TxResult) -> bool:
    """Whether a result shows that the nullifier is spent.

    The nullifier was counted in the result's block or an earlier one.
    """
    return result.code == 0 or classify_refusal(result.code, result.log) is Verdict.SPENT
