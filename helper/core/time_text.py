"""Formats times and durations for display. Pure."""

from __future__ import annotations

from datetime import UTC, datetime


def format_time(seconds: float, *, local: bool = False) -> str:
    """Format a Unix time as `2026-01-31 18:30:00`, with milliseconds unless they are 0.

    A time that the calendar cannot represent is returned as a number.

    Args:
        seconds: Unix seconds.
        local: use this machine's time zone instead of UTC, and append its name.
    """
    try:
        time = datetime.fromtimestamp(seconds, UTC)
        if local:
            time = time.astimezone()
    except (OverflowError, ValueError, OSError):
        return str(seconds)
    text = time.strftime("%Y-%m-%d %H:%M:%S") + (f".{time.microsecond // 1000:03d}" if time.microsecond else "")
    return f"{text} {time.strftime('%Z')}" if local else text


def format_duration(seconds: float | None) -> str:
    """Format a duration in at most eight columns: `45 s`, `38 min`, `5.2 h`, `3.0 d`.

    Returns `-` for None, and `ended` for a negative duration.
    """
    if seconds is None:
        return "-"
    if seconds < 0:
        return "ended"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86_400:.1f} d"
