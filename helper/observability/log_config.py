"""The log: structured lines on standard error, with fields from a fixed list and nothing else.

The list is the guard. A field that is not on it is dropped and counted, whatever its value, so that a
witness, a nullifier or a transaction cannot slip into a log by somebody's new line of code. Exceptions are
written as their types and places, with their texts only where these are our own: others may quote a value.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from helper.core.text import clean_text
from helper.errors import HelperError

FIELDS: Final = frozenset(
    [
        "event",
        "level",
        "logger",
        "timestamp",
        "exception",
        "dropped",
        "advice",
        "error",
        "field",
        "key",
        "line",
        "nearest",
        "note",
        "outcome",
        "reason",
        "stage",
        "status",
        "verdict",
        "suppressed",
        "attempt",
        "attempts",
        "count",
        "counts",
        "crashes",
        "number",
        "recovered",
        "rounds",
        "rows",
        "shares",
        "slot",
        "workers",
        "chain_id",
        "circuit",
        "endpoint",
        "fence",
        "fingerprint",
        "operator",
        "height",
        "remembered",
        "round",
        "size",
        "version",
        "duration_ms",
        "ms",
        "seconds",
        "self_test",
        "skew",
        "address",
        "host",
        "path",
        "pid",
        "request_id",
        "port",
        "signal",
        "socket",
        "url",
    ]
)
"""Every field that a line may have. Of a share there is only the count, the stage and the reason."""

OURS: Final = "helper"
"""The logger above all of this product's. Libraries write what they are handed (addresses that are asked for, values of
queries): of theirs only warnings and worse are let through, whatever the level."""

REPEAT_BURST: Final = 10
"""How often a warning or error is written before its rate is limited."""
REPEAT_SECONDS: Final = 1.0
"""Seconds per warning or error of one kind after the burst."""

_dropped: Counter[str] = Counter()

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "json", "pretty"]


def configure(
    level: Level = "info",
    format: Format = "auto",  # noqa: A002
    stream: TextIO | None = None,
    report: Callable[[Mapping[str, Any]], None] | None = None,
) -> None:
    """Set the log up for this process; may be called again.

    Args:
        level: the least that is written.
        format: json is one object a line; pretty is for eyes; auto is pretty on a terminal.
        stream: where to, standard error by default.
        report: gets each line of ours that is an error, as it is written.
    """
    out = stream or sys.stderr
    pretty = format == "pretty" or (format == "auto" and out.isatty())
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        safe_exception,
        only_known_fields,
        clean_fields,
        *([] if report is None else [_reporting(report)]),
    ]
    renderer: Processor = (
        structlog.dev.ConsoleRenderer(colors=out.isatty())
        if pretty
        else structlog.processors.JSONRenderer(ensure_ascii=False)
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    handler.addFilter(RepeatLimit())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))
    logging.getLogger(OURS).setLevel(level.upper())


class RepeatLimit(logging.Filter):
    """Limits how often one kind of warning or error is written, so that no client can flood the log.

    Ours are of one kind if logger and event are the same, those of libraries if they come from the same source line.
    The next line that is written has the number of lines suppressed before it. Time is that of the records.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[tuple[str, str], tuple[float, int]] = {}  # when the burst is whole again, lines suppressed

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether this line is written."""
        if record.levelno < logging.WARNING:
            return True
        fields = record.msg if isinstance(record.msg, dict) else None
        kind = (record.name, str(fields["event"]) if fields is not None else f"{record.pathname}:{record.lineno}")
        now, burst = record.created, (REPEAT_BURST - 1) * REPEAT_SECONDS
        full_at, suppressed = self._lines.get(kind, (now, 0))
        if not now <= full_at <= now + burst + REPEAT_SECONDS:
            full_at = now  # long ago, or the clock was set back
        if full_at > now + burst:
            self._lines[kind] = (full_at, suppressed + 1)
            return False
        self._lines[kind] = (full_at + REPEAT_SECONDS, 0)
        if suppressed and fields is not None:
            record.msg = {**fields, "suppressed": suppressed}
        elif suppressed:
            record.msg, record.args = f"{record.getMessage()} (suppressed: {suppressed})", None
        return True


def dropped_fields() -> Mapping[str, int]:
    """How often each field that is not on the list was dropped since the start."""
    return dict(_dropped)


def only_known_fields(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Let through the fields on the list, with plain values; count the rest and say how many went."""
    kept: EventDict = {}
    dropped = 0
    for name, value in event.items():
        # names with an underscore are structlog's own, it takes them away before rendering
        if name.startswith("_") or (name in FIELDS and _is_plain(value)):
            kept[name] = value
        else:
            _dropped[name] += 1
            dropped += 1
    if dropped:
        kept["dropped"] = dropped
    return kept


def clean_fields(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Remove control characters from all values, so that no line can break up or command a terminal."""
    return {name: value if name.startswith("_") else _clean(value) for name, value in event.items()}


def _clean(value: Any) -> Any:
    """A plain value (`_is_plain`) with all its texts cleaned."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {clean_text(name): _clean(item) for name, item in value.items()}
    return value


def _reporting(report: Callable[[Mapping[str, Any]], None]) -> Processor:
    """Hand errors of our own loggers over; those of libraries may quote what they were handed."""

    def hand_over(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        ours = str(event.get("logger", "")).partition(".")[0] == OURS
        if ours and event.get("level") in {"error", "critical"}:
            with contextlib.suppress(Exception):  # a report that fails must not take the line with it
                report({name: value for name, value in event.items() if not name.startswith("_")})
        return event

    return hand_over


def safe_exception(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Replace `exc_info` by types, places and our own texts: no locals, no texts of others."""
    error = event.pop("exc_info", None)
    if error is True:
        error = sys.exc_info()[1]
    if isinstance(error, tuple):
        error = error[1]
    event.pop("stack_info", None)
    if isinstance(error, BaseException):
        event["exception"] = describe(error)
    return event


def describe(error: BaseException) -> str:
    """An exception and its causes in one line: types, our own texts, and where each was raised."""
    parts = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        parts.append(_one(current))
        if isinstance(current, BaseExceptionGroup):
            parts.extend(describe(inner) for inner in current.exceptions[:3])
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return " <- ".join(parts)


def _one(error: BaseException) -> str:
    text = type(error).__qualname__
    if isinstance(error, HelperError):
        text += f": {error}"
    elif isinstance(error, OSError) and error.strerror:
        text += f": {error.strerror}"
    return f"{text} ({_places(error.__traceback__)})"


def _places(trace: TracebackType | None) -> str:
    """The last frames, innermost first, as file:line of the names that a reader knows."""
    frames = traceback.extract_tb(trace)[-6:]
    return ", ".join(f"{'/'.join(f.filename.split('/')[-2:])}:{f.lineno}" for f in reversed(frames))


def _is_plain(value: object) -> bool:
    """Whether a value is text, a number, or a small collection of these: no bytes, no objects."""
    if value is None or isinstance(value, str | int | float):
        return True
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(item) for name, item in value.items())
    return False
