"""Settings from `helper.toml`, the environment and flags; later sources override earlier ones."""

from typing import TYPE_CHECKING, Any

from helper.config.discovery import find_file, is_missing

if TYPE_CHECKING:
    from helper.config.loader import Loaded, Origin, Problem, SettingsError, load, load_traced, load_valid_settings
    from helper.config.model import Config

__all__ = [
    "Config",
    "Loaded",
    "Origin",
    "Problem",
    "SettingsError",
    "find_file",
    "is_missing",
    "load",
    "load_traced",
    "load_valid_settings",
]


def __getattr__(name: str) -> Any:
    """Import the loader on first use: the import takes 0.3 s, and `healthcheck` does not need it."""
    if name not in __all__:
        raise AttributeError(name)
    from helper.config import loader  # noqa: PLC0415

    return getattr(loader, name)
