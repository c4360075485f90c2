"""The clients that post shares: what each of them sends, how it reads responses, and whom it asks when.

"Old" clients have their own HTTP code; the others use the drivers of the wallet library. `ClientWallet` plays them all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final

from devnet.clients.responses import ShareOutcome, WalletResponse, classify_share_response, is_confirmed

MAX_COPIES: Final = 10
SOON: Final = (0.2, 0.6)
"""Seconds between the attempts at one helper of those clients that repeat a request soon."""
ZODL_HEADERS: Final = {"X-Helper-Token": "voting-helper"}
"""Sent with requests for a share's status, whether or not a token is required."""


class AsksOn(Enum):
    """For how long a wallet asks further helpers after the first ones, until how many have accepted a share."""

    NEVER = "never"
    UNTIL_ONE = "until one"
    UNTIL_ALL = "until as many as planned"


@dataclass(frozen=True)
class Client:
    """A client.

    Attributes:
        read: what the response to a posted share means to it; the token is that of the attempt.
        names_attempt: whether it sends the header with an attempt's token.
        encode: the body of a share with these fields.
        headers: further headers of a POST.
        post_seconds: time limit of a POST from its start, with the connection; infinite for none.
        silence_seconds: the same, for the response to begin.
        ends_late_requests: whether a request ends at its time limit, or goes on.
        keeps_connections: whether it uses a connection again.
        connections: maximum connections to a host at once.
        follows_redirects: whether it follows redirects, also of a POST.
        waits: seconds before the same helper is asked again after a REPEATABLE response; as many repetitions.
        shares_at_once: shares on their way at once.
        sends_first_alone: whether the first share goes first and has no time.
        first_at_once: whether a share's first helpers are asked at once, or one by one.
        max_copies: maximum number of first helpers; at most half of all.
        asks_on: for how long further helpers are asked.
        needs_all_copies: whether a share without acceptances of all planned helpers is a failure.
        stops_at_failure: whether a share that nobody accepts ends the run, also the requests of other shares.
        remembers_accepted: whether a repeated run leaves out the shares that were accepted.
        repeats_unknown: whether it asks helpers again whose outcome is unknown.
        run_waits: seconds before each repetition of a failed run; then the user must act.
        fan_out_seconds: time limit for a share's first helpers.
        max_first_shares: maximum number of a vote's shares for which one helper comes first.
        failures_before_pause: failures in a row after which a helper is asked last, or not at all; 0 for never.
        pause_seconds: for how long.
        leaves_out_paused: whether it is not asked at all, while there are others.
        skips_own_number: whether the helper with a share's number in the list does not get this share.
        prefers_last: whether the helper that has accepted a share last is asked first.
        confirmations: helpers that must call a share confirmed; 0 if none is asked.
        is_confirmed: whether a response to the question for a share's status says so.
        status_headers: headers of the question.
        asks_all_helpers: whether all helpers are asked, or those that accepted the share.
        poll_delay: seconds from a share's time to the first question; None for the time of the vote's earliest share.
        poll_seconds: seconds between the questions.
        recovers: whether a share that is overdue is posted again without a time.
        recovers_immediate: whether that includes shares that had no time from the beginning.
        recovers_at_once: to how many of so many untried helpers at once.
        recovers_until_accepted: whether further helpers follow until one accepts.
    """

    name: str
    read: Callable[[WalletResponse, str], ShareOutcome]
    post_seconds: float
    names_attempt: bool = False
    encode: Callable[[Mapping[str, Any]], bytes] = field(default=lambda fields: json.dumps(dict(fields)).encode())
    headers: Mapping[str, str] = field(default_factory=dict)
    silence_seconds: float | None = None
    ends_late_requests: bool = True
    keeps_connections: bool = True
    connections: int | None = None
    follows_redirects: bool = False
    waits: Callable[[WalletResponse], Sequence[float]] = lambda _: SOON
    shares_at_once: int = 1
    sends_first_alone: bool = False
    first_at_once: bool = False
    max_copies: int = MAX_COPIES
    asks_on: AsksOn = AsksOn.UNTIL_ALL
    needs_all_copies: bool = False
    stops_at_failure: bool = False
    remembers_accepted: bool = True
    repeats_unknown: bool = True
    run_waits: Sequence[float] = ()
    fan_out_seconds: float = math.inf
    max_first_shares: int | None = None
    failures_before_pause: int = 0
    pause_seconds: float = 30.0
    leaves_out_paused: bool = False
    skips_own_number: bool = False
    prefers_last: bool = False
    confirmations: int = 1
    is_confirmed: Callable[[WalletResponse], bool | None] = is_confirmed
    status_headers: Mapping[str, str] = field(default_factory=dict)
    asks_all_helpers: bool = False
    poll_delay: float | None = 10.0
    poll_seconds: float = 15.0
    recovers: bool = True
    recovers_immediate: bool = True
    recovers_at_once: Callable[[int], int] = lambda _: 1
    recovers_until_accepted: bool = True


