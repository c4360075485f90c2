"""Checks of a round's trees, votes and reveals. Pure."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Final, NamedTuple

import anyio

import proofs
from audit.check_results import Findings
from audit.documents import Option, RoundFacts
from audit.own_shares import FoundReveal, ProofState, ShareSearch
from audit.transactions import Cast, Delegation
from helper.chain.chain_data import LeafBlock
from helper.chain.reveal_transaction import RevealMessage
from helper.circuits import circuit_of_proof, get_generation
from proofs import CommitmentTree, EncodingError, ProofsError, Statement


class TreeChecks:
    """The tree of the published leaves.

    Args:
        blocks: the published leaves, by block.
        findings: findings of all checks by id.

    Attributes:
        roots: the recomputed root of each height that appended leaves.
    """

    def __init__(self, blocks: Sequence[LeafBlock], findings: Mapping[str, Findings]) -> None:
        self._leaves: dict[int, bytes] = {}
        self._findings = findings
        self.roots: dict[int, bytes] = {}
        tree = CommitmentTree()
        last_height = 0
        for block in blocks:
            if block.height <= last_height or block.start_index != len(tree):
                findings["D1"].add_problem(f"published leaves of block {block.height} are out of order")
                return
            try:
                tree.append(block.leaves)
            except ProofsError as error:
                findings["D1"].add_problem(f"published leaves of block {block.height}: {error}")
                return
            last_height = block.height
            if not block.leaves:  # the chain has no root for such a block
                continue
            self._leaves[block.height] = block.leaves
            self.roots[block.height] = tree.root()

    def check_roots(self, published: Mapping[int, bytes]) -> None:
        """Compare the published roots with the recomputed ones (D2)."""
        findings = self._findings["D2"]
        for height in sorted(self.roots.keys() | published.keys()):
            findings.count += 1
            if height not in published:
                findings.add_problem(f"no root is published for block {height}, which appended leaves")
            elif published[height] != self.roots.get(height):
                findings.add_problem(f"the root published for block {height} does not match the leaves")

    def check_block(self, height: int, derived: bytes) -> None:
        """Compare the leaves that a block's transactions append with the published ones (D1)."""
        published = self._leaves.pop(height, b"")
        self._findings["D1"].count += len(published) // 32
        if derived != published:
            self._findings["D1"].add_problem(
                f"block {height}: its transactions append {len(derived) // 32} leaves, "
                f"{len(published) // 32} are published, and they differ"
            )

    def skip_block(self, height: int) -> None:
        """Ignore the leaves of a block whose transactions have an unknown encoding."""
        self._leaves.pop(height, None)

    def check_rest(self, heights: range) -> None:
        """Report leaves of blocks that do not belong to the vote (D1).

        Args:
            heights: the blocks that do, or that could not be read.
        """
        for height in sorted(height for height in self._leaves if height not in heights):
            self._findings["D1"].add_problem(f"leaves are published for block {height}, outside the vote")


SHARES_PER_VOTE: Final = 16
"""Maximum number of reveals of one cast vote."""


class VoteChecks:
    """The delegations and cast votes of a round."""

    def __init__(self, findings: Mapping[str, Findings]) -> None:
        self._findings = findings
        self._nullifiers: set[bytes] = set()
        self._note_nullifiers: set[bytes] = set()
        self._delegations = 0
        self._casts: Counter[int] = Counter()

    def add_delegation(self, message: Delegation, height: int) -> None:
        """Check that no note was delegated before."""
        self._delegations += 1
        for nullifier in message.nullifiers:
            self._check_new(self._note_nullifiers, nullifier, f"block {height}", "a note was delegated before")

    def add_cast(self, message: Cast, height: int) -> None:
        """Check that the authority note was not spent before."""
        self._casts[message.proposal_id] += 1
        self._check_new(self._nullifiers, message.nullifier, f"block {height}", "an authority note was spent before")

    def _check_new(self, seen_nullifiers: set[bytes], nullifier: bytes, where: str, problem: str) -> None:
        self._findings["D4"].count += 1
        try:
            proofs.check_encoding("nullifier", nullifier)
        except EncodingError as error:  # another encoding of the same number would be a different nullifier
            self._findings["D4"].add_problem(f"{where}: a nullifier is malformed ({error.reason})")
        if nullifier in seen_nullifiers:
            self._findings["D4"].add_problem(f"{where}: {problem}")
        seen_nullifiers.add(nullifier)

    def finish(self, counts: Mapping[Option, int]) -> None:
        """Compare the number of votes with the reveals and the delegations.

        Args:
            counts: number of counted reveals per option.
        """
        for proposal_id, casts in sorted(self._casts.items()):
            if casts > self._delegations:
                self._findings["D4"].add_problem(
                    f"proposal {proposal_id} has {casts} votes but only {self._delegations} delegations"
                )
        reveals: Counter[int] = Counter()
        for (proposal_id, _), count in counts.items():
            reveals[proposal_id] += count
        for proposal_id, count in sorted(reveals.items()):
            self._findings["A5"].count += count
            if count > SHARES_PER_VOTE * self._casts[proposal_id]:
                self._findings["A5"].add_problem(
                    f"proposal {proposal_id} has {count} reveals but only {self._casts[proposal_id]} cast votes"
                )


