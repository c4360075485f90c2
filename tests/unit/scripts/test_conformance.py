"""docs/conformance.md matches the tests, and the documents name tests that exist."""

import re

from scripts.conformance import DOCUMENT, ROOT, RULES, SECTIONS, collect_marked_tests, render_document

UNLISTED = {"R16", "R17"}
"""Rules of validator registration and the page."""


def test_every_rule_has_a_test_and_every_marked_rule_exists() -> None:
    assert set(RULES) == set(collect_marked_tests()) - UNLISTED


def test_rules_are_complete_and_in_the_order_of_their_numbers() -> None:
    for section in SECTIONS:
        numbers = [int(rule[1:]) for rule in RULES if rule.startswith(section)]
        assert numbers == list(range(1, len(numbers) + 1))
    assert {rule[0] for rule in RULES} == set(SECTIONS)
    assert len([rule for rule in RULES if rule.startswith("N")]) == 30


def test_conformance_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == render_document(), "run `make docs`"


def test_documents_name_existing_test_files() -> None:
    tests = [str(path) for path in ROOT.joinpath("tests").rglob("test_*.py")]
    text = "".join(path.read_text() for path in DOCUMENT.parent.rglob("*.md"))
    named = set(re.findall(r"[\w/]*\btest_\w+\.py", text))
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in tests)] == []
