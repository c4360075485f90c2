"""Structured logging to standard error, limited to an allowlist of fields.

A field that is not on the allowlist is dropped and counted, so that new code cannot log a witness, a nullifier or a
transaction by mistake. Exceptions are logged as types and source locations. Their text is included
only for `HelperError`, because other exceptions may quote a value.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, Literal

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from helper.core.log_limits import LoggedProblem
from helper.core.text_forms import clean_text
from helper.errors import HelperError

ALLOWED_FIELDS: Final = frozenset(
    [
        "event",
        "level",
        "logger",
        "timestamp",
        "exception",
        "dropped",
        "advice",
        "error",
        "key",
        "note",
        "outcome",
        "reason",
        "stage",
        "status",
        "verdict",
        "suppressed",
        "attempt",
        "count",
        "counts",
        "crashes",
        "recovered",
        "rounds",
        "rows",
        "shares",
        "slot",
        "chain_id",
        "circuit",
        "components",
        "endpoint",
        "fence",
        "operator",
        "height",
        "remembered",
        "round",
        "version",
        "seconds",
        "self_test",
        "host",
        "path",
        "request_id",
        "url",
    ]
)
"""All fields that a log entry may have. The only data of a share are count, stage and reason."""

ROOT_LOGGER: Final = "helper"
"""Root logger of this product. Libraries log their arguments (URLs, query values); of their entries only warnings and
errors are written, at any level."""

REPEAT_BURST: Final = 10
"""Number of equal warnings or errors that are written before the rate limit applies."""
REPEAT_SECONDS: Final = 1.0
"""Minimum seconds between equal warnings or errors after the burst."""

_dropped: Counter[str] = Counter()

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "json", "pretty"]


def configure(
    level: Level = "info",
    format: Format = "auto",  # noqa: A002
    report: Callable[[Mapping[str, Any]], None] | None = None,
    *,
    prefix: Callable[[str], str] | None = None,
) -> None:
    """Configure logging for this process. May be called again.

    Args:
        format: json writes one object per line; pretty is for terminals; auto is pretty if standard error is one.
        report: called with each error entry of this product's loggers.
        prefix: returns what is written before an entry of a level; nothing by default.
    """
    out = sys.stderr
    pretty = format == "pretty" or (format == "auto" and out.isatty())
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        replace_exception,
        keep_allowed_fields,
        *([] if report is None else [_create_report_processor(report)]),
    ]
    renderer: Processor = (
        structlog.dev.ConsoleRenderer(colors=out.isatty())
        if pretty
        else structlog.processors.JSONRenderer(ensure_ascii=False)
    )

    def render(logger: WrappedLogger, method: str, event: EventDict) -> str:
        start = "" if prefix is None else prefix(event["level"])
        return start + str(renderer(logger, method, event))

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
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    handler.addFilter(RepeatFilter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))
    logging.getLogger(ROOT_LOGGER).setLevel(level.upper())


class RepeatFilter(logging.Filter):
    """Rate limit for equal warnings and errors, so that no client can flood the log.

    Entries of this product are equal if logger and event are the same, those of libraries if they come from the same
    source line. The next entry that is written states how many were suppressed. Uses the time of the records.
    """

    def __init__(self) -> None:
        super().__init__()
        self._limits: dict[tuple[str, str], tuple[float, int]] = {}  # (time of the full burst, suppressed entries)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written."""
        if record.levelno < logging.WARNING:
            return True
        fields = record.msg if isinstance(record.msg, dict) else None
        kind = (record.name, str(fields["event"]) if fields is not None else f"{record.pathname}:{record.lineno}")
        now, burst = record.created, (REPEAT_BURST - 1) * REPEAT_SECONDS
        full_at, suppressed = self._limits.get(kind, (now, 0))
        if not now <= full_at <= now + burst + REPEAT_SECONDS:
            full_at = now  # the burst is full again, or the clock was set back
        if full_at > now + burst:
            self._limits[kind] = (full_at, suppressed + 1)
            return False
        self._limits[kind] = (full_at + REPEAT_SECONDS, 0)
        if suppressed and fields is not None:
            record.msg = {**fields, "suppressed": suppressed}
        elif suppressed:
            record.msg, record.args = f"{record.getMessage()} (suppressed: {suppressed})", None
        return True


