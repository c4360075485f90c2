"""Rounds for display: titles, labels and totals. `helper.chain.models` has the types used for processing. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from helper.chain.json_fields import Fields
from helper.errors import InvalidResponse

MAX_TEXT_LENGTH = 400
"""Maximum length of a title or label in characters. Longer ones are truncated."""


@dataclass(frozen=True, slots=True)
class ListedOption:
    """An option of a proposal."""

    index: int
    label: str


@dataclass(frozen=True, slots=True)
class ListedProposal:
    """A proposal with its options."""

    id: int
    title: str
    options: tuple[ListedOption, ...]


@dataclass(frozen=True, slots=True)
class ListedRound:
    """A round.

    Attributes:
        status: the chain's number.
        vote_end_time: Unix seconds.
        authority_key: public key of the election authority, 32 bytes; empty if there is no valid one.
    """

    round_id: bytes
    status: int
    vote_end_time: int
    created_at_height: int
    proposals: tuple[ListedProposal, ...]
    authority_key: bytes


@dataclass(frozen=True, slots=True)
class OptionTotal:
    """Total of one option in a finalized round."""

    proposal_id: int
    option: int
    value: int


def parse_listing(response: object) -> list[ListedRound]:
    """Parse `GET rounds`."""
    return [_parse_round(fields) for fields in Fields(response, "response").children("rounds")]


def parse_totals(response: object) -> list[OptionTotal]:
    """Parse `GET tally-results/{id}`: the options with votes."""
    return [
        OptionTotal(
            proposal_id=fields.uint("proposal_id", maximum=2**31),
            option=fields.uint("vote_decision", maximum=2**31),
            value=fields.uint("total_value", maximum=2**63),
        )
        for fields in Fields(response, "response").children("results")
    ]


def _parse_round(fields: Fields) -> ListedRound:
    return ListedRound(
        round_id=fields.base64_bytes("vote_round_id", 32),
        status=fields.uint("status", maximum=255),
        vote_end_time=fields.uint("vote_end_time", maximum=2**62),
        created_at_height=fields.uint("created_at_height", maximum=2**62),
        proposals=tuple(_parse_proposal(proposal) for proposal in fields.children("proposals")),
        authority_key=_parse_authority_key(fields),
    )


def _parse_authority_key(fields: Fields) -> bytes:
    try:
        return fields.base64_bytes("ea_pk", 32)
    except InvalidResponse:  # it must not make the list of rounds unusable
        return b""


def _parse_proposal(fields: Fields) -> ListedProposal:
    options = tuple(
        ListedOption(option.uint("index", maximum=2**31), option.text("label")[:MAX_TEXT_LENGTH])
        for option in fields.children("options")
    )
    return ListedProposal(fields.uint("id", maximum=2**31), fields.text("title")[:MAX_TEXT_LENGTH], options)
