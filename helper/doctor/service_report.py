"""State of the running helper, parsed from its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from helper.observability.health_checks import Check
from helper.observability.service_state import ArchiveState
from helper.runtime.hardening import ProcessLimits


@dataclass(frozen=True, slots=True)
class ServiceReport:
    """State of the running helper (`helper.observability.service_state.ServiceState`).

    A field that the helper does not report is None or the default: the helper may have another version, or could not be
    queried.

    Attributes:
        paused: why processing is paused, None if it is not.
        unread_blocks: older blocks that are not read yet.
        workers: number of prover workers.
        proofs: number of proofs made; `p50_ms` and `p99_ms` are percentiles of the recent proving times.
        self_test_seconds: time of one proof in the self-test.
        sends: whether this host holds the sender lease; `sender` is the holder, "" for none.
        shares_database: whether the database is shared between hosts.
    """

    ready: bool | None = None
    height: int | None = None
    circuit: str | None = None
    chain_id: str | None = None
    paused: str | None = None
    unread_blocks: int = 0
    checks: tuple[Check, ...] = ()
    process: ProcessLimits | None = None
    workers: int = 1
    proofs: int = 0
    p50_ms: float | None = None
    p99_ms: float | None = None
    self_test_seconds: float | None = None
    role: str | None = None
    sends: bool | None = None
    sender: str | None = None
    shares_database: bool = False
    archive: ArchiveState | None = None

    @property
    def pid(self) -> int | None:
        """The helper's process id."""
        return None if self.process is None else self.process["pid"]


def parse_service(state: Mapping[str, Any]) -> ServiceReport:
    """Parse the section `service` of `GET /stats`.

    Raises:
        TypeError, AttributeError: a value is not of the expected type.
        KeyError: a check has no name.
    """
    provers, proof = state.get("provers") or {}, state.get("proof") or {}
    return ServiceReport(
        ready=state.get("ready"),
        height=state.get("height"),
        circuit=state.get("circuit"),
        chain_id=state.get("chain_id"),
        paused=state.get("paused"),
        unread_blocks=state.get("unread_blocks") or 0,
        checks=tuple(
            Check(str(check["name"]), check.get("problem"), check.get("note")) for check in state.get("checks") or ()
        ),
        process=cast("ProcessLimits | None", state.get("process")),
        workers=provers.get("workers", 1),
        proofs=proof.get("count") or 0,
        p50_ms=proof.get("p50_ms"),
        p99_ms=proof.get("p99_ms"),
        self_test_seconds=provers.get("self_test_seconds"),
        role=state.get("role"),
        sends=state.get("sends"),
        sender=state.get("sender"),
        shares_database="database_skew" in state,
        archive=cast("ArchiveState | None", state.get("archive")),
    )
