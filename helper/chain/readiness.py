"""Parses the readiness of a node: the status of its verifying keys."""

from __future__ import annotations

from typing import Final

from helper.chain.broadcast_outcome import sanitize_text
from helper.chain.json_fields import Fields, loads
from helper.errors import InvalidResponse

_READY: Final = "ready"
_UNREADY_REASONS: Final = {
    "not_started": "generating the verifying keys has not started",
    "warming": "the verifying keys are being generated",
    "failed": "generating the verifying keys failed",
}


def parse_readiness(response: object) -> str | None:
    """Parse `GET readiness`: why the node accepts no reveals, None if it accepts them.

    Raises:
        InvalidResponse: the status is not one of `ready`, `not_started`, `warming` and `failed`.
    """
    fields = Fields(response, "readiness")
    status, error = fields.text("status"), sanitize_text(fields.text("error"))
    if status == _READY:
        return None
    if status not in _UNREADY_REASONS:
        raise fields.invalid_field("status", "not a status of verifying keys")
    return _UNREADY_REASONS[status] + (f": {error}" if error else "")


def reports_unready_keys(body: bytes) -> bool:
    """Whether the body of a 503 says that the node's verifying keys are not ready, so that it processed nothing.

    Nodes before v1.4 have no status and report it as an error.
    """
    try:
        response = loads(body, "readiness")
        fields = Fields(response, "readiness")
        if fields.has("status"):
            return parse_readiness(response) is not None
        return "warming up" in fields.text("error")
    except InvalidResponse:
        return False
