"""Measure the audit of a large round: `python -m bench.audit [--reveals 100000] [--quick]`.

Creates an evidence file of a round and audits it with `svote-helper audit --from`, in a separate process. All proofs
are real and verified. Distinct proofs for all reveals would take hours, so `DISTINCT` proofs are created and repeated:
exactly as many as the audit verifies in one batch, so each batch has distinct proofs. Check A2 must report that these
reveals are repeated, and all other checks must pass. The repeated nullifiers need no memory, so the memory of distinct
ones is measured and added.

Prints JSON with `runs`, each with:

- `raw_per_second`: proofs verified per second in batches, without an audit
- `audit_per_second`: reveals per second of the whole command, with its start and reading and hashing the file
- `ratio`: the second divided by the first
- `cpu_ratio`: the same per second of CPU time, which depends less on other load of the machine
- `seconds`: duration of the command
- `peak_mb`: maximum resident memory of the process, with the nullifiers (MB: 10^6 bytes)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import secrets
import subprocess
import sys
import tempfile
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any, Final

import proofs
from audit import source as sources
from audit.documents import digest_unbound_fields, parse_round_facts
from audit.evidence import RecordingSource
from audit.round_checks import BATCH_REVEALS
from audit.source import AuditBlock, AuditTx, DataMissing
from devnet import ballot, tx
from devnet.ceremony import Ceremony, address
from proofs import CommitmentTree, Statement

CIRCUIT: Final = "k10"
DISTINCT: Final = BATCH_REVEALS
VALIDATORS: Final = 3
REVEALS_PER_BLOCK: Final = 100
VOTES_PER_BLOCK: Final = 50
CREATED: Final = 10
ANCHOR: Final = CREATED + 1
"""Height of the block with the votes that have real proofs."""
WEIGHT: Final = 1000
OPTION: Final = (1, 1)
VOTE_END: Final = 1_800_000_000
SNAPSHOT_HEIGHT: Final = 2_800_000


def b64(value: bytes) -> str:
    """Encode bytes as in the REST API."""
    return b64encode(value).decode()


class LargeRound:
    """A finished round with a key ceremony of three validators, as a source of an audit.

    Args:
        reveals: number of reveals, a multiple of `DISTINCT`.
    """

    has_all_blocks = True

    def __init__(self, reveals: int) -> None:
        self._repeats = reveals // DISTINCT
        self._vote_count = reveals // ballot.SHARE_COUNT
        self._ceremony = Ceremony(secrets.token_bytes(32), VALIDATORS, 2)
        self._fields = [secrets.token_bytes(32), secrets.token_bytes(32), proofs.random_field(), proofs.random_field()]
        self.round_id = self._hash_fields()
        self._tree = CommitmentTree()
        self._leaves: list[dict[str, Any]] = []
        self._roots: list[dict[str, Any]] = []
        ballots = [self._seal() for _ in range(DISTINCT // ballot.SHARE_COUNT)]
        self._vote_blocks = [self._append_votes(ANCHOR, [entry.commitment for entry in ballots])]
        self.items = list(self._prove(ballots))
        rest = [proofs.random_field() for _ in range(self._vote_count - len(ballots))]
        for start in range(0, len(rest), VOTES_PER_BLOCK):
            height = ANCHOR + len(self._vote_blocks)
            self._vote_blocks.append(self._append_votes(height, rest[start : start + VOTES_PER_BLOCK]))
        self.total = WEIGHT * len(ballots) * self._repeats
        self._documents = self._create_documents()

    def _hash_fields(self) -> bytes:
        block_hash, proposals_hash, *roots = self._fields
        halves = [int.from_bytes(half, "little") for h in (block_hash, proposals_hash) for half in (h[:16], h[16:])]
        numbers = (SNAPSHOT_HEIGHT, *halves, VOTE_END)
        return proofs.poseidon(*(number.to_bytes(32, "little") for number in numbers), *roots)

    def _seal(self) -> ballot.Ballot:
        return ballot.seal_ballot(
            round_id=self.round_id,
            ea_pk=self._ceremony.commitments[0],
            proposal_id=OPTION[0],
            vote_decision=OPTION[1],
            weight=WEIGHT,
            rng=random.Random(),
        )

    def _append_votes(self, height: int, commitments: list[bytes]) -> list[bytes]:
        """Append a delegation and a vote for each commitment. Returns the transactions."""
        leaves: list[bytes] = []
        transactions: list[bytes] = []
        for commitment in commitments:
            delegated, note = proofs.random_field(), proofs.random_field()
            transactions.append(tx.encode(tx.Delegation(self.round_id, (delegated,), (proofs.random_field(),))))
            cast = tx.Cast(self.round_id, note, (commitment,), proofs.random_field(), OPTION[0])
            transactions.append(tx.encode(cast))
            leaves += [delegated, note, commitment]
        self._leaves.append(
            {"height": height, "start_index": len(self._tree), "leaves": [b64(leaf) for leaf in leaves]}
        )
        self._tree.append(b"".join(leaves))
        self._roots.append({"height": height, "root": b64(self._tree.root())})
        return transactions

    def _prove(self, ballots: list[ballot.Ballot]) -> Iterator[tuple[bytes, bytes, Statement]]:
        """The transaction, proof and statement of each distinct reveal."""
        root = self._tree.root()
        for number, entry in enumerate(ballots):
            for share in entry.shares:
                proved = proofs.prove(
                    CIRCUIT,
                    path=self._tree.path(3 * number + 2, len(self._tree)),
                    position=3 * number + 2,
                    share_comms=b"".join(entry.share_comms),
                    primary_blind=share.blind,
                    c1=share.c1,
                    c2=share.c2,
                    share_index=share.index,
                    proposal_id=entry.proposal_id,
                    vote_decision=entry.vote_decision,
                    round_id=self.round_id,
                )
                reveal = tx.Reveal(share.nullifier, share.c1 + share.c2, *OPTION, proved.proof, self.round_id, ANCHOR)
                raw = tx.encode(reveal)
                statement = Statement(share.nullifier, share.c1, share.c2, *OPTION, root, self.round_id)
                yield raw, proved.proof, statement

    def _create_documents(self) -> dict[str, Any]:
        round_id, totals = b64(self.round_id), {"proposal_id": OPTION[0], "vote_decision": OPTION[1]}
        block_hash, proposals_hash, imt_root, nc_root = self._fields
        options = [{"index": index, "label": label} for index, label in enumerate(("Support", "Oppose"))]
        count = len(self.items) * self._repeats
        summary = [{**options[0]}, {**options[1], "ballot_count": count, "total_value": self.total}]
        documents: dict[str, object] = {
            sources.ROUND: {
                "round": {
                    "vote_round_id": round_id,
                    "status": 3,
                    "snapshot_height": SNAPSHOT_HEIGHT,
                    "created_at_height": CREATED,
                    "snapshot_blockhash": b64(block_hash),
                    "proposals_hash": b64(proposals_hash),
                    "vote_end_time": VOTE_END,
                    "nullifier_imt_root": b64(imt_root),
                    "nc_root": b64(nc_root),
                    "ea_pk": b64(self._ceremony.commitments[0]),
                    "proposals": [{"id": OPTION[0], "title": "A large round", "options": options}],
                    **self._ceremony.to_json(pending=False),
                }
            },
            sources.LEAVES: {"blocks": self._leaves},
            sources.ROOTS: {"roots": self._roots},
            sources.RESULTS: {"results": [{"vote_round_id": round_id, **totals, "total_value": self.total}]},
            sources.SUMMARY: {"proposals": [{"id": OPTION[0], "options": summary}]},
            sources.tally_document(OPTION[0]): {"tally": {str(OPTION[1]): b64(self._sum())}},
        }
        head = {
            "height": 2**40,
            "block_id": "A",
            "app_hash": "S",
            "round": digest_unbound_fields(parse_round_facts(documents[sources.ROUND])),
        }
        return {**documents, "heads": {"heads": [{**head, "node": name} for name in ("one", "two")]}}

    def _sum(self) -> bytes:
        ciphertexts = [statement.c1 + statement.c2 for _, _, statement in self.items]
        total = bytes(64)
        for _ in range(self._repeats):
            total = proofs.elgamal_sum(total, ciphertexts)
        return total

    async def document(self, name: str) -> object:
        """Return a document by name."""
        name = "heads" if sources.parse_heads_name(name) is not None else name
        if name not in self._documents:
            raise DataMissing("not served by the node")
        return self._documents[name]

    async def blocks(self, first: int) -> AsyncGenerator[AuditBlock]:
        """Iterate over the blocks: ceremony, votes, reveals, tally."""
        for height, transactions in enumerate(self._transactions(), CREATED):
            is_last = not transactions or transactions[0][0] in (tx.TAG_PARTIAL, tx.TAG_TALLY)
            if height >= first:
                time_ = VOTE_END + 1.0 if is_last else VOTE_END - 1.0
                yield AuditBlock(height, time_, tuple(AuditTx(raw, 0) for raw in transactions))

    def _transactions(self) -> Iterator[list[bytes]]:
        """The transactions of each block; the block after the last vote is empty."""
        ceremony = self._ceremony
        yield [
            tx.encode(
                tx.Contribution(
                    address(index),
                    self.round_id,
                    ceremony.commitments_of(index),
                    tuple(tx.encode_entry(*payload) for payload in ceremony.payloads_of(index)),
                )
            )
            for index in range(1, VALIDATORS + 1)
        ]
        yield from self._vote_blocks
        raws = [raw for raw, _, _ in self.items]
        for start in range(0, len(raws) * self._repeats, REVEALS_PER_BLOCK):
            stop = min(start + REVEALS_PER_BLOCK, len(raws) * self._repeats)
            yield [raws[at % len(raws)] for at in range(start, stop)]
        yield []
        total = self._sum()
        yield [
            tx.encode(
                tx.PartialDecryption(
                    self.round_id,
                    address(index),
                    index,
                    (tx.encode_entry(*OPTION, *proofs.decrypt_partially(ceremony.share_of(index), total)),),
                )
            )
            for index in (1, 2)
        ]
        yield [tx.encode(tx.Tally(self.round_id, address(1), (tx.encode_entry(*OPTION, self.total),)))]


async def write_evidence(large: LargeRound, path: Path) -> None:
    """Write the round as an evidence file."""
    with path.open("wb") as file:
        recording = RecordingSource(large, large.round_id, file)
        last = 0
        async for block in recording.blocks(CREATED):
            last = block.height
        for name in (sources.ROUND, sources.LEAVES, sources.ROOTS, sources.RESULTS, sources.SUMMARY):
            await recording.document(name)
        for name in (sources.tally_document(OPTION[0]), sources.heads_document(last + 1)):
            await recording.document(name)
        recording.finish()


def measure_raw(items: list[tuple[bytes, Statement]], batches: int) -> tuple[float, float]:
    """Verify batches of distinct proofs. Returns proofs per second, and per second of CPU time."""
    began, cpu_began = time.perf_counter(), time.process_time()
    for _ in range(batches):
        if any(proofs.verify_each(CIRCUIT, items)):
            raise SystemExit("a proof is not valid")
    count = batches * len(items)
    return count / (time.perf_counter() - began), count / (time.process_time() - cpu_began)


def measure_nullifiers(count: int) -> float:
    """Megabytes of a set of distinct nullifiers."""
    nullifiers = {number.to_bytes(32, "little") for number in range(count)}
    return (sys.getsizeof(nullifiers) + sum(map(sys.getsizeof, nullifiers))) / 1e6


def run_audit(path: Path) -> tuple[dict[str, Any], float, float, float]:
    """Run the command. Returns its result, its duration and CPU time in seconds, and its memory in megabytes."""
    command = [sys.executable, "-m", "helper", "audit", "--from", str(path), "--json"]
    began = time.perf_counter()
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout
    seconds = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return json.loads(printed), seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6


def measure(reveals: int, raw_batches: int) -> dict[str, float]:
    """Measure one round."""
    large = LargeRound(reveals)
    count = len(large.items) * (reveals // DISTINCT)
    items = [(proof, statement) for _, proof, statement in large.items]
    measure_raw(items, 1)  # creates the keys
    with tempfile.TemporaryDirectory(prefix="svote-bench-") as directory:
        path = Path(directory) / "evidence.zip"
        asyncio.run(write_evidence(large, path))
        before = measure_raw(items, raw_batches)
        result, seconds, cpu_seconds, peak = run_audit(path)
        after = measure_raw(items, raw_batches)
    failed = {check["id"]: check["why"] for check in result["checks"] if check["verdict"] != "passed"}
    if failed.keys() != {"A2"} or f"and {count - DISTINCT - 3} more" not in failed["A2"]:
        raise SystemExit(f"unexpected verdicts: {failed}")
    raw, raw_cpu = ((first + second) / 2 for first, second in zip(before, after, strict=True))
    return {
        "size": count,
        "raw_per_second": raw,
        "audit_per_second": count / seconds,
        "ratio": count / seconds / raw,
        "cpu_ratio": count / cpu_seconds / raw_cpu,
        "seconds": seconds,
        "peak_mb": peak + measure_nullifiers(count),
    }


def main() -> None:
    """Parse the command line and print one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--reveals", type=int, default=100_000, help="reveals of the round (default 100,000)")
    parser.add_argument("--quick", action="store_true", help="a small round")
    options = parser.parse_args()
    reveals = 4 * DISTINCT if options.quick else -(-options.reveals // DISTINCT) * DISTINCT
    print(json.dumps({"runs": [measure(reveals, 2 if options.quick else 20)]}))


if __name__ == "__main__":
    main()
