"""Parses the published documents about a round: the round, its tree, sums, results and partial decryptions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import TypeVar

import orjson

from audit import source as sources
from audit.transactions import PartialEntry
from helper.chain.chain_data import LeafBlock
from helper.chain.json_fields import Fields
from helper.chain.rest_client import parse_leaves
from helper.errors import InvalidResponse

FINALIZED = 3
"""Status of a round whose result is final."""

Option = tuple[int, int]
"""A proposal id and an option index."""

MAX_VALIDATORS = 1000
"""Maximum number of validators of a key ceremony. The time of the checks grows with its square. Chains have tens."""

_MAX_UINT32 = 2**32 - 1

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class DkgContribution:
    """A contribution to the key ceremony as the round lists it.

    Attributes:
        creator: the validator's address.
        receivers: number of encrypted shares, one for each other validator.
    """

    creator: str
    commitments: tuple[bytes, ...]
    receivers: int


@dataclass(frozen=True, slots=True)
class RoundFacts:
    """The published fields of a round.

    Attributes:
        options: number of options by proposal id.
        titles: title of each proposal, and labels of its options by index.
        indices: index of each listed ceremony validator by address.
        commitments: the combined commitments of the key ceremony.
    """

    round_id: bytes
    status: int
    snapshot_height: int
    created_at_height: int
    snapshot_blockhash: bytes
    proposals_hash: bytes
    vote_end_time: int
    nullifier_imt_root: bytes
    nc_root: bytes
    ea_pk: bytes
    options: dict[int, tuple[int, ...]]
    titles: dict[int, tuple[str, dict[int, str]]]
    indices: dict[str, int]
    threshold: int
    commitments: tuple[bytes, ...]
    contributions: tuple[DkgContribution, ...]
    timed_out: bool


def parse_round_facts(document: object) -> RoundFacts:
    """Parse `GET round/{id}`. Raises `InvalidResponse`."""
    fields = Fields(document, "response").child("round")
    titles = _index(fields.children("proposals"), _parse_proposal)
    validators = fields.children("ceremony_validators")
    return RoundFacts(
        round_id=fields.base64_bytes("vote_round_id", 32),
        status=fields.uint("status", maximum=2**31),
        snapshot_height=fields.uint("snapshot_height"),
        created_at_height=fields.uint("created_at_height", maximum=2**62),
        snapshot_blockhash=fields.base64_bytes("snapshot_blockhash", 32),
        proposals_hash=fields.base64_bytes("proposals_hash", 32),
        vote_end_time=fields.uint("vote_end_time", maximum=2**62),
        nullifier_imt_root=fields.base64_bytes("nullifier_imt_root", 32),
        nc_root=fields.base64_bytes("nc_root", 32),
        ea_pk=fields.decode("ea_pk", fields.text("ea_pk"), None),
        options={proposal_id: tuple(labels) for proposal_id, (_, labels) in titles.items()},
        titles=titles,
        indices=_index(
            validators, lambda entry: (entry.text("validator_address"), entry.uint("shamir_index", maximum=_MAX_UINT32))
        ),
        threshold=fields.uint("threshold", maximum=MAX_VALIDATORS),
        commitments=_points(fields, "feldman_commitments"),
        contributions=tuple(
            DkgContribution(
                entry.text("validator_address"), _points(entry, "feldman_commitments"), len(entry.items("payloads"))
            )
            for entry in fields.children("dkg_contributions")
        ),
        timed_out=fields.boolean("tally_timed_out"),
    )


def _parse_proposal(fields: Fields) -> tuple[int, tuple[str, dict[int, str]]]:
    labels = _index(
        fields.children("options"), lambda option: (option.uint("index", maximum=2**31), option.text("label"))
    )
    return fields.uint("id", maximum=2**31), (fields.text("title"), labels)


def _index(entries: Iterable[Fields], parse: Callable[[Fields], tuple[K, V]]) -> dict[K, V]:
    """Parse entries to keys and values. An entry that is listed twice is an error: readers may see either one."""
    values: dict[K, V] = {}
    for entry in entries:
        key, value = parse(entry)
        if key in values:
            raise InvalidResponse(f"{entry.path}: listed twice")
        values[key] = value
    return values


def _points(fields: Fields, name: str) -> tuple[bytes, ...]:
    return tuple(fields.decode(f"{name}[{i}]", value, None) for i, value in enumerate(fields.items(name)))


def parse_sums(document: object, proposal_id: int) -> dict[Option, bytes]:
    """Parse `GET tally/{id}/{proposal}`: the sum of each option with reveals. Raises `InvalidResponse`."""
    fields = Fields(document, "response")
    if not fields.has("tally"):
        return {}
    tally = fields.child("tally")
    sums: dict[Option, bytes] = {}
    for name in tally.names():
        if not (name.isascii() and name.isdigit() and len(name) <= 10):
            raise tally.invalid_field(name[:20], "expected the number of an option")
        if (proposal_id, int(name)) in sums:  # `1` and `01`
            raise tally.invalid_field(name, "listed twice")
        sums[proposal_id, int(name)] = tally.base64_bytes(name, 64)
    return sums


def parse_results(document: object, round_id: bytes) -> dict[Option, int]:
    """Parse `GET tally-results/{id}`: the total of each option. Raises `InvalidResponse`."""
    results: dict[Option, int] = {}
    for entry in Fields(document, "response").children("results"):
        option = (entry.uint("proposal_id", maximum=2**32), entry.uint("vote_decision", maximum=2**32))
        if entry.base64_bytes("vote_round_id", 32) != round_id or option in results:
            raise entry.invalid_field("vote_round_id", "of another round, or listed twice")
        results[option] = entry.uint("total_value")
    return results


@dataclass(frozen=True, slots=True)
class OptionSummary:
    """Count of reveals and total of one option, and the title and label that are shown with them, "" if none."""

    count: int
    total: int
    title: str = ""
    label: str = ""


def parse_summary(document: object) -> dict[Option, OptionSummary]:
    """Parse `GET vote-summary/{id}`. Raises `InvalidResponse`."""

    def parse_options(proposal: Fields) -> tuple[int, dict[int, OptionSummary]]:
        title = proposal.text("title")
        return proposal.uint("id", maximum=2**32), _index(
            proposal.children("options"),
            lambda option: (
                option.uint("index", maximum=2**32),
                OptionSummary(option.uint("ballot_count"), option.uint("total_value"), title, option.text("label")),
            ),
        )

    proposals = _index(Fields(document, "response").children("proposals"), parse_options)
    return {(proposal_id, index): entry for proposal_id, of in proposals.items() for index, entry in of.items()}


def parse_partials(document: object) -> dict[int, list[PartialEntry]]:
    """Parse `GET partial-decryptions/{id}`: the entries of each validator index. Raises `InvalidResponse`."""
    partials: dict[int, list[PartialEntry]] = {}
    for entry in Fields(document, "response").children("entries"):
        partials.setdefault(entry.uint("validator_index", maximum=2**32), []).append(
            PartialEntry(
                entry.uint("proposal_id", maximum=2**32),
                entry.uint("vote_decision", maximum=2**32),
                entry.decode("partial_decrypt", entry.text("partial_decrypt"), None),
                entry.decode("dleq_proof", entry.text("dleq_proof"), None),
            )
        )
    return partials


def parse_leaf_blocks(document: object) -> list[LeafBlock]:
    """Parse all pages of leaves, joined. Raises `InvalidResponse`."""
    blocks, _ = parse_leaves(document)
    return blocks


def parse_roots(document: object) -> dict[int, bytes]:
    """Parse the roots by height. Raises `InvalidResponse`."""
    return _index(
        Fields(document, "response").children("roots"),
        lambda entry: (entry.uint("height", maximum=2**62), entry.base64_bytes("root", 32)),
    )


def digest_unbound_fields(facts: RoundFacts) -> str:
    """Return the SHA-256 (hex) of the fields that the round id does not depend on: election key, titles and labels."""
    proposals = [
        [proposal_id, title, sorted(labels.items())] for proposal_id, (title, labels) in sorted(facts.titles.items())
    ]
    return sha256(orjson.dumps([facts.ea_pk.hex(), proposals])).hexdigest()


@dataclass(frozen=True, slots=True)
class NodeHead:
    """What one node reports about a block and the round.

    Attributes:
        block_id: the block's id.
        app_hash: the state before the block.
        round: the result of `digest_unbound_fields`; "" if not known.
    """

    node: str
    height: int
    block_id: str
    app_hash: str
    round: str


def parse_heads(document: object) -> list[NodeHead]:
    """Parse the heads that nodes reported. Raises `InvalidResponse`."""
    return [
        NodeHead(
            entry.text("node"),
            entry.uint("height", maximum=2**62),
            entry.text("block_id"),
            entry.text("app_hash"),
            entry.text("round"),
        )
        for entry in Fields(document, "response").children("heads")
    ]


def digest_document(name: str, document: object, round_id: bytes) -> str:
    """Return the SHA-256 (hex) of what an audit reads of a document, so that nodes of different versions agree.

    The name of a node in heads is no part of it, nor is the order of sums, results and the like.

    Raises:
        InvalidResponse: it cannot be read.
    """
    parsers: dict[str, Callable[[object], object]] = {
        sources.ROUND: parse_round_facts,
        sources.LEAVES: parse_leaf_blocks,
        sources.ROOTS: parse_roots,
        sources.RESULTS: partial(parse_results, round_id=round_id),
        sources.SUMMARY: parse_summary,
        sources.PARTIALS: parse_partials,
        sources.HEADS: lambda document: [replace(head, node="") for head in parse_heads(document)],
    }
    parsed = parsers.get(name.partition("/")[0], partial(parse_sums, proposal_id=0))(document)
    entries = sorted(parsed.items()) if isinstance(parsed, dict) else parsed if isinstance(parsed, list) else [parsed]
    digest = sha256()
    for entry in entries:  # the text of all leaves would need gigabytes
        digest.update(repr(entry).encode())
    return digest.hexdigest()
