"""Generates the commented settings file: `helper.toml.example` and the output of `config init`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any, Final

from helper.config.model import Config
from helper.config.value_text import SECTIONS, to_toml

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
