"""Checks every counted reveal and adds up the ciphertexts (A2, A3, A4, sums for B and C)."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping
from hashlib import sha256
from typing import Final, NamedTuple

import anyio

import proofs
from audit.documents import Option, RoundFacts
from audit.verdicts import Findings
from helper.chain.reveal_transaction import RevealMessage
from helper.circuits.registry import circuit_infos, get_generation
from proofs import EncodingError, Statement

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


class _Item(NamedTuple):
    """A reveal whose proof is verified.

    Attributes:
        where: its place, for findings.
        message: the reveal.
        circuit: name of its circuit.
        statement: the public inputs of its proof.
    """

    where: str
    message: RevealMessage
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
    ) -> None:
        self._facts = facts
        self._roots = roots
        self._findings = findings
        self._valid_proofs = valid_proofs
        self._nullifiers: set[bytes] = set()
        self._pending: list[tuple[str, RevealMessage]] = []
        self._batches: deque[_Batch] = deque()
        self._verifying = anyio.CapacityLimiter(MAX_VERIFYING)
        self._circuits = {info.proof_bytes: name for name, info in circuit_infos().items()}
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
        self._pending.append((where, message))
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
            if reason is not None:
                self._findings["A3"].add_problem(f"{item.where}: {reason}")
            elif self._valid_proofs is not None:
                self._valid_proofs.add(proof_id(item.message, item.statement.root))

    def _select_items(self, pending: list[tuple[str, RevealMessage]]) -> list[_Item]:
        """The reveals whose proofs must be verified."""
        findings = self._findings["A3"]
        items: list[_Item] = []
        if self._roots is None:
            return items
        for where, message in pending:
            findings.count += 1
            circuit = self._circuits.get(len(message.proof))
            root = self._roots.get(message.anchor_height)
            if circuit is None:
                findings.add_missing(f"proofs of {len(message.proof)} bytes are of no known circuit")
            elif root is None:
                findings.add_problem(f"{where}: no tree root at its anchor {message.anchor_height}")
            elif len(message.enc_share) != _CIPHERTEXT_BYTES:
                findings.add_problem(f"{where}: the ciphertext has {len(message.enc_share)} bytes")
            elif not self._valid_proofs or proof_id(message, root) not in self._valid_proofs:
                statement = get_generation(circuit).create_statement(message, root)
                assert isinstance(statement, Statement)
                items.append(_Item(where, message, circuit, statement))
        return items

    def _add_sums(self, pending: list[tuple[str, RevealMessage]]) -> None:
        ciphertexts: dict[Option, list[bytes]] = {}
        for _, message in pending:
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
        proved = [(items[number].message.proof, items[number].statement) for number in numbers]
        found = await anyio.to_thread.run_sync(proofs.verify_each, circuit, proved, limiter=limiter)
        for number, reason in zip(numbers, found, strict=True):
            reasons[number] = reason
    return reasons
