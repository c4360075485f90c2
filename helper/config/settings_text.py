"""Text form of settings: parses variables, explains problems, redacts secrets, writes the example file. Pure."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from typing import Any, Final, get_origin
from urllib.parse import urlsplit, urlunsplit

from pydantic.fields import FieldInfo

from helper.config.sections import Config, Section

REDACTED: Final = "(set, not shown)"
SECRET_SETTINGS: Final = frozenset(
    {("helper", "api_token"), ("operator", "token"), ("helper", "sentry_dsn"), ("store", "url")}
)
_TRUE_TEXTS: Final = frozenset({"true", "1", "yes", "on"})
_FALSE_TEXTS: Final = frozenset({"false", "0", "no", "off"})


def _collect_sections() -> dict[str, dict[str, FieldInfo]]:
    sections = {}
    for name, field in Config.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        assert issubclass(model, Section)
        sections[name] = dict(model.model_fields)
    return sections


SECTIONS: Final[Mapping[str, Mapping[str, FieldInfo]]] = _collect_sections()
"""Model fields of all settings by section and key."""


def get_setting_type(section: str, key: str) -> type:
    """Return the plain type of a setting: bool, int, float, str, or tuple for a list of addresses."""
    default = SECTIONS[section][key].default
    annotation = SECTIONS[section][key].annotation
    if get_origin(annotation) is tuple:
        return tuple
    return float if annotation is float else type(default)


def parse_value(section: str, key: str, text: str) -> Any:
    """Parse the value of an environment variable; lists are separated by commas.

    Empty entries are dropped, except in the list of RPC URLs, where they mean a node without RPC.

    Raises:
        ValueError: the text does not have the setting's type.
    """
    kind = get_setting_type(section, key)
    if kind is tuple:
        parts = [part.strip() for part in text.split(",")]
        if (section, key) != ("chain", "rpc"):
            return [part for part in parts if part]
        while parts and not parts[-1]:
            parts.pop()
        return parts
    if kind is bool:
        lowered = text.strip().lower()
        if lowered in _TRUE_TEXTS or lowered in _FALSE_TEXTS:
            return lowered in _TRUE_TEXTS
        raise ValueError("must be true or false")
    if kind in {int, float}:
        try:
            return kind(text.strip())
        except ValueError:
            raise ValueError("must be a whole number" if kind is int else "must be a number") from None
    return text


def describe_validation_error(section: str, key: str, details: Mapping[str, Any]) -> str:
    """Describe a validation error, without the value, which may be secret."""
    kind, context = str(details["type"]), details.get("ctx", {})
    place = (
        f"entry {details['loc'][2] + 1}: "
        if len(details["loc"]) > 2 and get_setting_type(section, key) is tuple
        else ""
    )
    messages = {
        "bool_type": "must be true or false",
        "int_type": "must be a whole number",
        "float_type": "must be a number",
        "finite_number": "must be a finite number",
        "string_type": "must be a string",
        "tuple_type": "must be a list of strings",
    }
    if kind in messages:
        return place + messages[kind]
    if kind == "value_error":
        return place + str(context["error"])
    if kind == "literal_error":
        return place + f"must be one of {context['expected']}"
    limits = {"greater_than_equal": "at least", "less_than_equal": "at most", "greater_than": "more than"}
    if kind in limits:
        return place + f"must be {limits[kind]} {next(iter(context.values())):g}"
    return place + str(details["msg"])


def to_display_value(section: str, key: str, value: Any) -> Any:
    """Return a value for display: secrets and credentials in URLs redacted, tuples as lists.

    The path of a node's URL can be a key of its provider. Other output names a node by host and port.
    """
    if (section, key) in SECRET_SETTINGS:
        return REDACTED if value else value
    if isinstance(value, tuple):
        return [to_display_value(section, key, part) for part in value]
    if isinstance(value, str) and "://" in value:
        return _redact_credentials(value, hides_path=section == "chain")
    return value


def _redact_credentials(url: str, *, hides_path: bool) -> str:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    netloc = f"***@{host}" if "@" in parts.netloc else host
    path = "/***" if parts.path and hides_path else parts.path
    return urlunsplit((parts.scheme, netloc, path, "***" if parts.query else "", ""))


def to_toml(value: Any) -> str:
    """Format a value as TOML."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, bool | int | float):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return "[" + ", ".join(to_toml(part) for part in value) + "]"


_WIDTH: Final = 100
_HEADER: Final = """\
# svote-helper settings. Every key is listed with its default. Uncomment a line to change it.
# Each setting can also be set by the environment variable SVOTE_HELPER_<SECTION>_<KEY> (lists are comma-separated).
# `svote-helper config validate` checks this file; `svote-helper config show --origin` shows the values in effect.
"""


def render_example(settings: Mapping[tuple[str, str], Any] | None = None) -> str:
    """Return the file. `# ` begins an explanation; `#` without a space a setting at its default.

    Args:
        settings: settings to write uncommented, by section and key.
    """
    rendered_settings = settings or {}
    parts = [_HEADER]
    for section, fields in SECTIONS.items():
        model = Config.model_fields[section].annotation
        assert isinstance(model, type)
        block = [f"# {(model.__doc__ or '').strip()}", f"[{section}]", ""]
        for key, field in fields.items():
            block += [f"# {line}" for line in textwrap.wrap(field.description or "", _WIDTH, break_on_hyphens=False)]
            value = rendered_settings.get((section, key))
            block += [f"#{key} = {to_toml(field.default)}" if value is None else f"{key} = {to_toml(value)}", ""]
        parts.append("\n".join(block))
    return "\n".join(parts).rstrip("\n") + "\n"