BATCH_REVEALS: Final = 512
"""Reveals that are verified in one call. With k10, they take one to two seconds on two cores."""

MAX_VERIFYING: Final = 2
"""Batches that are verified at the same time. `proofs.verify_each` divides a batch equally among the cores. With a
second batch, a core that has completed its part does not wait for the others."""

MAX_BATCHES: Final = MAX_VERIFYING + 1
"""Batches that are verified or wait for it. With one waiting, no core waits until blocks have been read."""

_EMPTY_SUM: Final = bytes(64)
_CIPHERTEXT_BYTES: Final = 64


def proof_id(message: RevealMessage, root: bytes) -> bytes:
    """Identify a proof with all its public inputs: 32 bytes, the SHA-256 of the transaction and the tree root."""
    return sha256(message.to_tx() + root).digest()


class _Reveal(NamedTuple):
    """A counted reveal.

    Attributes:
        where: its place, for findings.
        message: the reveal.
        found: its entry, if it is of a share that is searched.
    """

    where: str
    message: RevealMessage
    found: FoundReveal | None

    def set_proof(self, state: ProofState) -> None:
        """Note the state of its proof."""
        if self.found is not None:
            self.found.proof = state


class _Item(NamedTuple):
    """A reveal whose proof is verified.

    Attributes:
        reveal: the reveal.
        circuit: name of its circuit.
        statement: the public inputs of its proof.
    """

    reveal: _Reveal
    circuit: str
    statement: Statement


class _Batch(NamedTuple):
    """A batch of `size` reveals. The task verifies its items and returns for each the reason why it is not valid."""

    size: int
    items: list[_Item]
    verifying: asyncio.Task[list[str | None]]


