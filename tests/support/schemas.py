"""Documented schemas of the commands' `--json` output."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema_rs

from scripts.cli_docs import SCHEMAS


@cache
def _load_validator(name: str) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(json.loads((SCHEMAS / f"{name}.json").read_text()))


def assert_conforms(name: str, value: Any) -> None:
    """Assert that a value has the shape documented for this command (`queue-list`, …)."""
    problems = [
        f"{'/'.join(map(str, error.instance_path))}: {error.message}"
        for error in _load_validator(name).iter_errors(value)
    ]
    assert problems == []
