"""docs/conformance.md says what the tests say."""

from scripts.conformance import DOCUMENT, RULES, marked_tests, render


def test_every_rule_has_a_test() -> None:
    assert sorted(set(RULES) - set(marked_tests())) == []


def test_the_document_is_that_of_these_tests() -> None:
    assert DOCUMENT.read_text() == render(), "run `make docs`"
