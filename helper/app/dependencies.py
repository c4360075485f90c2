"""Where the service touches the world, so that a simulation can put another world around it."""

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
    """What surrounds the service, beside its clock and its doors.

    Attributes:
        store: keeps the shares; None opens what the settings name.
        nodes: the chain's nodes; None connects to those that the settings name.
        spawn: starts a prover worker.
        checks: the hashes of a share.
    """

    store: Store | None = None
    nodes: Sequence[Node] | None = None
    spawn: Spawn = WorkerProcess.spawn
    checks: Checks = proofs
