"""The settings: `helper.toml`, the environment, and flags, in rising order of weight.

sections.py what can be set, its ranges, defaults and explanations
kinds.py    the kinds of values
model.py    all sections together, and what follows from them
files.py    which file is read, and a first quick look into it
lines.py    where in a TOML file each key stands
loader.py   reading and checking everything at once; where each value came from
example.py  the commented file that `config init` writes, made from the model
"""

from typing import TYPE_CHECKING, Any

from helper.config.files import Doors, find_file, glimpse_database, glimpse_doors

if TYPE_CHECKING:
    from helper.config.loader import Loaded, Origin, Problem, SettingsError, load, load_traced, load_what_can_be
    from helper.config.model import Config

__all__ = [
    "Config",
    "Doors",
    "Loaded",
    "Origin",
    "Problem",
    "SettingsError",
    "find_file",
    "glimpse_database",
    "glimpse_doors",
    "load",
    "load_traced",
    "load_what_can_be",
]


def __getattr__(name: str) -> Any:
    """The rest, loaded when it is asked for: the model takes half a second, a quick look must not wait for it."""
    if name not in __all__:
        raise AttributeError(name)
    from helper.config import loader  # noqa: PLC0415

    return getattr(loader, name)
