"""Admission of transactions: CheckTx, cache and mempool."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from devnet import tx as txs
from devnet.chain import Block, Chain, RefusedError
from devnet.eras import RECORDED
from devnet.proof_verifier import ProofVerifier
from devnet.rounds import ACTIVE, STATUS_NAMES

_CACHE_SIZE = 10_000
PENDING_LOG = "tx pending in mempool (duplicate submission)"


class Fate(Enum):
    """What fault injection does with an accepted reveal."""

    NORMAL = "normal"
    NEVER = "never included"
    OVERTAKEN = "preceded by another helper's transaction with the same share"


@dataclass(frozen=True, slots=True)
class BroadcastResult:
    """A node's response to a broadcast. Code 0 means that CheckTx passed, not that the reveal is in a block."""

    hash: bytes
    code: int
    log: str = ""


@dataclass(frozen=True, slots=True)
class MempoolEntry:
    """A reveal in the mempool, possibly preceded by another helper's transaction."""

    transactions: tuple[bytes, ...]
    reveal: txs.Reveal


class Admission:
    """CheckTx and mempool of one chain. Runs on the event loop, with proof verification in threads."""

    def __init__(
        self,
        chain: Chain,
        verifier: ProofVerifier,
        *,
        max_reveals: int = 256,
        max_block_bytes: int = RECORDED.max_block_bytes,
        drops_duplicates: bool = False,
    ) -> None:
        self.chain = chain
        self.verifier = verifier
        self.max_reveals = max_reveals
        self.max_block_bytes = max_block_bytes
        self.drops_duplicates = drops_duplicates
        self.filter_duplicates = False
        self.mempool: list[MempoolEntry] = []
        self._other_messages: list[bytes] = []
        self._cache: OrderedDict[bytes, txs.Reveal] = OrderedDict()

    async def submit_reveal(
        self,
        reveal: txs.Reveal,
        *,
        height: int,
        max_anchor_height: int,
        fate: Fate = Fate.NORMAL,
        status: int | None = None,
    ) -> BroadcastResult:
        """Run CheckTx as a node at this height that knows the roots up to height `max_anchor_height`.

        `status` replaces the round's status for a faulty node (0: it does not know the round).
        """
        raw = txs.encode(reveal)
        digest = txs.tx_hash(raw)
        is_at_head = height >= self.chain.height
        if digest in self._cache:
            return BroadcastResult(digest, 0)
        try:
            if self._is_duplicate(reveal):
                return BroadcastResult(digest, 0, PENDING_LOG)
            _check_status_override(status)
            round_ = self.chain.check_reveal(reveal, time=self._block_time(height), height=height)
            root = self.chain.anchor_root(round_, reveal.anchor_height, max_anchor_height)
            failure = await self.verifier.check(digest, reveal, root)
            if failure is not None:
                return BroadcastResult(digest, 1, failure)
            # Blocks may have been produced during the verification, so check the state again.
            now = self.chain.height if is_at_head else height
            self.chain.check_reveal(reveal, time=self._block_time(now), height=now)
        except RefusedError as refused:
            return BroadcastResult(digest, refused.code, refused.log)
        if digest not in self._cache:
            if self._is_duplicate(reveal):
                return BroadcastResult(digest, 0, PENDING_LOG)
            self._admit(digest, raw, reveal, fate)
        return BroadcastResult(digest, 0)

    def submit_message(self, raw: bytes) -> bytes:
        """Queue a message without a proof (any but a reveal) for the next block. Returns its hash."""
        self._other_messages.append(raw)
        return txs.tx_hash(raw)

    @property
    def has_other_messages(self) -> bool:
        """Whether messages other than reveals wait for the next block."""
        return bool(self._other_messages)

    def take_block_transactions(self) -> list[bytes]:
        """Take the transactions of the next block, those without a proof first.

        A block contains at most `max_reveals` reveals and `max_block_bytes` bytes, but at least one transaction.
        """
        fitting = self._count_fitting([len(raw) for raw in self._other_messages], 0)
        others, self._other_messages = self._other_messages[:fitting], self._other_messages[fitting:]
        if self._other_messages:
            return others
        entries = self._drop_duplicates() if self.drops_duplicates else self.mempool
        sizes = [sum(map(len, entry.transactions)) for entry in entries]
        selected: list[bytes] = []
        count = 0
        for entry in entries[: self._count_fitting(sizes, sum(map(len, others)))]:
            if selected and len(selected) + len(entry.transactions) > self.max_reveals:
                break
            selected.extend(entry.transactions)
            count += 1
        self.mempool = entries[count:]
        return others + selected

    def _count_fitting(self, sizes: Sequence[int], used: int) -> int:
        """The number of leading items of these sizes that fit into a block with `used` bytes."""
        totals = list(accumulate(sizes, initial=used))[1:]
        fitting = bisect_right(totals, self.max_block_bytes)
        return max(fitting, 1) if not used else fitting

    def _drop_duplicates(self) -> list[MempoolEntry]:
        """The mempool without a second reveal of a share, which the proposer leaves out."""
        first: dict[tuple[bytes, bytes], MempoolEntry] = {}
        for entry in self.mempool:
            key = (entry.reveal.round_id, entry.reveal.nullifier)
            admitted, dropped = entry.transactions[:1], entry.transactions[1:]
            if key in first:
                dropped = entry.transactions
            else:
                first[key] = MempoolEntry(admitted, entry.reveal)
            self._evict(dropped)
        return list(first.values())

    def recheck_mempool(self, block: Block) -> None:
        """Recheck the mempool and drop failed transactions, like CometBFT after a commit."""
        for result in block.results:
            if result.code != 0:
                self._cache.pop(result.hash, None)
        for digest, reveal in list(self._cache.items()):
            round_ = self.chain.rounds.get(reveal.round_id)
            if round_ is None or round_.status != ACTIVE:
                del self._cache[digest]
        valid = []
        for entry in self.mempool:
            try:
                self.chain.check_reveal(entry.reveal, time=block.time, height=block.height)
                valid.append(entry)
            except RefusedError:
                self._evict(entry.transactions)
        self.mempool = valid

    def cache_included(self, raw: bytes) -> None:
        """Cache a transaction that another node included, like a node that relayed it."""
        message = txs.decode(raw)
        if isinstance(message, txs.Reveal):
            self._cache[txs.tx_hash(raw)] = message

    def _is_duplicate(self, reveal: txs.Reveal) -> bool:
        """Return whether the duplicate filter of newer chains rejects this reveal."""
        return self.filter_duplicates and any(
            entry.reveal.nullifier == reveal.nullifier and entry.reveal.round_id == reveal.round_id
            for entry in self.mempool
        )

    def _admit(self, digest: bytes, raw: bytes, reveal: txs.Reveal, fate: Fate) -> None:
        """Cache a checked reveal and add it to the mempool according to the injected fault."""
        self._cache[digest] = reveal
        while len(self._cache) > _CACHE_SIZE:
            self._cache.popitem(last=False)
        if fate is Fate.NORMAL:
            self.mempool.append(MempoolEntry((raw,), reveal))
        elif fate is Fate.OVERTAKEN:
            self.mempool.append(MempoolEntry((txs.create_competing_transaction(raw), raw), reveal))

    def _evict(self, transactions: Iterable[bytes]) -> None:
        """Remove transactions from the cache, so that the next submission is checked again."""
        for raw in transactions:
            self._cache.pop(txs.tx_hash(raw), None)

    def _block_time(self, height: int) -> int:
        """The block time that CheckTx uses: the time of the newest block of a node at this height."""
        return self.chain.blocks[height - 1].time if height else 0


def _check_status_override(status: int | None) -> None:
    """Refuse like a node on which the round has this status."""
    if status == 0:
        raise RefusedError(3, "vote round not found")
    if status is not None and status != ACTIVE:
        raise RefusedError(1, f"vote round is not active: status is {STATUS_NAMES[status]}")
