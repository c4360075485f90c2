"""Definitions of counters and histograms for Prometheus, and their sources in `Stats`. Pure data.

Label values are fixed beforehand: outcomes, states, stages, hosts of the configured nodes. There are no labels for
rounds, shares or clients. On a helper with few shares, the counters still show over time when a share arrived. Readers
are therefore trusted like operators, and the metrics have a separate listener.
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
        name: metric name without the suffix `_total`.
        about: help text.
        label: name of the label, "" for none.
        sources: name of the counter in `Stats` by label value ("" without a label).
    """

    name: str
    about: str
    label: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HistogramOf:
    """A histogram: metric name, help text, and attribute of `Stats`."""

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
"""Outcomes of `POST /shares`."""
STAGES: Final = ("tree", "proof", "prover", "broadcast")
"""Stages of a retry: no root covers the leaf yet, the proof failed, the prover died, the chain refused or dropped the
reveal."""
REFUSALS: Final = (400, 401, 404, 405, 408, 413, 429, 431, 500, 502, 503)
"""Statuses with a label value each; all others are counted as `other`."""

COUNTERS: Final = (
    CounterOf(
        "helper_share_posts",
        "Requests to POST /shares by outcome.",
        "outcome",
        {outcome: f"post_{outcome}" for outcome in OUTCOMES},
    ),
    CounterOf("helper_proofs", "Completed proofs.", sources={"": "proven"}),
    CounterOf("helper_reveals", "Reveals broadcast, without resends.", sources={"": "broadcast"}),
    CounterOf(
        "helper_broadcasts",
        "Broadcasts of reveals, including resends, by verdict on the node's response.",
        "verdict",
        {verdict.name.lower(): f"answer_{verdict.name.lower()}" for verdict in Verdict},
    ),
    CounterOf("helper_confirmed", "Shares confirmed in a block.", sources={"": "confirmed"}),
    CounterOf(
        "helper_retries",
        "Retries of shares by stage.",
        "stage",
        {stage: f"retry_{stage}" for stage in STAGES},
    ),
    CounterOf("helper_failed", "Shares that failed permanently.", sources={"": "failed"}),
    CounterOf("helper_expired", "Shares unconfirmed when their round closed.", sources={"": "expired"}),
)
HISTOGRAMS: Final = (
    HistogramOf(
        "helper_start_lateness_seconds", "Time from a share's due time to the start of its proof.", "lateness_start"
    ),
    HistogramOf(
        "helper_broadcast_lateness_seconds", "Time from a share's due time to its broadcast.", "lateness_broadcast"
    ),
    HistogramOf("helper_proof_seconds", "Duration of a proof.", "proof_seconds"),
    HistogramOf(
        "helper_queue_age_seconds", "Time since the due time of the oldest due share, at each claim.", "queue_age"
    ),
    HistogramOf("helper_confirmation_seconds", "Time from broadcast to confirmation in a block.", "confirmation"),
)
