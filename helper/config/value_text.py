"""Settings as text: from environment variables, explained when wrong, redacted when shown. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, get_origin
from urllib.parse import urlsplit, urlunsplit

from pydantic.fields import FieldInfo

from helper.config.model import Config
from helper.config.sections import Section

REDACTED: Final = "(set, not shown)"
_SECRET: Final = frozenset({("helper", "api_token"), ("operator", "token"), ("helper", "sentry_dsn"), ("store", "url")})
_TRUE: Final = frozenset({"true", "1", "yes", "on"})
_FALSE: Final = frozenset({"false", "0", "no", "off"})


def _sections() -> dict[str, dict[str, FieldInfo]]:
    found = {}
    for name, field in Config.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        assert issubclass(model, Section)
        found[name] = dict(model.model_fields)
    return found


SECTIONS: Final[Mapping[str, Mapping[str, FieldInfo]]] = _sections()
"""Every setting: its section, its key, its field of the model."""


def type_of(section: str, key: str) -> type:
    """The plain type of a setting: bool, int, float, str, or tuple for a list of addresses."""
    default = SECTIONS[section][key].default
    annotation = SECTIONS[section][key].annotation
    if get_origin(annotation) is tuple:
        return tuple
    return float if annotation is float else type(default)


def from_text(section: str, key: str, text: str) -> Any:
    """The value that an environment variable spells; a list is separated by commas.

    Nothing between two commas is nothing, but in the list of RPC addresses a node without.

    Raises:
        ValueError: when it is not of the setting's type.
    """
    kind = type_of(section, key)
    if kind is tuple:
        parts = [part.strip() for part in text.split(",")]
        if (section, key) != ("chain", "rpc"):
            return [part for part in parts if part]
        while parts and not parts[-1]:
            parts.pop()
        return parts
    if kind is bool:
        word = text.strip().lower()
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
        raise ValueError("must be true or false")
    if kind in {int, float}:
        try:
            return kind(text.strip())
        except ValueError:
            raise ValueError("must be a whole number" if kind is int else "must be a number") from None
    return text


def explain(section: str, key: str, details: Mapping[str, Any]) -> str:
    """Say in words what the model found wrong with a value, without the value where that is secret."""
    kind, context = str(details["type"]), details.get("ctx", {})
    place = f"entry {details['loc'][2] + 1}: " if len(details["loc"]) > 2 and type_of(section, key) is tuple else ""
    words = {
        "bool_type": "must be true or false",
        "int_type": "must be a whole number",
        "float_type": "must be a number",
        "finite_number": "must be a finite number",
        "string_type": "must be a string",
        "tuple_type": "must be a list of strings",
    }
    if kind in words:
        return place + words[kind]
    if kind == "value_error":
        return place + str(context["error"])
    if kind == "literal_error":
        return place + f"must be one of {context['expected']}"
    limits = {"greater_than_equal": "at least", "less_than_equal": "at most", "greater_than": "more than"}
    if kind in limits:
        return place + f"must be {limits[kind]} {next(iter(context.values())):g}"
    return place + str(details["msg"])


def shown(section: str, key: str, value: Any) -> Any:
    """A value as it may be shown to anyone: secrets and credentials in addresses replaced, lists as lists."""
    if (section, key) in _SECRET:
        return REDACTED if value else value
    if isinstance(value, tuple):
        return [shown(section, key, part) for part in value]
    if isinstance(value, str) and "://" in value:
        return without_credentials(value)
    return value


def without_credentials(url: str) -> str:
    """An address without user, password and the values of its query."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    netloc = f"***@{host}" if "@" in parts.netloc else host
    return urlunsplit((parts.scheme, netloc, parts.path, "***" if parts.query else "", ""))


def to_toml(value: Any) -> str:
    """A value as TOML spells it."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, bool | int | float):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return "[" + ", ".join(to_toml(part) for part in value) + "]"
