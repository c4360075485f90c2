"""Audits a round: reads its data once, in order, and runs all checks.

Blocks are processed as they arrive, so memory does not grow with their size; only nullifiers and leaves are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import proofs
from audit import documents as docs
from audit import source as sources
from audit import tally_checks
from audit.check_results import CHECKS, AuditResult, Findings
from audit.documents import Option, OptionSummary, RoundFacts
from audit.own_shares import OwnShares, ShareSearch
from audit.round_checks import RevealChecks, TreeChecks, VoteChecks
from audit.source import AuditBlock, AuditSource, AuditTx, DataMissing
from audit.tally_checks import PartialChecks, TallyTransactions
from audit.transactions import Batch, Cast, Delegation, Message, decode
from helper.chain.reveal_transaction import RevealMessage
from helper.errors import AuditError, InvalidResponse, NotFound
from proofs import EncodingError

T = TypeVar("T")

_NEEDS_ALL_BLOCKS: Final = ("A1", "A2", "A3", "A4", "A5", "B1", "B2", "C3", "C4", "C6", "C7", "D1", "D4")
_NEEDS_OTHER_BLOCKS: Final = ("A1", "A5", "C6", "C7", "D1", "D4")
_NEEDS_RESULT: Final = ("C3", "C4", "C5", "C6", "C7")
_NEEDS_FINAL: Final = ("A1", "B1", "B2", *_NEEDS_RESULT)
_NEEDS_LEAVES: Final = ("A3", "D1", "D2")
_NEEDS_VOTES: Final = ("A5", "D1", "D4")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an audit is.

    Attributes:
        height: the last block that was read.
        reveals: number of reveals whose proofs were checked.
        expected: number of reveals that the chain reports; 0 if it does not.
    """

    height: int
    reveals: int
    expected: int


@dataclass(frozen=True, slots=True)
class Audit:
    """A completed audit.

    Attributes:
        result: the verdicts.
        facts: the round.
        totals: the published total of each option.
        counts: the counted reveals of each option.
        first_height: the first block that was read.
        last_height: the last block that was read; 0 without blocks.
        own: the shares that were searched, None for none.
    """

    result: AuditResult
    facts: RoundFacts
    totals: dict[Option, int]
    counts: dict[Option, int]
    first_height: int
    last_height: int
    own: OwnShares | None


