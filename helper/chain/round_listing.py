"""Rounds as people read them: titles, labels, totals. What is worked with is in models.py. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from helper.chain.json_fields import Fields

LONGEST_TEXT = 400
"""Characters of a title or label that are passed on."""


@dataclass(frozen=True, slots=True)
class ListedOption:
    """An answer that may be chosen."""

    index: int
    label: str


@dataclass(frozen=True, slots=True)
class ListedProposal:
    """A question with its answers."""

    id: int
    title: str
    options: tuple[ListedOption, ...]


@dataclass(frozen=True, slots=True)
class ListedRound:
    """A round; `status` as the chain numbers it, `vote_end_time` in unix seconds."""

    round_id: bytes
    status: int
    vote_end_time: int
    created_at_height: int
    proposals: tuple[ListedProposal, ...]


@dataclass(frozen=True, slots=True)
class Total:
    """What one answer of a finalised round came to."""

    proposal_id: int
    option: int
    value: int


def parse_listing(answer: object) -> list[ListedRound]:
    """`GET rounds`, every round in it."""
    return [_round(fields) for fields in Fields(answer, "answer").children("rounds")]


def parse_totals(answer: object) -> list[Total]:
    """`GET tally-results/{id}`: the answers that got anything."""
    return [
        Total(
            proposal_id=fields.uint("proposal_id", maximum=2**31),
            option=fields.uint("vote_decision", maximum=2**31),
            value=fields.uint("total_value", maximum=2**63),
        )
        for fields in Fields(answer, "answer").children("results")
    ]


def _round(fields: Fields) -> ListedRound:
    return ListedRound(
        round_id=fields.blob("vote_round_id", 32),
        status=fields.uint("status", maximum=255),
        vote_end_time=fields.uint("vote_end_time", maximum=2**62),
        created_at_height=fields.uint("created_at_height", maximum=2**62),
        proposals=tuple(_proposal(proposal) for proposal in fields.children("proposals")),
    )


def _proposal(fields: Fields) -> ListedProposal:
    options = tuple(
        ListedOption(option.uint("index", maximum=2**31), option.text("label")[:LONGEST_TEXT])
        for option in fields.children("options")
    )
    return ListedProposal(fields.uint("id", maximum=2**31), fields.text("title")[:LONGEST_TEXT], options)
