"""External dependencies of the service: store, nodes, prover workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import proofs
from helper.chain.node import Node
from helper.ingest.validator import Checks
from helper.reveal.prover.process import Spawn, WorkerProcess
from helper.store.store import Store


@dataclass(frozen=True, slots=True)
class Dependencies:
    """Dependencies that a simulation can replace.

    Attributes:
        store: the queue; None opens the configured database.
        nodes: the chain's nodes; None connects to the configured ones.
        spawn_worker: starts a prover worker.
        share_checks: validates shares.
    """

    store: Store | None = None
    nodes: Sequence[Node] | None = None
    spawn_worker: Spawn = WorkerProcess.spawn
    share_checks: Checks = proofs