async def audit_round(
    source: AuditSource,
    round_id: bytes,
    *,
    signed_ea_pk: bytes | None = None,
    valid_proofs: set[bytes] | None = None,
    search: ShareSearch | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Audit:
    """Run all checks of a round.

    Args:
        source: the data; untrusted.
        round_id: 32 bytes.
        signed_ea_pk: the election key in a signed published configuration, None without one.
        valid_proofs: ids of proofs that were verified before (`reveal_checks.proof_id`).
        search: shares to search, None for none. No request depends on them.
        on_progress: called after each block.

    Raises:
        NotFound: the source does not have the round.
        AuditError: the round cannot be read.
    """
    try:
        facts = docs.parse_round_facts(await source.document(sources.ROUND))
    except DataMissing as error:
        raise NotFound(f"no such round: {error}", advice="List the rounds with `svote-helper rounds`.") from None
    except InvalidResponse as error:
        raise AuditError(str(error)) from None
    auditor = _Auditor(source, round_id, facts, valid_proofs=valid_proofs, search=search, on_progress=on_progress)
    return await auditor.run(signed_ea_pk)


class _Auditor:
    """The state of one audit."""

    def __init__(
        self,
        source: AuditSource,
        round_id: bytes,
        facts: RoundFacts,
        *,
        valid_proofs: set[bytes] | None,
        search: ShareSearch | None,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._source = source
        self._round_id = round_id
        self._facts = facts
        self._valid_proofs = valid_proofs
        self._search = search
        self._on_progress = on_progress
        self._findings = {check_id: Findings() for check_id in CHECKS}
        self._tally_transactions = TallyTransactions()
        self._votes = VoteChecks(self._findings)
        self._unknown_results = 0
        self._last_height = 0
        self._has_ended = False

    async def run(self, signed_ea_pk: bytes | None) -> Audit:
        """Run all checks."""
        facts, findings = self._facts, self._findings
        if not self._source.has_all_blocks:
            self._mark_missing(_NEEDS_OTHER_BLOCKS, "the source has the reveals only")
        self._check_round_id()
        tally_checks.check_key(facts, signed_ea_pk, findings["C1"])
        if facts.status != docs.FINALIZED:
            self._mark_missing(_NEEDS_FINAL, "the round is not finalized")
        if facts.timed_out:
            self._mark_missing(_NEEDS_RESULT, "the tally timed out, so the round has no result")
        results = await self._load(
            sources.RESULTS, lambda document: docs.parse_results(document, self._round_id), _NEEDS_RESULT
        )
        summary = await self._load(sources.SUMMARY, docs.parse_summary, ("A1", "C6"))
        tree = await self._load_tree()
        reveals = RevealChecks(facts, tree.roots if tree else None, findings, self._valid_proofs, self._search)
        try:
            await self._read_blocks(tree, reveals, summary or {}, has_result=bool(results))
        finally:
            await reveals.cancel()
        if tree is not None and self._source.has_all_blocks:
            stop = self._last_height + 1 if self._has_ended else 2**63
            tree.check_rest(range(facts.created_at_height, stop))
        if self._source.has_all_blocks:
            if not self._findings["A5"].missing:  # not all votes are known
                self._votes.finish(reveals.counts)
        else:
            self._require_published_reveals(reveals, summary)
        if facts.status == docs.FINALIZED:
            self._check_counts(reveals, summary)
            await self._check_sums(reveals)
        tally_checks.check_contributions(
            facts,
            self._tally_transactions.contributions,
            findings["C2"],
            all_read=self._source.has_all_blocks and not findings["A2"].missing,
        )
        if facts.status == docs.FINALIZED and not facts.timed_out:
            await self._check_results(reveals, results, summary)
        await self._check_heads()
        return Audit(
            result=AuditResult(self._round_id, tuple(findings[check_id].result(check_id) for check_id in CHECKS)),
            facts=facts,
            totals=results or {},
            counts=dict(reveals.counts),
            first_height=facts.created_at_height,
            last_height=self._last_height,
            own=self._find_own_shares(),
        )

    def _find_own_shares(self) -> OwnShares | None:
        if self._search is None:
            return None
        # A share is missing only if as many reveals were read as the chain has published.
        checks = self._findings["A1"], self._findings["A2"]
        has_all_reveals = self._has_ended and not checks[0].problems and not any(check.missing for check in checks)
        return self._search.finish(is_complete=has_all_reveals and self._facts.status == docs.FINALIZED)

    # ------------------------------------------------------------------ data

    async def _load(self, name: str, parse: Callable[[object], T], checks: Iterable[str]) -> T | None:
        """Load a document. If it is missing or not readable, the checks are not checked, and None is returned."""
        try:
            return parse(await self._source.document(name))
        except DataMissing as error:
            self._mark_missing(checks, f"{name}: {error}")
        except InvalidResponse as error:
            self._mark_missing(checks, str(error))
        return None

    def _mark_missing(self, checks: Iterable[str], reason: str) -> None:
        for check_id in checks:
            self._findings[check_id].add_missing(reason)

    async def _load_tree(self) -> TreeChecks | None:
        leaves = await self._load(sources.LEAVES, docs.parse_leaf_blocks, _NEEDS_LEAVES)
        if leaves is None:
            return None
        tree = TreeChecks(leaves, self._findings)
        roots = await self._load(sources.ROOTS, docs.parse_roots, ("D2",))
        if roots is not None:
            tree.check_roots(roots)
        return tree

    # ------------------------------------------------------------------ blocks

    async def _read_blocks(
        self,
        tree: TreeChecks | None,
        reveals: RevealChecks,
        summary: Mapping[Option, OptionSummary],
        *,
        has_result: bool,
    ) -> None:
        """Read all blocks from the round's creation to its tally."""
        expected = sum(entry.count for entry in summary.values())
        expects_tally = (has_result or expected > 0) and not self._facts.timed_out
        height = self._facts.created_at_height
        missing: str | None = None
        try:
            async with aclosing(self._source.blocks(height)) as blocks:
                async for block in blocks:
                    if block.height != height and (self._source.has_all_blocks or block.height < height):
                        raise DataMissing(f"block {height} is missing")
                    await self._read_block(block, tree, reveals)
                    self._last_height, height = block.height, block.height + 1
                    self._on_progress(Progress(block.height, reveals.verified, expected))
                    if self._has_ended and (self._tally_transactions.tallies or not expects_tally):
                        break
        except DataMissing as error:
            missing = str(error)
        else:
            if not self._source.has_all_blocks:
                self._has_ended = True
        await reveals.verify_pending()
        self._on_progress(Progress(self._last_height, reveals.verified, expected))
        if not self._has_ended and self._facts.status == docs.FINALIZED:
            missing = missing or f"the blocks end at height {self._last_height}, before the end of voting"
        if missing is not None and not self._has_ended:
            self._mark_missing(_NEEDS_ALL_BLOCKS, missing)
        elif missing is not None and expects_tally:
            self._mark_missing(("C3", "C4", "C6", "C7"), missing)
        if self._unknown_results:
            self._mark_missing(_NEEDS_ALL_BLOCKS, f"the results of {self._unknown_results} transactions are not known")

    async def _read_block(self, block: AuditBlock, tree: TreeChecks | None, reveals: RevealChecks) -> None:
        self._findings["A1"].count += 1
        has_ended = block.time is not None and block.time >= self._facts.vote_end_time
        self._has_ended = self._has_ended or has_ended
        leaves: list[bytes] = []
        is_derivable = True
        for tx in block.txs:
            unknown_before = self._unknown_results
            message = self._decode(tx, block.height)
            is_derivable = is_derivable and self._unknown_results == unknown_before
            if isinstance(message, RevealMessage):
                await reveals.add(message, block.height, block.time)
            elif isinstance(message, Delegation):
                self._votes.add_delegation(message, block.height)
                leaves.append(message.leaf)
            elif isinstance(message, Cast):
                self._votes.add_cast(message, block.height)
                leaves += message.leaves
            elif isinstance(message, Batch):
                self._mark_missing(_NEEDS_VOTES, "the round has batches of votes, whose encoding is not known")
                is_derivable = False
            elif message is not None:
                self._tally_transactions.add(message, block.height, has_ended=has_ended)
        if tree is not None and is_derivable and self._source.has_all_blocks:
            tree.check_block(block.height, b"".join(leaves))
        elif tree is not None:
            tree.skip_block(block.height)

    def _decode(self, tx: AuditTx, height: int) -> Message | None:
        """Return the message of a transaction of the round that succeeded, else None."""
        if tx.code not in (0, None):
            return None
        try:
            message = decode(tx.raw, self._round_id)
        except AuditError as error:
            self._mark_missing(_NEEDS_ALL_BLOCKS, f"block {height}: {error}")
            return None
        if message is not None and tx.code is None:
            self._unknown_results += 1
            return None
        return message

    # ------------------------------------------------------------------ after the blocks

    def _check_round_id(self) -> None:
        """Recompute the round id (D3). Chains up to v0.5 hash the snapshot's height, newer ones the creation's."""
        facts, findings = self._facts, self._findings["D3"]
        findings.count = 1
        fields = [
            number.to_bytes(32, "little")
            for value in (facts.snapshot_blockhash, facts.proposals_hash)
            for number in (int.from_bytes(value[:16], "little"), int.from_bytes(value[16:], "little"))
        ]
        rest = (facts.vote_end_time.to_bytes(32, "little"), facts.nullifier_imt_root, facts.nc_root)
        try:
            hashes = [
                proofs.poseidon(height.to_bytes(32, "little"), *fields, *rest)
                for height in (facts.snapshot_height, facts.created_at_height)
            ]
        except EncodingError as error:
            findings.add_problem(f"a field of the round is not canonical ({error.reason})")
            return
        if facts.round_id != self._round_id or self._round_id not in hashes:
            findings.add_problem("the round id is not the hash of the published fields")

    def _require_published_reveals(self, reveals: RevealChecks, summary: Mapping[Option, OptionSummary] | None) -> None:
        """Mark the checks of reveals as not checked if a reveals-only source may have fewer than published."""
        if summary is None:
            self._mark_missing(_NEEDS_ALL_BLOCKS, "the number of published reveals is not known")
            return
        for option, entry in sorted(summary.items()):
            if reveals.counts[option] < entry.count:
                self._mark_missing(
                    _NEEDS_ALL_BLOCKS,
                    f"the source has {reveals.counts[option]} of {entry.count} reveals of proposal {option[0]}, "
                    f"option {option[1]}",
                )

    def _check_counts(self, reveals: RevealChecks, summary: Mapping[Option, OptionSummary] | None) -> None:
        """Compare the number of counted reveals with the published one (A1)."""
        if summary is None or self._findings["A1"].missing:
            return
        for option in sorted(reveals.counts.keys() | summary.keys()):
            published = summary[option].count if option in summary else 0
            if reveals.counts[option] != published:
                self._findings["A1"].add_problem(
                    f"proposal {option[0]}, option {option[1]}: {reveals.counts[option]} reveals in the blocks, "
                    f"{published} published"
                )

    async def _check_sums(self, reveals: RevealChecks) -> None:
        """Compare the sums of the reveals with the published ones (B1, B2)."""
        published: dict[Option, bytes] = {}
        for proposal_id in self._facts.options:
            name = sources.tally_document(proposal_id)
            sums = await self._load(name, partial(docs.parse_sums, proposal_id=proposal_id), ("B1", "B2"))
            published |= sums or {}
        if self._findings["B1"].missing:
            return
        own = reveals.sums
        self._findings["B1"].count = self._findings["B2"].count = len(own)
        for option in sorted(own.keys() | published.keys()):
            name = f"proposal {option[0]}, option {option[1]}"
            if option not in published:
                self._findings["B2"].add_problem(f"{name} has reveals but no published sum")
            elif option not in own:
                self._findings["B2"].add_problem(f"{name} has a published sum but no reveals")
            elif own[option] != published[option]:
                self._findings["B1"].add_problem(f"{name}: the published sum does not match the reveals")

    async def _check_results(
        self,
        reveals: RevealChecks,
        results: dict[Option, int] | None,
        summary: Mapping[Option, OptionSummary] | None,
    ) -> None:
        """Check partial decryptions and totals (C3 to C7)."""
        findings = self._findings
        if results is None:
            return
        tally_checks.check_amounts(results, findings["C5"])
        if findings["A2"].missing:  # not all reveals were read, so the recomputed sums are incomplete
            return
        if findings["C1"].problems:
            self._mark_missing(("C3", "C4"), "the election key did not pass C1")
        else:
            published = await self._load(sources.PARTIALS, docs.parse_partials, ())
            partials = PartialChecks(self._facts, self._tally_transactions, published, findings)
            partials.check(reveals.sums, results)
        tally_checks.check_labels(self._facts, summary or {}, findings["C6"])
        tally_checks.check_results(results, summary, self._tally_transactions.tallies, reveals.sums, findings["C6"])
        findings["C7"].count = len(self._tally_transactions.partials) + len(self._tally_transactions.tallies)
        for problem in self._tally_transactions.early:
            findings["C7"].add_problem(problem)

    async def _check_heads(self) -> None:
        """Compare block, state and round that several nodes report (E)."""
        if not self._last_height:
            self._findings["E"].add_missing("no block was read")
            return
        heads = await self._load(sources.heads_document(self._last_height + 1), docs.parse_heads, ("E",))
        if heads is None:
            return
        findings = self._findings["E"]
        findings.count = len(heads)
        if len({head.node for head in heads}) < 2:
            findings.add_missing(
                "needs a second node: fewer than two reported it, so the audit depends on a single node"
            )
        if any(head.height <= self._last_height or not head.block_id or not head.app_hash for head in heads):
            findings.add_missing("the nodes did not report a block after the last one that was read")
        if len({(head.height, head.block_id, head.app_hash) for head in heads}) > 1:
            findings.add_problem("nodes report different blocks or states: " + ", ".join(head.node for head in heads))
        if any(not head.round for head in heads):
            findings.add_missing("the nodes did not report the round's election key, titles and labels")
        elif {head.round for head in heads} - {docs.digest_unbound_fields(self._facts)}:
            findings.add_problem("nodes report different election keys, titles or labels of the round")
