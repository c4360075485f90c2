"""Checks that tokens are hard to guess and not reused. Pure. No message contains a token."""

from __future__ import annotations

import math
from typing import Final

from helper.doctor.result import CheckResult, fail, ok, warn

MIN_ENTROPY_BITS: Final = 64.0
"""Sufficient against guesses over the network, which are slow and rate-limited."""

_CREATE_ADVICE: Final = "Create one with `openssl rand -hex 32`."
_NAMES: Final = {
    "api_token": ("[helper] api_token", "shares are accepted from any client, as public wallets need"),
    "operator token": ("[operator] token", "the operator API over HTTP is disabled"),
}


def entropy_bits(token: str) -> float:
    """Upper bound of a token's entropy in bits: length times log2 of the number of distinct characters."""
    return len(token) * math.log2(len(set(token))) if token else 0.0


def judge_tokens(api_token: str, operator_token: str) -> list[CheckResult]:
    """Check both tokens."""
    if api_token and api_token == operator_token:
        advice = f"Every wallet that knows it can watch the queue. {_CREATE_ADVICE}"
        return [fail("operator token", "identical to [helper] api_token", advice)]
    return [_judge_token("api_token", api_token), _judge_token("operator token", operator_token)]


def _judge_token(subject: str, token: str) -> CheckResult:
    setting, unset = _NAMES[subject]
    if not token:
        return ok(subject, f"{setting} is not set: {unset}")
    entropy = math.floor(entropy_bits(token))
    if entropy < MIN_ENTROPY_BITS:
        return warn(
            subject, f"{setting} is weak: {len(token)} characters, at most {entropy} bits", _CREATE_ADVICE, bits=entropy
        )
    return ok(subject, f"{setting} is set and strong enough", bits=entropy)