def count_dropped_fields() -> Mapping[str, int]:
    """Return how often each disallowed field was dropped since the start."""
    return dict(_dropped)


def keep_allowed_fields(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Remove disallowed fields and values that are not plain. Adds their number as `dropped`.

    Control characters are replaced, to prevent log injection and terminal escape sequences.
    """
    kept: EventDict = {}
    for name, value in event.items():
        if name.startswith("_"):  # internal to structlog, which removes it before rendering
            kept[name] = value
        elif name in ALLOWED_FIELDS:
            with contextlib.suppress(TypeError):
                kept[name] = _clean(value)
    if dropped := event.keys() - kept.keys():
        _dropped.update(dropped)
        kept["dropped"] = len(dropped)
    return kept


def _clean(value: Any) -> Any:
    """Return a plain value with clean strings: a string, a number, None, or a collection of these.

    Raises:
        TypeError: it is, or contains, bytes or another object.
    """
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, str):
        return clean_text(str(value))  # a member of an enumeration is shown as its text
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {clean_text(name): _clean(item) for name, item in value.items()}
    raise TypeError


def _create_report_processor(report: Callable[[Mapping[str, Any]], None]) -> Processor:
    """Forward errors of this product's loggers. Those of libraries may quote their arguments."""

    def forward(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        is_own_logger = str(event.get("logger", "")).partition(".")[0] == ROOT_LOGGER
        if is_own_logger and event.get("level") in {"error", "critical"}:
            with contextlib.suppress(Exception):  # the entry must be written even if the report fails
                report({name: value for name, value in event.items() if not name.startswith("_")})
        return event

    return forward


def replace_exception(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Replace `exc_info` with types, source locations and texts of `HelperError`. No local variables."""
    error = event.pop("exc_info", None)
    if error is True:
        error = sys.exc_info()[1]
    if isinstance(error, tuple):
        error = error[1]
    event.pop("stack_info", None)
    if isinstance(error, BaseException):
        event["exception"] = describe_exception(error)
    return event


def describe_exception(error: BaseException) -> str:
    """Describe an exception and its causes in one line: types, texts of `HelperError`, source locations."""
    parts = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        parts.append(_describe_single(current))
        if isinstance(current, BaseExceptionGroup):
            parts.extend(describe_exception(inner) for inner in current.exceptions[:3])
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return " <- ".join(parts)


def _describe_single(error: BaseException) -> str:
    text = type(error).__qualname__
    if isinstance(error, HelperError):
        text += f": {error}"
    elif isinstance(error, OSError) and error.strerror:
        text += f": {error.strerror}"
    return f"{text} ({_locations(error.__traceback__)})"


def _locations(trace: TracebackType | None) -> str:
    """The last six frames, innermost first, as directory/file:line."""
    frames = traceback.extract_tb(trace)[-6:]
    return ", ".join(f"{'/'.join(f.filename.split('/')[-2:])}:{f.lineno}" for f in reversed(frames))


def log_error(log: FilteringBoundLogger, event: str, error: Exception) -> None:
    """Log an error under this event."""
    if isinstance(error, HelperError):
        log.error(event, error=str(error), advice=error.advice)
    else:
        log.error(event, exc_info=error)


class RecurringErrorLog:
    """Logs the first error of a loop and its recovery, instead of every failed iteration.

    Args:
        failed: event of an error.
        recovered: event of the first iteration without an error.
    """

    def __init__(self, log: FilteringBoundLogger, *, failed: str, recovered: str) -> None:
        self._log = log
        self._failed = failed
        self._recovered = recovered
        self._problem = LoggedProblem()

    def note(self, error: Exception | None) -> None:
        """Record the result of an iteration: its error, None if there was none."""
        if error is None:
            if self._problem.clear():
                self._log.info(self._recovered)
        elif self._problem.note(repr(error)):
            log_error(self._log, self._failed, error)
