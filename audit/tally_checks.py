"""Checks the key ceremony, the partial decryptions and the totals (C1 to C7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import proofs
from audit.check_results import Findings
from audit.documents import MAX_VALIDATORS, Option, OptionSummary, RoundFacts
from audit.transactions import Contribution, PartialDecryption, PartialEntry, Tally
from proofs import EncodingError, Partial

MAX_TOTAL: Final = 1 << 28
"""Limit of a total in ballots of 12,500,000 zatoshi; chains since v1 refuse totals from it on."""

MAX_PROPOSAL_TOTAL: Final = 168_000_000
"""Ballots that the supply of 21 million ZEC allows per proposal."""


@dataclass(slots=True)
class TallyTransactions:
    """The ceremony and tally transactions with code 0 in the blocks that were read.

    Attributes:
        early: what was published before the end of voting.
    """

    contributions: list[Contribution] = field(default_factory=list)
    partials: list[PartialDecryption] = field(default_factory=list)
    tallies: list[Tally] = field(default_factory=list)
    early: list[str] = field(default_factory=list)

    def add(self, message: Contribution | PartialDecryption | Tally, height: int, *, has_ended: bool) -> None:
        """Record a transaction in the block at `height`; `has_ended` is whether voting had ended by then."""
        if isinstance(message, Contribution):
            self.contributions.append(message)
        elif isinstance(message, PartialDecryption):
            self.partials.append(message)
            if not has_ended:
                self.early.append(f"block {height}: partial decryptions before the end of voting")
        else:
            self.tallies.append(message)
            if not has_ended:
                self.early.append(f"block {height}: a tally before the end of voting")


def check_key(facts: RoundFacts, signed_ea_pk: bytes | None, findings: Findings) -> None:
    """Check that key, threshold, commitments and indices belong together (C1).

    Args:
        signed_ea_pk: the key in a signed published configuration, None if there is none.
        findings: findings of C1.
    """
    findings.count = len(facts.indices)
    if not facts.ea_pk:
        findings.add_missing("the round has no election key yet")
        return
    try:
        proofs.check_point("ea_pk", facts.ea_pk)
    except EncodingError as error:
        findings.add_problem(str(error))
    if signed_ea_pk is not None and signed_ea_pk != facts.ea_pk:
        findings.add_problem("the election key is not the one in the signed configuration")
    if facts.threshold == 0:
        return
    size = ceremony_size(facts)
    if not facts.commitments or facts.commitments[0] != facts.ea_pk:
        findings.add_problem("the election key is not the first commitment of the key ceremony")
    if len(facts.commitments) != facts.threshold:
        findings.add_problem(f"{len(facts.commitments)} commitments for threshold {facts.threshold}")
    if facts.threshold > size:
        findings.add_problem(f"threshold {facts.threshold} for {size} validators")
    indices = list(facts.indices.values())
    if not indices:
        findings.add_missing("the round lists no validators")
    if len(set(indices)) < len(indices) or any(not 1 <= index <= size for index in indices):
        findings.add_problem(f"the validator indices {sorted(indices)} are not distinct numbers from 1 to {size}")


def ceremony_size(facts: RoundFacts) -> int:
    """Return the number of validators at the key ceremony, including those removed afterwards."""
    sent = [contribution.receivers + 1 for contribution in facts.contributions]
    return max([len(facts.indices), len(facts.contributions), *sent])


def check_contributions(
    facts: RoundFacts, transactions: Iterable[Contribution], findings: Findings, *, all_read: bool
) -> None:
    """Check that the contributions add up to the commitments (C2).

    If validators were removed after the ceremony, the round no longer lists all contributions. The transactions do: the
    last one of each validator. If the ceremony was repeated, they may also include validators that took part
    only in an earlier attempt.

    Args:
        facts: the round.
        transactions: the contributions in the blocks that were read.
        findings: findings of C2.
        all_read: whether all blocks were read.
    """
    if facts.threshold == 0:
        findings.add_missing("the round has no key ceremony")
        return
    if not facts.ea_pk:
        findings.add_missing("the round has no election key yet")
        return
    listed = {entry.creator: entry.commitments for entry in facts.contributions}
    sent = {entry.creator: entry.commitments for entry in transactions}
    size = ceremony_size(facts)
    candidates = [entries for entries in (listed, sent) if len(entries) >= size]
    if not candidates:
        findings.add_missing(
            f"only {max(len(listed), len(sent))} of {size} contributions to the key ceremony are available"
        )
        return
    findings.count = size
    valid = [entries for entries in candidates if _add_up(entries.values(), facts.commitments)]
    if (all_read and len(sent) == size and sent not in valid) or (
        not valid and any(len(entries) == size for entries in candidates)
    ):
        findings.add_problem("the contributions do not add up to the commitments of the key")
    elif not valid:
        findings.add_missing(
            "the ceremony was repeated with other validators, whose contributions cannot be distinguished"
        )


def _add_up(contributions: Iterable[tuple[bytes, ...]], commitments: tuple[bytes, ...]) -> bool:
    contributions = list(contributions)
    if any(len(contribution) != len(commitments) for contribution in contributions):
        return False
    try:
        return all(
            proofs.sum_points([contribution[at] for contribution in contributions]) == commitment
            for at, commitment in enumerate(commitments)
        )
    except EncodingError:
        return False


class PartialChecks:
    """The partial decryptions and totals of a round (C3, C4).

    Args:
        facts: the round.
        transactions: the round's ceremony and tally transactions.
        published: entries by validator index as a node lists them; None if it does not. They are used if the tally was
            not read, and otherwise compared.
    """

    def __init__(
        self,
        facts: RoundFacts,
        transactions: TallyTransactions,
        published: Mapping[int, list[PartialEntry]] | None,
        findings: Mapping[str, Findings],
    ) -> None:
        self._facts = facts
        self._transactions = transactions
        self._findings = findings
        self._partials: dict[Option, list[Partial]] = {}
        sent: dict[int, list[PartialEntry]] = {}
        # Before the tally was read, some partial decryptions may be missing.
        for message in transactions.partials if transactions.tallies else ():
            sent.setdefault(message.index, []).extend(message.entries)
            known = facts.indices.get(message.creator)
            if known is not None and known != message.index:
                findings["C3"].add_problem(f"validator {known} sent partial decryptions as {message.index}")
        if sent and published is not None and _sorted(sent) != _sorted(published):
            findings["C3"].add_problem("the published partial decryptions do not match the transactions")
        for index, entries in (sent or published or {}).items():
            for entry in entries:
                option = (entry.proposal_id, entry.decision)
                self._partials.setdefault(option, []).append(Partial(index, entry.point, entry.proof))
        for option, partials in self._partials.items():
            if len(partials) > MAX_VALIDATORS:
                findings["C3"].add_problem(f"{_name(option)}: {len(partials)} partial decryptions")
                del partials[MAX_VALIDATORS:]

    def check(self, sums: Mapping[Option, bytes], results: Mapping[Option, int]) -> None:
        """Check all partial decryptions and totals.

        Args:
            sums: the recomputed sum of each option with reveals.
            results: the published totals.
        """
        if self._facts.threshold == 0:
            self._check_whole_key(sums, results)
            return
        if not self._partials and sums:
            for check_id in ("C3", "C4"):
                self._findings[check_id].add_missing("no source has the partial decryptions")
            return
        for option in sorted(self._partials.keys() - sums.keys()):
            self._findings["C3"].add_problem(f"{_name(option)}: partial decryptions, but no reveals")
        for option in sorted(sums):
            self._check_option(option, sums[option], results.get(option))

    def _check_option(self, option: Option, ciphertext: bytes, total: int | None) -> None:
        partials = self._partials.get(option, [])
        try:
            checked = proofs.check_tally(
                ciphertext=ciphertext,
                commitments=self._facts.commitments,
                threshold=self._facts.threshold,
                partials=partials,
                total=total or 0,
            )
        except EncodingError as error:
            for check_id in ("C3", "C4"):
                self._findings[check_id].add_problem(f"{_name(option)}: {error}")
            return
        self._findings["C3"].count += len(partials)
        for partial, reason in zip(partials, checked.reasons, strict=True):
            if reason is not None:
                self._findings["C3"].add_problem(f"{_name(option)}, validator {partial.validator_index}: {reason}")
        self._findings["C4"].count += 1
        if total is None:
            self._findings["C4"].add_problem(f"{_name(option)}: no total is published")
        elif checked.total == "too_few":
            self._findings["C4"].add_problem(
                f"{_name(option)}: fewer than {self._facts.threshold} valid partial decryptions"
            )
        elif checked.total == "differs":
            self._findings["C4"].add_problem(f"{_name(option)}: the sum does not decrypt to {total}")

    def _check_whole_key(self, sums: Mapping[Option, bytes], results: Mapping[Option, int]) -> None:
        """Check the proofs of a round without a threshold, which are in its tally transaction."""
        self._findings["C3"].add_missing("the round has no threshold, so there are no partial decryptions")
        tallied = {(e.proposal_id, e.decision): e.proof for tally in self._transactions.tallies for e in tally.entries}
        for option, ciphertext in sorted(sums.items()):
            proof, total = tallied.get(option, b""), results.get(option, 0)
            if not proof:
                self._findings["C4"].add_missing("no source has the proofs of decryption")
                continue
            self._findings["C4"].count += 1
            try:
                is_valid = proofs.verify_decryption(self._facts.ea_pk, ciphertext, total, proof)
            except EncodingError:
                is_valid = False
            if not is_valid:
                self._findings["C4"].add_problem(f"{_name(option)}: the proof of decryption is not valid for {total}")


def _sorted(partials: Mapping[int, list[PartialEntry]]) -> list[tuple[int, int, int, bytes, bytes]]:
    return sorted(
        (index, entry.proposal_id, entry.decision, entry.point, entry.proof)
        for index, entries in partials.items()
        for entry in entries
    )


def _name(option: Option) -> str:
    return f"proposal {option[0]}, option {option[1]}"


def check_amounts(results: Mapping[Option, int], findings: Findings) -> None:
    """Check that the totals are possible (C5)."""
    per_proposal: Counter[int] = Counter()
    for option, total in sorted(results.items()):
        findings.count += 1
        per_proposal[option[0]] += total
        if total >= MAX_TOTAL:
            findings.add_problem(f"{_name(option)}: total {total} is not below 2^28")
    for proposal_id, total in sorted(per_proposal.items()):
        if total > MAX_PROPOSAL_TOTAL:
            findings.add_problem(f"proposal {proposal_id}: {total} ballots are more than the supply of ZEC")


def check_labels(facts: RoundFacts, summary: Mapping[Option, OptionSummary], findings: Findings) -> None:
    """Check that the summary shows the totals with the titles and labels of the round (C6)."""
    for option, entry in sorted(summary.items()):
        title, labels = facts.titles.get(option[0], ("", {}))
        if entry.title not in ("", title) or entry.label not in ("", labels.get(option[1])):
            findings.add_problem(f"{_name(option)}: the summary has another title or label than the round")


def check_results(
    results: Mapping[Option, int],
    summary: Mapping[Option, OptionSummary] | None,
    tallies: list[Tally],
    sums: Mapping[Option, bytes],
    findings: Findings,
) -> None:
    """Compare the totals wherever they are published (C6).

    Args:
        summary: the vote summary, None if the source does not have it.
        tallies: the tally transactions with code 0 in the blocks that were read.
        sums: the sums of the options with reveals.
        findings: findings of C6.
    """
    findings.count = len(results)
    for option in sorted(sums.keys() - results.keys()):
        findings.add_problem(f"{_name(option)} has reveals but no result")
    for option in sorted(option for option, total in results.items() if total and option not in sums):
        findings.add_problem(f"{_name(option)} has a result but no reveals")
    if summary is not None:
        for option in sorted(results.keys() | summary.keys()):
            shown = summary[option].total if option in summary else 0
            if results.get(option, 0) != shown:
                findings.add_problem(f"{_name(option)}: result {results.get(option, 0)}, in the summary {shown}")
    if not tallies and sums:
        findings.add_missing("no tally transaction was read")
        return
    if len(tallies) > 1:
        findings.add_problem(f"{len(tallies)} tally transactions succeeded")
        return
    for tally in tallies:
        findings.count += 1
        entries = {(entry.proposal_id, entry.decision): entry.total for entry in tally.entries}
        if len(entries) < len(tally.entries):
            findings.add_problem("the tally transaction lists an option twice")
        for option in sorted(entries.keys() | results.keys()):
            if entries.get(option) != results.get(option):
                findings.add_problem(
                    f"{_name(option)}: result {results.get(option)}, in the tally transaction {entries.get(option)}"
                )