class RevealChecks:
    """The counted reveals of a round.

    Args:
        facts: the round.
        roots: the recomputed root of each height that appended leaves; None if the tree could not be rebuilt.
        findings: findings of all checks by id.
        valid_proofs: ids of proofs that are known to be valid (`proof_id`); those found to be valid are added.
        search: the shares that are searched; None for none.

    Attributes:
        counts: number of reveals per option.
        sums: sum of the ciphertexts per option, 64 bytes.
        verified: number of reveals whose proof was checked.
    """

    def __init__(
        self,
        facts: RoundFacts,
        roots: Mapping[int, bytes] | None,
        findings: Mapping[str, Findings],
        valid_proofs: set[bytes] | None = None,
        search: ShareSearch | None = None,
    ) -> None:
        self._facts = facts
        self._roots = roots
        self._search = search or ShareSearch()
        self._findings = findings
        self._valid_proofs = valid_proofs
        self._nullifiers: set[bytes] = set()
        self._pending: list[_Reveal] = []
        self._batches: deque[_Batch] = deque()
        self._verifying = anyio.CapacityLimiter(MAX_VERIFYING)
        self.counts: Counter[Option] = Counter()
        self.sums: dict[Option, bytes] = {}
        self.verified = 0

    async def add(self, message: RevealMessage, height: int, time: float | None) -> None:
        """Check one counted reveal in the block at `height` with this time, None if unknown.

        Starts to verify proofs once a batch is full. Batches are verified while the next one is read.
        """
        where = f"block {height}, nullifier {message.nullifier.hex()[:16]}"
        self._check_nullifier(message, where)
        self._check_place(message, where, height, time)
        self.counts[message.proposal_id, message.vote_decision] += 1
        found = self._search.add(message.nullifier, height, message.proposal_id, message.vote_decision)
        self._pending.append(_Reveal(where, message, found))
        if len(self._pending) >= BATCH_REVEALS:
            await self._start_batch()

    def _check_nullifier(self, message: RevealMessage, where: str) -> None:
        findings = self._findings["A2"]
        findings.count += 1
        try:
            proofs.check_encoding("share_nullifier", message.nullifier)
        except EncodingError as error:
            findings.add_problem(f"{where}: {error.reason}")
        if message.nullifier in self._nullifiers:
            findings.add_problem(f"{where}: counted before")
        self._nullifiers.add(message.nullifier)

    def _check_place(self, message: RevealMessage, where: str, height: int, time: float | None) -> None:
        findings = self._findings["A4"]
        findings.count += 1
        if message.vote_decision not in self._facts.options.get(message.proposal_id, ()):
            findings.add_problem(
                f"{where}: proposal {message.proposal_id} has no option {message.vote_decision} in this round"
            )
        if time is None:
            findings.add_missing("the source has no block times")
        elif time >= self._facts.vote_end_time:
            findings.add_problem(f"{where}: counted after the end of voting")
        if message.anchor_height >= height:
            findings.add_problem(f"{where}: its anchor {message.anchor_height} is not an earlier block")

    async def verify_pending(self) -> None:
        """Verify the proofs of all reveals that were added, and add up their ciphertexts."""
        await self._start_batch()
        while self._batches:
            await self._finish_batch()

    async def cancel(self) -> None:
        """Cancel the verification of all batches and discard its results."""
        tasks = [batch.verifying for batch in self._batches]
        self._batches.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _start_batch(self) -> None:
        if len(self._batches) == MAX_BATCHES:
            await self._finish_batch()
        pending, self._pending = self._pending, []
        self._add_sums(pending)
        items = self._select_items(pending)
        self._batches.append(_Batch(len(pending), items, asyncio.create_task(_verify(items, self._verifying))))

    async def _finish_batch(self) -> None:
        """Wait for the oldest batch, so that findings are in the order of the blocks."""
        batch = self._batches[0]
        reasons = await batch.verifying
        self._batches.popleft()
        self.verified += batch.size
        for item, reason in zip(batch.items, reasons, strict=True):
            item.reveal.set_proof(ProofState.VALID if reason is None else ProofState.INVALID)
            if reason is not None:
                self._findings["A3"].add_problem(f"{item.reveal.where}: {reason}")
            elif self._valid_proofs is not None:
                self._valid_proofs.add(proof_id(item.reveal.message, item.statement.root))

    def _select_items(self, pending: list[_Reveal]) -> list[_Item]:
        """The reveals whose proofs must be verified."""
        findings = self._findings["A3"]
        items: list[_Item] = []
        if self._roots is None:
            return items
        for reveal in pending:
            message = reveal.message
            findings.count += 1
            circuit = circuit_of_proof(message.proof)
            root = self._roots.get(message.anchor_height)
            reveal.set_proof(ProofState.INVALID)
            if circuit is None:
                reveal.set_proof(ProofState.NOT_CHECKED)
                findings.add_missing(f"proofs of {len(message.proof)} bytes are of no known circuit")
            elif root is None:
                findings.add_problem(f"{reveal.where}: no tree root at its anchor {message.anchor_height}")
            elif len(message.enc_share) != _CIPHERTEXT_BYTES:
                findings.add_problem(f"{reveal.where}: the ciphertext has {len(message.enc_share)} bytes")
            elif self._valid_proofs and proof_id(message, root) in self._valid_proofs:
                reveal.set_proof(ProofState.VALID)
            else:
                statement = get_generation(circuit.name).create_statement(message, root)
                assert isinstance(statement, Statement)
                items.append(_Item(reveal, circuit.name, statement))
        return items

    def _add_sums(self, pending: list[_Reveal]) -> None:
        ciphertexts: dict[Option, list[bytes]] = {}
        for _, message, _ in pending:
            ciphertexts.setdefault((message.proposal_id, message.vote_decision), []).append(message.enc_share)
        for option, of_option in ciphertexts.items():
            try:
                self.sums[option] = proofs.elgamal_sum(self.sums.get(option, _EMPTY_SUM), of_option)
            except EncodingError as error:
                self._findings["B1"].add_problem(
                    f"proposal {option[0]}, option {option[1]}: a ciphertext is malformed ({error.reason})"
                )


async def _verify(items: list[_Item], limiter: anyio.CapacityLimiter) -> list[str | None]:
    """Return for each item why its proof is not valid, or None if it is."""
    reasons: list[str | None] = [None] * len(items)
    for circuit in sorted({item.circuit for item in items}):
        numbers = [number for number, item in enumerate(items) if item.circuit == circuit]
        proved = [(items[number].reveal.message.proof, items[number].statement) for number in numbers]
        found = await anyio.to_thread.run_sync(proofs.verify_each, circuit, proved, limiter=limiter)
        for number, reason in zip(numbers, found, strict=True):
            reasons[number] = reason
    return reasons
