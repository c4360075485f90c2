"""Partial states of the running service."""

from __future__ import annotations

from typing import Any, cast

from helper.observability.service_state import ServiceState


def partial_state(**values: Any) -> ServiceState:
    """Create a state with only the keys that a test needs."""
    return cast(ServiceState, values)
