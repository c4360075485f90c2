"""Request and response schemas of the routes under `/api`, for OpenAPI. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, NotRequired

from typing_extensions import TypedDict

from admin.admin_database import Registration
from admin.published_config import AUTH_VERSION, LAYOUT_FIELDS
from admin.registration_request import (
    ACCOUNT_PREFIX,
    MAX_ADDRESS_CHARS,
    MAX_BASE64_CHARS,
    MAX_MONIKER_CHARS,
)
from admin.url_policy import MAX_URL_CHARS
from helper.chain.chain_data import RoundAuthentication
from helper.server.openapi import Operation


@dataclass(frozen=True, slots=True)
class ChainFacts:
    """Data that a browser wallet needs to add the chain: id (None while unknown), public URLs, denomination."""

    chain_id: str | None
    rest: str
    rpc: str
    denom: str
    bech32_prefix: str = ACCOUNT_PREFIX


@dataclass(frozen=True, slots=True)
class UiConfig:
    """Configuration of the page: mode (`production` or `development`) and URL of the PIR service."""

    mode: str = "production"
    dev_pir_controls: bool = False
    precomputed_base_url: str = ""


class RegistrationResponse(TypedDict):
    """`pending` until `expires_at` (Unix seconds), or `registered` if the validator has a staking record."""

    status: Literal["pending", "registered"]
    expires_at: NotRequired[int]


class OptionResponse(TypedDict):
    """An option of a proposal, with its total once the round is finalized."""

    index: int
    label: str
    total: int | None


class ProposalResponse(TypedDict):
    """A proposal of a round."""

    id: int
    title: str
    options: list[OptionResponse]


class AuditCheckResponse(TypedDict):
    """A check that did not pass, and why."""

    id: str
    verdict: Literal["failed", "not_checked"]
    why: str


class AuditResponse(TypedDict):
    """The helper's audit of a finished round: time (Unix seconds), number of passed checks, and the others."""

    at: int
    verdict: Literal["passed", "failed", "not_checked"]
    passed: int
    others: list[AuditCheckResponse]


class RoundResponse(TypedDict):
    """A round. Status: 1 active, 2 tallying, 3 finalized, 4 pending. `audit` is null without an audit."""

    round_id: str
    status: int
    vote_end_time: int
    proposals: list[ProposalResponse]
    audit: AuditResponse | None


class RoundsResponse(TypedDict):
    """Rounds, newest first."""

    rounds: list[RoundResponse]


class RoundAuthenticationResponse(TypedDict):
    """Signatures of the rounds in the published configuration.

    `trusted_keys` are the ids of the keys in the static configuration; null if they are not known, and then `rounds` is
    empty. `rounds` has each round of the configuration by its id in hex. `key_mismatch`: the key of the election
    authority is not the one on the chain.
    """

    trusted_keys: list[str] | None
    rounds: dict[str, RoundAuthentication]


class SignedEntryResponse(TypedDict):
    """What a manager signs for an entry: the message in base64, and its SHA-256 in hex."""

    canonical_payload_b64: str
    signed_payload_hash: str
    auth_version: int


def _text_schema(about: str, max_chars: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": max_chars, "description": about}


REGISTRATION_SCHEMA: Final = {
    "type": "object",
    "description": "A registration. The first four fields, as compact JSON in this order, are signed (ADR-036).",
    "properties": {
        "operator_address": _text_schema(f"Account address, {ACCOUNT_PREFIX}1…", MAX_ADDRESS_CHARS),
        "url": _text_schema("Base URL of the validator's helper; may be empty.", MAX_URL_CHARS),
        "moniker": {**_text_schema("Display name.", MAX_MONIKER_CHARS), "minLength": 1},
        "timestamp": {"type": "integer", "description": "Time of the signature, Unix seconds."},
        "signature": _text_schema("64 bytes, base64.", MAX_BASE64_CHARS),
        "pub_key": _text_schema("33 bytes, base64: a compressed secp256k1 key.", MAX_BASE64_CHARS),
    },
    "required": ["operator_address", "url", "moniker", "timestamp", "signature", "pub_key"],
}

VOTING_CONFIG: Final = Operation("The published voting configuration, unchanged.", dict[str, Any], refusals=(502,))
ROUND_AUTHENTICATION: Final = Operation(
    "Whether each round of the published voting configuration has a valid signature by a trusted key.",
    RoundAuthenticationResponse,
    refusals=(502,),
)
_LAYOUT_NUMBER: Final = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
ENTRY_SCHEMA: Final = {
    "type": "object",
    "description": "An entry of the published voting configuration, with its round.",
    "properties": {
        "round_id": {"type": "string", "pattern": "^[0-9a-f]{64}$", "description": "The round."},
        "ea_pk": _text_schema("Key of the election authority: 32 bytes, base64.", 44),
        "auth_version": {"const": AUTH_VERSION, "description": "Version of the signed message."},
        "pir_layout": {
            "type": "object",
            "description": "The configuration's PIR layout.",
            "properties": {name: {**_LAYOUT_NUMBER, "description": f"`{name}`."} for name in LAYOUT_FIELDS},
            "required": list(LAYOUT_FIELDS),
        },
    },
    "required": ["round_id", "ea_pk", "auth_version", "pir_layout"],
}
SIGN_CONFIG_ENTRY: Final = Operation(
    "What a manager signs for an entry of the voting configuration. Nothing is stored or signed here.",
    SignedEntryResponse,
    body=ENTRY_SCHEMA,
    refusals=(408, 413),
)
REGISTER: Final = Operation(
    "Register a validator.", RegistrationResponse, body=REGISTRATION_SCHEMA, refusals=(401, 408, 413)
)
MAX_PAGES: Final = 10_000
PENDING: Final = Operation(
    "A page of the pending registrations, oldest first. The Link header contains the next page,"
    " X-Total-Count the number of registrations on all pages.",
    list[Registration],
    query={
        "page": {
            "description": "Page number; 1 if absent. A page has at most 64,000 bytes.",
            "schema": {"type": "integer", "minimum": 1, "maximum": MAX_PAGES, "default": 1},
        }
    },
)
UI_CONFIG: Final = Operation("Configuration of the page.", UiConfig)
CHAIN: Final = Operation("Data that a browser wallet needs to add the chain.", ChainFacts)
ROUNDS: Final = Operation("The chain's rounds, with totals.", RoundsResponse, refusals=(502,))
