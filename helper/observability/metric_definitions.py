"""Definitions of counters for Prometheus, and their sources in `Stats`. Pure data.

All label values are known in advance: outcomes, states, stages, hosts of the configured nodes. There are no labels for
rounds, shares or clients. On a helper with few shares, a counter change can still reveal when a share arrived.
Readers of the metrics are therefore trusted like operators, and the metrics have a separate listener.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from helper.chain.broadcast_outcome import Verdict


@dataclass(frozen=True, slots=True)
class CounterDefinition:
    """A counter.

    Attributes:
        name: metric name without the suffix `_total`.
        help_text: help text.
        label: name of the label, "" for none.
        sources: name of the counter in `Stats` by label value ("" without a label).
    """

    name: str
    help_text: str
    label: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)


POST_OUTCOMES: Final = (
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
RETRY_STAGES: Final = ("tree", "proof", "prover", "broadcast")
"""Stages of a retry: no root covers the leaf yet, the proof failed, the prover exited, the chain refused or dropped the
reveal."""
LABELLED_STATUSES: Final = (400, 401, 404, 405, 408, 413, 429, 431, 500, 502, 503)
"""Statuses with their own label value; all others are counted as `other`."""

COUNTERS: Final = (
    CounterDefinition(
        "helper_share_posts",
        "Requests to POST /shares by outcome.",
        "outcome",
        {outcome: f"post_{outcome}" for outcome in POST_OUTCOMES},
    ),
    CounterDefinition("helper_proofs", "Completed proofs.", sources={"": "proven"}),
    CounterDefinition(
        "helper_proofs_skipped",
        "Proofs that were not begun, because another helper's reveal was in a block.",
        sources={"": "proof_skipped"},
    ),
    CounterDefinition(
        "helper_proofs_unused",
        "Completed proofs that were not used, because the share was confirmed or its round was closed.",
        sources={"": "proof_unused"},
    ),
    CounterDefinition("helper_reveals", "Reveals broadcast, without resends.", sources={"": "broadcast"}),
    CounterDefinition(
        "helper_broadcasts",
        "Broadcasts of reveals, including resends, by verdict on the node's response.",
        "verdict",
        {verdict.name.lower(): f"answer_{verdict.name.lower()}" for verdict in Verdict},
    ),
    CounterDefinition("helper_confirmed", "Shares confirmed in a block.", sources={"": "confirmed"}),
    CounterDefinition(
        "helper_retries",
        "Retries of shares by stage.",
        "stage",
        {stage: f"retry_{stage}" for stage in RETRY_STAGES},
    ),
    CounterDefinition(
        "helper_quick_retries_failed",
        "Shares whose quick retries all failed. They are retried at longer intervals.",
        sources={"": "quick_retries_failed"},
    ),
    CounterDefinition("helper_failed", "Shares that failed permanently.", sources={"": "failed"}),
    CounterDefinition("helper_expired", "Shares unconfirmed when their round closed.", sources={"": "expired"}),
)
