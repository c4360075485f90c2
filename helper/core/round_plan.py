"""What a round will take of one helper: shares, proofs, time, cores, disk and memory. Pure.

The plan counts on no other helper: this helper proves every share that wallets give it. `together_*` is the result if
all helpers have the same cores and share their backlogs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from helper.core.drain import ProofRate, RoundWork, find_slots, simulate_drain
from helper.core.share import SHARE_COUNT
from helper.core.wallet_schedule import (
    Distribution,
    fraction_due,
    helpers_per_share,
    last_moment_start,
    last_vote_time,
)

REFERENCE_PROOF_SECONDS: Final = {"k10": 0.42, "k11": 2.06}
"""Seconds per proof and core, by circuit: measured by `make bench` with a prover on each of two cores."""
SHARED_PROOFS_PER_REVEAL: Final = 1.2
"""Upper limit of the proofs per reveal of helpers that each work on a common backlog in their own order."""
WAITING_SHARE_BYTES: Final = 950
"""Bytes of the database per waiting share: measured with a million."""
SPENT_NULLIFIER_BYTES: Final = 44
"""Bytes of the database per nullifier spent on the chain: measured with a million."""
VOTE_BYTES: Final = 128
"""Bytes per vote in the tree, on disk and in memory: two leaves with as many inner nodes, 32 bytes each."""
WAL_BYTES: Final = 64 << 20
"""Largest write-ahead log between two checkpoints: 2,000 changes of up to 31 kB."""
SERVICE_BYTES: Final = 400 << 20
"""Bytes of memory of the service itself, with all connections and bodies at their limits."""
PROVER_BYTES: Final = 128 << 20
"""Bytes of memory of one prover with the keys of both circuits; 65 MB were measured for one circuit."""
_STEPS: Final = 2000
"""Steps of the due times before the last-moment window, and within it."""


@dataclass(frozen=True, slots=True)
class RoundSize:
    """Size of a round.

    Attributes:
        voters: number of voters.
        proposals: number of proposals, all of which each voter votes on.
        helpers: number of helpers that wallets know.
        bundles: number of bundles of notes per voter. Each casts its own vote on each proposal.
        seconds: from the creation of the round to its `vote_end_time`.
        distribution: when the shares become due.
    """

    voters: int
    proposals: int
    helpers: int
    bundles: int
    seconds: int
    distribution: Distribution

    @property
    def votes(self) -> int:
        """Number of votes."""
        return self.voters * self.proposals * self.bundles

    @property
    def reveals(self) -> int:
        """Number of reveals in the round, of all helpers."""
        return self.votes * SHARE_COUNT

    @property
    def shares(self) -> int:
        """Expected number of shares that each helper gets, rounded up."""
        return -(-self.reveals * helpers_per_share(self.helpers) // self.helpers)


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Result of a plan. Times are in seconds since the beginning of the round.

    Attributes:
        shares: shares that this helper gets.
        proofs: proofs that it makes.
        reveals: reveals of the round, by all helpers.
        proofs_per_second: rate of this helper.
        cores_needed: smallest number of cores with which this helper has proven its shares in time, whether or not the
            chain includes them; None if no number is enough, because the round is too short.
        done_seconds: when the last of its shares is confirmed, if nothing else delays it.
        done_before_end: whether that is before the end.
        slack_seconds: from then to the end of the round; negative if it is later.
        unfinished: shares that are not revealed at the end.
        max_backlog: highest number of shares that are due and wait for a prover.
        limit: why shares are late at the end: "chain" if it includes too few reveals per block, else "provers"; None if
            no share is.
        together_slack_seconds: `slack_seconds` if all helpers have the same cores and share their backlogs.
        together_done_before_end: whether that is not negative.
        disk_bytes: for the database, with all shares waiting.
        memory_bytes: for the service and one prover per core.
    """

    shares: int
    proofs: int
    reveals: int
    proofs_per_second: float
    cores_needed: int | None
    done_seconds: float
    done_before_end: bool
    slack_seconds: float
    unfinished: int
    max_backlog: int
    limit: str | None
    together_slack_seconds: float
    together_done_before_end: bool
    disk_bytes: int
    memory_bytes: int


def make_plan(size: RoundSize, rate: ProofRate) -> RoundPlan:
    """Plan a round.

    A share counts as revealed one proof and one block after its turn, because it is confirmed by the next block.

    Args:
        size: size of the round.
        rate: of this helper, with one prover per core. `seconds_per_proof` is not None.
    """
    latency = (rate.seconds_per_proof or 0.0) + rate.block_seconds
    held, all_shares = _due_work(size, size.shares, latency), _due_work(size, size.reveals, latency)
    (proven,) = simulate_drain([held], rate.per_second, 0.0)
    (included,) = simulate_drain([all_shares], rate.chain_per_second, 0.0)
    shared = replace(rate, slots=size.helpers * rate.slots).provers_per_second / SHARED_PROOFS_PER_REVEAL
    (together,) = simulate_drain([all_shares], min(rate.chain_per_second, shared), 0.0)
    done = max(proven.done_at, included.done_at) + latency
    together_slack = size.seconds - together.done_at - latency
    return RoundPlan(
        shares=size.shares,
        proofs=size.shares,
        reveals=size.reveals,
        proofs_per_second=rate.per_second,
        cores_needed=find_slots([held], replace(rate, block_seconds=0.0), 0.0),
        done_seconds=done,
        done_before_end=done <= size.seconds,
        slack_seconds=size.seconds - done,
        unfinished=math.ceil(proven.unfinished),
        max_backlog=round(proven.max_backlog),
        limit="chain" if included.unfinished else "provers" if proven.unfinished else None,
        together_slack_seconds=together_slack,
        together_done_before_end=together_slack >= 0,
        disk_bytes=size.shares * WAITING_SHARE_BYTES
        + size.reveals * SPENT_NULLIFIER_BYTES
        + size.votes * VOTE_BYTES
        + WAL_BYTES,
        memory_bytes=SERVICE_BYTES + rate.slots * PROVER_BYTES + size.votes * VOTE_BYTES,
    )


def _due_work(size: RoundSize, shares: int, latency: float) -> RoundWork:
    """Return these shares of the round by due time. They must be proven `latency` seconds before the end."""
    window, last = last_moment_start(0, size.seconds), last_vote_time(0, size.seconds)
    at_once = 1 / (size.proposals * size.bundles * SHARE_COUNT)
    edges = [window * step / _STEPS for step in range(_STEPS)]
    edges += [window + (last - window) * step / _STEPS for step in range(_STEPS + 1)]
    due = [fraction_due(size.distribution, edge, 0, size.seconds, at_once=at_once) for edge in edges]
    groups = [
        ((begin + end) / 2, shares * (after - before))
        for (begin, end), (before, after) in zip(pairwise(edges), pairwise(due), strict=True)
        if after > before
    ]
    return RoundWork(size.seconds - latency, groups)