# ---------------------------------------------------------------------- bodies


def escape_slashes(fields: Mapping[str, Any]) -> bytes:
    r"""JSON as of `JSONObject` and `JSONSerialization`, with each `/` as `\/`, and the keys in another order."""
    return json.dumps(dict(reversed(list(fields.items()))), separators=(",", ":")).replace("/", "\\/").encode()


# ---------------------------------------------------------------------- responses


def read_android(response: WalletResponse, _token: str) -> ShareOutcome:
    """OkHttp repeats a request once by itself after some responses. Every failure means the same: failed here."""
    repeats = (response.status, response.retry_after) in ((408, None), (503, "0"))
    if repeats:
        return ShareOutcome.REPEATABLE
    return ShareOutcome.ACCEPTED if response.is_success else ShareOutcome.UNKNOWN


def read_ios(response: WalletResponse, _token: str) -> ShareOutcome:
    """Any other response below 500 than 200 ends the whole vote."""
    if response.status is not None and response.status != 200 and response.status < 500:
        return ShareOutcome.ENDS_VOTE
    is_accepted = response.status == 200 and isinstance(response.json(), dict)
    return ShareOutcome.ACCEPTED if is_accepted else ShareOutcome.UNKNOWN


def read_zkool(response: WalletResponse, _token: str) -> ShareOutcome:
    """A 4xx ends the share; 503 and a refused connection are repeated."""
    if response.is_success:
        return ShareOutcome.ACCEPTED
    if response.status is None:
        return ShareOutcome.UNKNOWN if response.was_sent else ShareOutcome.REPEATABLE
    if 400 <= response.status < 500:
        return ShareOutcome.ENDS_SHARE
    return ShareOutcome.REPEATABLE if response.status == 503 else ShareOutcome.UNKNOWN


def zkool_waits(response: WalletResponse) -> Sequence[float]:
    """It waits once: whole seconds of `Retry-After` from 1 to 120, otherwise 2; 0.5 s for a refused connection."""
    if response.status is None:
        return (0.5,)
    text = response.retry_after or ""
    return (float(min(120, max(1, int(text)))) if text.isdecimal() else 2.0,)


def read_vizor(response: WalletResponse, _token: str) -> ShareOutcome:
    """Only a `queued` or `duplicate` is an acceptance; 429 and server errors are repeated."""
    if response.status in (None, 429, 500, 502, 503, 504):
        return ShareOutcome.REPEATABLE
    is_accepted = response.is_success and response.json_object().get("status") in ("queued", "duplicate")
    return ShareOutcome.ACCEPTED if is_accepted else ShareOutcome.UNKNOWN


def read_any_success(response: WalletResponse, _token: str) -> ShareOutcome:
    """Every 2xx is an acceptance, whatever its body."""
    return ShareOutcome.ACCEPTED if response.is_success else ShareOutcome.UNKNOWN


def is_exactly_confirmed(response: WalletResponse) -> bool | None:
    """Read the status of a share from a 200 only."""
    return is_confirmed(response) if response.status == 200 else None


def is_status_200(response: WalletResponse) -> bool:
    """Take any 200 for confirmed, without its body."""
    return response.status == 200


def repeat_errors(read: Callable[[WalletResponse, str], ShareOutcome]) -> Callable[[WalletResponse, str], ShareOutcome]:
    """Also repeat a request that got no response, whether or not it was sent."""
    return lambda response, token: ShareOutcome.REPEATABLE if response.status is None else read(response, token)


def half(number: int) -> int:
    """Half of a number, rounded up."""
    return math.ceil(number / 2)


# ---------------------------------------------------------------------- the clients

