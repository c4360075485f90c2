"""Whether the tokens are hard to guess, and each for one purpose. Pure; no token is ever in a message."""

from __future__ import annotations

import math
from typing import Final

from helper.doctor.result import CheckResult, fail, ok, warn

ENOUGH_BITS: Final = 64.0
"""Guesses over the network are slow, and refused ones cost: this is out of reach for ever."""

_MAKE_ONE: Final = "Make one with `openssl rand -hex 32`."
_NAMES: Final = {
    "api_token": ("[helper] api_token", "shares are taken from everybody, as public wallets need it"),
    "operator token": ("[operator] token", "the operators' part over HTTP is shut"),
}


def bits(token: str) -> float:
    """At most how many bits a token can be worth: its length times what each of its different characters tells."""
    return len(token) * math.log2(len(set(token))) if token else 0.0


def judge_tokens(api_token: str, operator_token: str) -> list[CheckResult]:
    """A line for each of the two."""
    if api_token and api_token == operator_token:
        advice = f"Every wallet that has it can watch the queue. {_MAKE_ONE}"
        return [fail("operator token", "it is the same as [helper] api_token", advice)]
    return [_one("api_token", api_token), _one("operator token", operator_token)]


def _one(subject: str, token: str) -> CheckResult:
    setting, unset = _NAMES[subject]
    if not token:
        return ok(subject, f"{setting} is not set: {unset}")
    worth = math.floor(bits(token))
    if worth < ENOUGH_BITS:
        return warn(subject, f"{setting} is weak: {len(token)} characters, at most {worth} bits", _MAKE_ONE, bits=worth)
    return ok(subject, f"{setting} is set and strong enough", bits=worth)
