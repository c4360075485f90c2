"""The settings: `helper.toml`, the environment, and flags, in rising order of weight.

model.py    what can be set, its types, ranges, defaults and explanations
lines.py    where in a TOML file each key stands
loader.py   reading and checking everything at once; where each value came from
example.py  the commented file that `config init` writes, made from the model
"""

from helper.config.loader import Loaded, Origin, Problem, SettingsError, find_file, load, load_traced
from helper.config.model import Config

__all__ = [
    "Config",
    "Loaded",
    "Origin",
    "Problem",
    "SettingsError",
    "find_file",
    "load",
    "load_traced",
]
