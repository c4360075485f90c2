"""The table of refusals that may pass, and the reasons for a pause."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from helper.core.refusals import (
    RETRYABLE_STATUSES,
    PauseReason,
    Situation,
    attempt_token,
    find_refusal,
    retry_after_of,
)

TOKEN = "0123456789abcdef" * 4
HEADER = b"x-vote-ingress-attempt-v1"
DETAILS = {Situation.SLOW_HEAD: (8.5,), Situation.PAUSED: ("starting",)}


@pytest.mark.rule("W4", "W5")
@pytest.mark.parametrize("situation", Situation)
def test_refusal_that_may_pass_is_final_to_no_wallet(situation: Situation) -> None:
    details = DETAILS.get(situation, ())
    other = find_refusal(situation, *details, names_attempt=False)
    assert (other.status, retry_after_of(other.status)) == (503, 2), "429 and 4xx end the delivery of several wallets"
    attempt = find_refusal(situation, *details, names_attempt=True)
    assert attempt.status in RETRYABLE_STATUSES
    assert attempt.is_receipt == (attempt.status == 408) == (situation is Situation.SLOW_BODY)
    assert retry_after_of(attempt.status) == (None if attempt.is_receipt else 2)
    assert other.text == attempt.text != ""
    assert "{" not in other.text


def test_deployed_examples_use_the_statuses_of_overload() -> None:
    deploy = Path(__file__).parents[3] / "deploy"
    statuses = {
        str(int(find_refusal(Situation.TOO_MANY_REQUESTS, names_attempt=named).status)) for named in (False, True)
    }
    rules = yaml.safe_load((deploy / "prometheus" / "alerts.yaml").read_text())["groups"][0]["rules"]
    (flood,) = [rule["expr"] for rule in rules if rule["alert"] == "SvoteHelperFlood"]
    counted = re.search(r'status=~?"([0-9|]+)"', flood)
    assert counted is not None
    assert set(counted[1].split("|")) == statuses
    proxy = (deploy / "nginx" / "svote-helper.conf").read_text()
    assert set(re.findall(r"(?:limit_\w+_status|return) +(\d+)", proxy)) <= {"503"}


@pytest.mark.parametrize(
    ("values", "token"),
    [
        ([TOKEN], TOKEN),
        ([], None),
        ([TOKEN.upper()], None),
        ([TOKEN[:-1]], None),
        ([TOKEN + "0"], None),
        ([TOKEN + "\n"], None),
        ([TOKEN, TOKEN], None),
        ([f"{TOKEN}, {TOKEN}"], None),
    ],
)
def test_attempt_token_is_the_only_value_in_lower_case_hex(values: list[str], token: str | None) -> None:
    headers = [(b"host", TOKEN.encode()), *((HEADER, value.encode()) for value in values)]
    assert attempt_token(headers) == token


def test_pause_reasons_take_their_details() -> None:
    assert PauseReason.CLOCK_OFF_DATABASE.format(2.5, "behind") == "this machine's clock is 2.5 s behind the database's"
    assert PauseReason.QUEUE_USED_ELSEWHERE.format("a") == "host 'a' uses this queue or a copy of it"
    assert PauseReason.CIRCUIT_REFUSED.format("k11", "k10") == (
        'the chain rejects valid k11 proofs: it uses the other circuit; set [prover] circuit = "auto" or "k10"'
    )
    assert PauseReason.EVERY_CIRCUIT_REFUSED.format("both circuits") == (
        "the chain rejects valid proofs of both circuits: check its nodes"
    )
