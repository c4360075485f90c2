"""Sends unexpected errors to a Sentry project, under the same rules as the log.

An event consists of one log entry after the field allowlist was applied: its text, logger and fields. The library adds
nothing: no local variables, request, breadcrumbs, host name, environment or modules. As the last step, `strip` copies
only known keys into a new event.

The library is imported only if a DSN is set. It is an extra of the package: `pip install 'svote-helper[sentry]'`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final, cast

from helper.clock import Clock
from helper.errors import ConfigError
from helper.observability.log_config import ALLOWED_FIELDS

if TYPE_CHECKING:
    from sentry_sdk import Client
    from sentry_sdk.types import Event, Hint

COPIED_KEYS: Final = ("event_id", "timestamp", "platform", "level", "logger", "release")
"""Keys of an event that `strip` copies unchanged: set by this module, or harmless values of the library."""
MAX_QUEUED_EVENTS: Final = 100
"""Maximum number of events waiting to be sent; additional events are dropped."""
REPEAT_SECONDS: Final = 60.0
"""Minimum seconds between two equal errors."""
MAX_REMEMBERED_ERRORS: Final = 1000
"""Maximum number of different errors whose last report is remembered."""
CLOSE_TIMEOUT_SECONDS: Final = 2.0
"""Timeout in seconds for sending the remaining events on shutdown."""


class SentryReporter:
    """Sends log entries to Sentry without blocking, equal entries at most once per minute."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._last_reports: dict[str, float] = {}  # fingerprint -> last report (monotonic)

    def report(self, line: Mapping[str, Any]) -> None:
        """Queue one log entry for sending."""
        event = to_event(line)
        kind, now = repr(event["fingerprint"]), self._clock.monotonic()
        if now - self._last_reports.get(kind, float("-inf")) < REPEAT_SECONDS:
            return
        if len(self._last_reports) >= MAX_REMEMBERED_ERRORS:
            self._last_reports.clear()
        self._last_reports[kind] = now
        self._client.capture_event(cast("Event", event))

    def close(self) -> None:
        """Send the queued events, for at most `CLOSE_TIMEOUT_SECONDS` seconds."""
        self._client.close(timeout=CLOSE_TIMEOUT_SECONDS)


def create_reporter(dsn: str, clock: Clock) -> SentryReporter:
    """Create a reporter.

    Raises:
        ConfigError: the library is not installed, or the DSN is invalid.
    """
    try:
        from sentry_sdk import Client  # noqa: PLC0415 - optional dependency
        from sentry_sdk.utils import BadDsn  # noqa: PLC0415
    except ImportError:
        raise ConfigError(
            "[helper] sentry_dsn is set, but sentry-sdk is not installed",
            advice="Install it (`pip install 'svote-helper[sentry]'`), or leave sentry_dsn empty.",
        ) from None
    try:
        client: Client = Client(
            dsn=dsn,
            release=f"svote-helper@{metadata.version('svote-helper')}",
            server_name="",
            default_integrations=False,
            auto_enabling_integrations=False,
            include_local_variables=False,
            include_source_context=False,
            max_breadcrumbs=0,
            auto_session_tracking=False,
            send_client_reports=False,
            debug=False,
            spotlight=False,
            transport_queue_size=MAX_QUEUED_EVENTS,
            before_send=strip_event,
        )
    except BadDsn:
        raise ConfigError("[helper] sentry_dsn is not a valid Sentry DSN") from None
    return SentryReporter(client, clock)


def to_event(line: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a log entry to a Sentry event with allowed fields only."""
    fields = {name: value for name, value in line.items() if name in ALLOWED_FIELDS}
    text = str(fields.get("event", ""))
    extra = {name: value for name, value in fields.items() if name not in {"event", "level", "logger", "timestamp"}}
    return {
        "level": "error",
        "logger": str(fields.get("logger", "")),
        "logentry": {"formatted": text},
        "extra": extra,
        # one Sentry issue per log event and exception type, regardless of other fields
        "fingerprint": [str(fields.get("logger", "")), text, _exception_type(fields.get("exception"))],
    }


def strip_event(event: Event, _hint: Hint) -> Event:
    """Copy the known keys of an event. Drop everything that the library added."""
    original: dict[str, Any] = dict(event)
    stripped: dict[str, Any] = {
        **{name: original[name] for name in COPIED_KEYS if name in original},
        "logentry": {"formatted": str((original.get("logentry") or {}).get("formatted", ""))},
        "extra": {name: value for name, value in (original.get("extra") or {}).items() if name in ALLOWED_FIELDS},
        "fingerprint": original.get("fingerprint", []),
    }
    return cast("Event", stripped)


def _exception_type(exception: object) -> str:
    """The type name at the start of an exception's description."""
    return str(exception or "").partition(" ")[0].rstrip(":")
