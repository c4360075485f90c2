"""All checks, in the order in which they are reported."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final

from conformance import (
    admission_checks,
    connection_checks,
    field_checks,
    json_checks,
    leak_checks,
    load_checks,
    post_checks,
    query_checks,
    restart_checks,
    reveal_checks,
    route_checks,
    slow_body_checks,
    status_checks,
)
from conformance.checks import Check

CHECKS: Final[Sequence[Check]] = tuple(
    chain(
        status_checks.checks,
        route_checks.checks,
        post_checks.checks,
        field_checks.checks,
        json_checks.checks,
        admission_checks.checks,
        query_checks.checks,
        slow_body_checks.checks,
        connection_checks.checks,
        load_checks.checks,
        leak_checks.checks,
        reveal_checks.checks,
        restart_checks.checks,
    )
)


def select_checks(only: Sequence[str]) -> list[Check]:
    """The checks with these ids, or of these topics (the part of an id before the hyphen); all without any.

    Raises:
        ValueError: there is no such check or topic.
    """
    wanted = {text.upper() for text in only}
    known = {name for check in CHECKS for name in (check.id, check.id.partition("-")[0])}
    if unknown := sorted(wanted - known):
        raise ValueError(f"no such check or topic: {', '.join(unknown)}")
    return [check for check in CHECKS if not wanted or wanted & {check.id, check.id.partition("-")[0]}]
