"""Which figures Prometheus gets, and from which of ours each is taken. Pure data.

The labels are few and known beforehand: kinds of answers, states, stages, the configured nodes' hosts. Never a round, a
share or a client. The figures are sums all the same: on a helper with few shares they tell, over time, when one came.
Whoever may read them is trusted like whoever has the operators' token, which is why they have a listener of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from helper.chain.verdicts import Verdict


@dataclass(frozen=True, slots=True)
class CounterOf:
    """A counter.

    Attributes:
        name: without the `_total` that it ends in.
        about: its help.
        label: the one label that it has, or "".
        sources: the service's own counter for each value of the label ("" without one).
    """

    name: str
    about: str
    label: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HistogramOf:
    """A histogram: its name, its help, and the timing of `Stats` that it shows."""

    name: str
    about: str
    source: str


OUTCOMES: Final = (
    "queued",
    "duplicate",
    "refused",
    "unauthorised",
    "too_large",
    "too_slow",
    "come_again",
    "unavailable",
    "broken_off",
    "error",
)
"""What a POST of a share can come to."""
STAGES: Final = ("tree", "proof", "prover", "broadcast")
"""Where a share can be sent back to the queue: its leaf is under no root yet, the proof failed, the prover died, the
chain refused it or left it out."""
REFUSALS: Final = (400, 401, 404, 405, 408, 413, 429, 431, 500, 502, 503)
"""Statuses that are told apart; any other is `other`."""

COUNTERS: Final = (
    CounterOf(
        "helper_share_posts",
        "Shares posted by wallets, by what was answered.",
        "outcome",
        {outcome: f"post_{outcome}" for outcome in OUTCOMES},
    ),
    CounterOf("helper_proofs", "Proofs made.", sources={"": "proven"}),
    CounterOf("helper_reveals", "Reveals that were sent for the first time.", sources={"": "broadcast"}),
    CounterOf(
        "helper_broadcasts",
        "Sends of reveals, again and to other nodes included, by what the answer meant.",
        "verdict",
        {verdict.name.lower(): f"answer_{verdict.name.lower()}" for verdict in Verdict},
    ),
    CounterOf("helper_confirmed", "Shares that were counted in a block.", sources={"": "confirmed"}),
    CounterOf(
        "helper_retries",
        "Shares that went back to the queue, by the stage at which.",
        "stage",
        {stage: f"retry_{stage}" for stage in STAGES},
    ),
    CounterOf("helper_failed", "Shares that were given up.", sources={"": "failed"}),
    CounterOf("helper_expired", "Shares that were not counted when their round closed.", sources={"": "expired"}),
)
HISTOGRAMS: Final = (
    HistogramOf(
        "helper_start_lateness_seconds", "From a share's time to the start of its first proof.", "lateness_start"
    ),
    HistogramOf(
        "helper_broadcast_lateness_seconds", "From a share's time to its first byte sent.", "lateness_broadcast"
    ),
    HistogramOf("helper_proof_seconds", "How long a proof took.", "proof_seconds"),
    HistogramOf(
        "helper_queue_age_seconds", "Of the share that was due first, whenever due shares are taken up.", "queue_age"
    ),
    HistogramOf(
        "helper_confirmation_seconds", "From the first byte sent to the block that counted it.", "confirmation"
    ),
)
