"""Time limits from a node's recent times."""

from __future__ import annotations

import pytest

from helper.chain.response_times import MAX_RESPONSES, MIN_RESPONSES, ResponseTimes, request_kind


def create_times(*seconds: float) -> ResponseTimes:
    times = ResponseTimes(10.0)
    for value in seconds:
        times.add(value)
    return times


@pytest.mark.parametrize(
    ("seconds", "limit"),
    [
        ([], 10.0),
        ([0.01] * (MIN_RESPONSES - 1), 10.0),
        ([0.01] * MIN_RESPONSES, 1.0),
        ([0.5, *[0.01] * MIN_RESPONSES], 2.0),
        ([0.5, *[0.01] * (MAX_RESPONSES - 1)], 2.0),
        ([0.5, *[0.01] * MAX_RESPONSES], 1.0),
        ([4.0] * MIN_RESPONSES, 10.0),
    ],
)
def test_limit_is_four_times_the_longest_recent_time(seconds: list[float], limit: float) -> None:
    assert create_times(*seconds).limit == limit


def test_limit_is_the_maximum_again_after_forget() -> None:
    times = create_times(*[0.01] * MIN_RESPONSES)
    times.forget()
    assert times.limit == 10.0


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/shielded-vote/v1/rounds", "/shielded-vote/v1/rounds"),
        (f"/shielded-vote/v1/round/{'7a' * 32}", "/shielded-vote/v1/round"),
        (f"/shielded-vote/v1/commitment-tree/{'7a' * 32}/464", "/shielded-vote/v1/commitment-tree"),
        (f"/shielded-vote/v1/commitment-tree/{'7a' * 32}/leaves", "/shielded-vote/v1/commitment-tree/leaves"),
        (f"/shielded-vote/v1/tx/{'7A' * 32}", "/shielded-vote/v1/tx"),
        ("/cosmos/base/tendermint/v1beta1/blocks/464", "/cosmos/base/tendermint/v1beta1/blocks"),
        ("/cosmos/base/tendermint/v1beta1/blocks/latest", "/cosmos/base/tendermint/v1beta1/blocks/latest"),
    ],
)
def test_kind_of_request_has_no_identifiers(path: str, kind: str) -> None:
    assert request_kind(path) == kind