ANDROID: Final = Client(
    "ZODL Android, old",
    read_android,
    post_seconds=5.0,
    encode=escape_slashes,
    waits=lambda _: (0.0,),
    first_at_once=True,
    asks_on=AsksOn.UNTIL_ONE,
    stops_at_failure=True,
    remembers_accepted=False,
    run_waits=(2.0, 2.0, 2.0),
    failures_before_pause=3,
    leaves_out_paused=True,
    status_headers=ZODL_HEADERS,
    recovers_immediate=False,
    recovers_at_once=half,
)
ANDROID_NEWER: Final = replace(ANDROID, name="ZODL Android, newer", keeps_connections=False, shares_at_once=16)
"""The last version before the drivers of the library: each share of a vote has connections of its own."""
IOS: Final = Client(
    "ZODL iOS, old",
    read_ios,
    post_seconds=10.0,
    silence_seconds=5.0,
    encode=escape_slashes,
    headers={"Accept": "application/json"},
    connections=2,
    follows_redirects=True,
    first_at_once=True,
    asks_on=AsksOn.UNTIL_ONE,
    stops_at_failure=True,
    remembers_accepted=False,
    run_waits=(2.0, 2.0, 2.0),
    failures_before_pause=1,
    pause_seconds=math.inf,
    leaves_out_paused=True,
    skips_own_number=True,
    is_confirmed=is_exactly_confirmed,
    status_headers=ZODL_HEADERS,
)
ZKOOL: Final = Client(
    "zkool",
    read_zkool,
    post_seconds=60.0,
    headers={"User-Agent": "zkool/1.0"},
    keeps_connections=False,
    follows_redirects=True,
    waits=zkool_waits,
    max_copies=1,
    run_waits=(30.0, 60.0, 120.0),
    prefers_last=True,
    is_confirmed=is_status_200,
    asks_all_helpers=True,
    poll_delay=None,
    poll_seconds=3600.0,
)
VIZOR: Final = Client(
    "Vizor, old",
    read_vizor,
    post_seconds=5.0,
    ends_late_requests=False,
    shares_at_once=16,
    failures_before_pause=3,
)
CUSTODY: Final = Client(
    "custody-voter, old",
    read_any_success,
    post_seconds=30.0,
    headers={"User-Agent": "valar-custody-voter/1.0.1"},
    needs_all_copies=True,
    stops_at_failure=True,
    confirmations=0,
)
LIBRARY: Final = Client(
    "library 5.x",
    classify_share_response,
    post_seconds=30.0,
    names_attempt=True,
    keeps_connections=False,
    shares_at_once=32,
    sends_first_alone=True,
    repeats_unknown=False,
    run_waits=(15.0,) * 8,
    fan_out_seconds=60.0,
    max_first_shares=12,
    failures_before_pause=3,
    confirmations=2,
    asks_all_helpers=True,
    recovers_until_accepted=False,
)
"""The new generation of ZODL, Vizor and custody-voter. It repeats a failed run up to 240 times, here 8 times."""
ZAFU: Final = Client(
    "zafu",
    read_any_success,
    post_seconds=10.0,
    headers={"Origin": "chrome-extension://zafu"},
    connections=6,
    follows_redirects=True,
    shares_at_once=1 << 20,
    first_at_once=True,
    asks_on=AsksOn.NEVER,
    confirmations=0,
    recovers=False,
)
DIRECT_CLIENTS: Final = (ANDROID, ANDROID_NEWER, IOS, ZKOOL, VIZOR, CUSTODY, LIBRARY, ZAFU)
"""Those that need no Tor. Zipher is not among them, because it posts no shares."""

# ---------------------------------------------------------------------- the clients over Tor

ANDROID_TOR: Final = replace(
    ANDROID,
    name="ZODL Android, old, Tor",
    read=repeat_errors(read_any_success),
    post_seconds=math.inf,
    keeps_connections=False,
)
ANDROID_NEWER_TOR: Final = replace(
    ANDROID_NEWER, name="ZODL Android, newer, Tor", read=read_any_success, post_seconds=15.0
)
IOS_TOR: Final = replace(
    IOS,
    name="ZODL iOS, old, Tor",
    read=repeat_errors(read_ios),
    post_seconds=math.inf,
    silence_seconds=None,
    keeps_connections=False,
    connections=None,
    follows_redirects=False,
    waits=lambda _: (0.0, 0.0),
)
CLIENTS: Final = (*DIRECT_CLIENTS, ANDROID_TOR, ANDROID_NEWER_TOR, IOS_TOR)
"""The drivers of the library have the same rules over Tor; there ZODL for Android takes every failure for unknown."""
