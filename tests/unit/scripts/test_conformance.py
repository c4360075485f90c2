"""docs/conformance.md matches the tests."""

from scripts.conformance import DOCUMENT, RULES, collect_marked_tests, render_document


def test_every_rule_has_a_test() -> None:
    assert sorted(set(RULES) - set(collect_marked_tests())) == []


def test_conformance_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == render_document(), "run `make docs`"
