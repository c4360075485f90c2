"""The list of checks: stable ids, sources, topics in the document, selection."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from conformance.catalog import CHECKS, select_checks

DOCUMENT = Path(__file__).parents[3] / "docs" / "conformance-kit.md"
SOURCES = ("protocol ", "protocol-now ", "wallet 5.3.0: ", "draft: ", "RFC ")
TOPICS = {check.id.partition("-")[0] for check in CHECKS}


def test_catalog_ids_are_unique_and_well_formed() -> None:
    assert [name for name, count in Counter(check.id for check in CHECKS).items() if count > 1] == []
    assert [check.id for check in CHECKS if re.fullmatch("[A-Z]+-[0-9]{3,4}", check.id) is None] == []
    assert len(CHECKS) > 450


def test_catalog_ids_of_some_checks_stay_the_same() -> None:
    """CI systems select checks by id, so the meaning of an id never changes."""
    names = {check.id: check.name for check in CHECKS}
    assert names["POST-001"] == "accepts: body of wallet library 5.3.0"
    assert names["DUP-002"] == "a repeat is `duplicate`: submit_at 0"
    assert names["FIELD-0220"] == "refuses primary_blind above the modulus"
    assert names["FIELD-1033"] == "refuses proposal_id plus 2^32"
    assert names["HASH-001"] == "refuses a share with another shares_hash"
    assert names["SLOW-002"] == "the receipt has exactly its fields and the token"
    assert names["CHAIN-002"] == "no share is sent before its submit_at"
    assert names["LEAK-020"] == "no request contains the nullifier of a share that is not due"
    assert names["RESTART-002"] == "a waiting share is still known"


def test_catalog_checks_have_names_and_known_sources() -> None:
    assert [check.id for check in CHECKS if not check.source.startswith(SOURCES)] == []
    assert [name for name, count in Counter((check.id[:4], check.name) for check in CHECKS).items() if count > 1] == []
    assert [check.id for check in CHECKS if len(check.name) > 100 or not check.name] == []


def test_catalog_checks_that_take_shares_need_them() -> None:
    assert [check.id for check in CHECKS if check.shares and not check.needs_shares] == []


def test_document_lists_every_topic() -> None:
    table = DOCUMENT.read_text().partition("## Topics")[2].partition("\n\n`CHAIN`")[0]
    listed = set(re.findall("`([A-Z]+)`", "".join(line.split("|")[1] for line in table.splitlines() if "|" in line)))
    assert listed == TOPICS


@pytest.mark.parametrize(
    ("only", "expected"), [(["DUP-001"], {"DUP-001"}), (["dup-001", "CORS-005"], {"DUP-001", "CORS-005"})]
)
def test_select_by_id_returns_these_checks(only: list[str], expected: set[str]) -> None:
    assert {check.id for check in select_checks(only)} == expected


def test_select_by_topic_returns_all_of_it() -> None:
    assert select_checks([]) == list(CHECKS)
    assert [check for check in CHECKS if check.id.startswith("SLOW-")] == select_checks(["slow"])


def test_select_unknown_check_is_refused() -> None:
    with pytest.raises(ValueError, match="no such check or topic: NONE, POST-999"):
        select_checks(["POST-999", "POST", "none"])
