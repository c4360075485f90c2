"""JSON documents as classes: described fields, of which schemas and metrics are generated; their errors. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic import ValidationError

HEX_32: Final = "^[0-9a-f]{64}$"
"""Pattern of 32 bytes in hex."""
TX_HASH: Final = "^[0-9A-F]{64}$"
"""Pattern of a transaction hash."""


def fact(description: str, *, metric: str = "", optional: bool = False, **options: Any) -> Any:
    """Create a field of a document.

    Args:
        description: what the value is, in JSON schemas and as help text of the metric.
        metric: name of a gauge with this value or the length of this sequence, or of the histogram of this timing; ""
            for none.
        optional: whether the field is absent if it is None.
        options: `default` or `default_factory`, as of `dataclasses.field`; all others as of `pydantic.Field`, for the
            schema.
    """
    defaults = {name: options.pop(name) for name in ("default", "default_factory") if name in options}
    if optional:
        defaults["default"] = None
    return field(metadata={"description": description, "metric": metric, "optional": optional, **options}, **defaults)


def to_json(document: DataclassInstance) -> dict[str, Any]:
    """Return a document as plain values."""
    values: dict[str, Any] = {}
    for each in fields(document):
        value = getattr(document, each.name)
        if value is not None or not each.metadata.get("optional"):
            values[each.metadata.get("serialization_alias", each.name)] = _to_plain(value)
    return values


def _to_plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(value)
    if isinstance(value, Mapping):
        return {name: _to_plain(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_to_plain(each) for each in value]
    return value


def first_error(error: ValidationError) -> tuple[str, str]:
    """Return the place and the reason of the first error in a document, without its values, which may be secret.

    The place consists of names with dots between them; "" is the whole document.
    """
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    return ".".join(map(str, first["loc"])), first["msg"]
