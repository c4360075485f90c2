"""Unexpected errors to a Sentry project (`[helper] sentry_dsn`), by the log's own rules.

An event is made of one line of our own log, after its fields went through the list of those that may be told: the
line's text, its logger, its fields. The library adds nothing: no stack with local variables, no request, no
breadcrumbs, no host name, no environment, no modules. `strip`, the last that touches an event, builds it anew from the
few keys that it knows.

The library is imported only where a DSN is set, and is an extra of the package: `pip install 'svote-helper[sentry]'`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final, cast

from helper.clock import Clock
from helper.errors import ConfigError
from helper.observability.log_config import FIELDS

if TYPE_CHECKING:
    from sentry_sdk import Client
    from sentry_sdk.types import Event, Hint

KEPT: Final = ("event_id", "timestamp", "platform", "level", "logger", "release")
"""Keys of an event that stay as they are: each is ours, or a plain fact of the library."""
QUEUE: Final = 100
"""Events that wait to be sent at most; more are dropped."""
AGAIN: Final = 60.0
"""Seconds after which a line of the same kind is sent again: an error a second is one error."""
KINDS: Final = 1000
PATIENCE: Final = 2.0
"""Seconds that the last events have to leave when the service ends."""


class Reporter:
    """Sends lines of the log, each kind of line once a minute. Nothing about it holds the service up.

    Args:
        client: the library's own.
        clock: the time.
    """

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._sent: dict[str, float] = {}  # when a kind of line was last sent, monotonic

    def report(self, line: Mapping[str, Any]) -> None:
        """Hand over one line of the log, as it is written."""
        event = to_event(line)
        kind, now = repr(event["fingerprint"]), self._clock.monotonic()
        if now - self._sent.get(kind, float("-inf")) < AGAIN:
            return
        if len(self._sent) >= KINDS:
            self._sent.clear()
        self._sent[kind] = now
        self._client.capture_event(cast("Event", event))

    def close(self) -> None:
        """Let what waits leave, for a moment."""
        self._client.close(timeout=PATIENCE)


def start(dsn: str, clock: Clock) -> Reporter:
    """A reporter to this project.

    Args:
        dsn: where it is, as Sentry gives it.
        clock: the time.

    Raises:
        ConfigError: the library is not installed, or this is no DSN.
    """
    try:
        from sentry_sdk import Client  # noqa: PLC0415 - only where it is wanted
        from sentry_sdk.utils import BadDsn  # noqa: PLC0415
    except ImportError:
        raise ConfigError(
            "[helper] sentry_dsn is set, and sentry-sdk is not installed",
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
            transport_queue_size=QUEUE,
            before_send=strip,
        )
    except BadDsn:
        raise ConfigError("[helper] sentry_dsn is no DSN of Sentry's") from None
    return Reporter(client, clock)


def to_event(line: Mapping[str, Any]) -> dict[str, Any]:
    """An event of a line of the log: its fields are those of the list, whatever it has."""
    told = {name: value for name, value in line.items() if name in FIELDS}
    text = str(told.get("event", ""))
    return {
        "level": "error",
        "logger": str(told.get("logger", "")),
        "logentry": {"formatted": text},
        "extra": {name: value for name, value in told.items() if name not in {"event", "level", "logger", "timestamp"}},
        # one issue a line of the source, whatever its fields are
        "fingerprint": [str(told.get("logger", "")), text, _kind(told.get("exception"))],
    }


def strip(event: Event, _hint: Hint) -> Event:
    """The event with what we put into it, and nothing that the library or anybody added."""
    told: dict[str, Any] = dict(event)
    made: dict[str, Any] = {
        **{name: told[name] for name in KEPT if name in told},
        "logentry": {"formatted": str((told.get("logentry") or {}).get("formatted", ""))},
        "extra": {name: value for name, value in (told.get("extra") or {}).items() if name in FIELDS},
        "fingerprint": told.get("fingerprint", []),
    }
    return cast("Event", made)


def _kind(exception: object) -> str:
    """The type that an exception's description begins with."""
    return str(exception or "").partition(" ")[0].rstrip(":")
