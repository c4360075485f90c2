"""Loads the settings from file, environment and flags, and reports all problems together."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_origin

from pydantic import ValidationError

from helper.config.sections import SECTIONS, SETTINGS, Config, find_contradictions
from helper.config.settings_file import (
    CREDENTIALS,
    CREDENTIALS_DIRECTORY,
    ENV_PREFIX,
    FILE_CREDENTIALS,
    NON_SETTING_VARIABLES,
    find_key_lines,
    parse_syntax_error,
    variable_name,
)
from helper.core.json_records import fact
from helper.errors import ConfigError

_TRUE_TEXTS: Final = frozenset({"true", "1", "yes", "on"})
_FALSE_TEXTS: Final = frozenset({"false", "0", "no", "off"})


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem in the settings."""

    source: str = fact("The file, the environment variable or the flag.")
    line: int | None = fact("Line number in the file, from 1; null for other sources.")
    key: str = fact("`section.key`, a section, or the variable's name; empty if the problem concerns the entire file.")
    message: str = fact("Description of the problem.")
    nearest: str | None = fact("A known name similar to an unknown one.", default=None)

    def __str__(self) -> str:
        """Format as one line: `helper.toml:3: helper.prot: unknown key, did you mean helper.port?`."""
        place = self.source if self.line is None else f"{self.source}:{self.line}"
        text = f"{self.key}: {self.message}" if self.key and self.key != place else self.message
        hint = f", did you mean {self.nearest}?" if self.nearest else ""
        return f"{place}: {text}{hint}"


class SettingsError(ConfigError):
    """The settings are invalid; `problems` lists every problem."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class Origin:
    """Source of a value.

    Attributes:
        source: the file, the environment variable or the flag.
        line: line number in the file, from 1; None for other sources.
    """

    kind: Literal["default", "file", "env", "flag"]
    source: str
    line: int | None = None

    def __str__(self) -> str:
        """Format as `default`, `helper.toml:3`, `env SVOTE_HELPER_HELPER_PORT` or `flag helper.port`."""
        place = self.source if self.line is None else f"{self.source}:{self.line}"
        return f"env {place}" if self.kind == "env" else place


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings, the file they were read from (None if none), and the origin of every value."""

    config: Config
    path: Path | None
    origins: Mapping[str, Origin]


def load(
    path: Path | None = None, env: Mapping[str, str] | None = None, flags: Mapping[str, Any] | None = None
) -> Loaded:
    """Load and validate the settings, with the origin of each value.

    Args:
        path: the TOML file, or None (see `find_file`).
        env: the environment; only names with the prefix SVOTE_HELPER_ and the credentials directory are read.
        flags: values from the command line by `section.key`; None means that the flag was not given.

    Raises:
        SettingsError: the settings are invalid.
    """
    reader = _SettingsReader(path, env or {}, flags or {})
    return Loaded(reader.build_config(), path, reader.all_origins())


def load_valid_settings(path: Path | None, env: Mapping[str, str]) -> tuple[Loaded, tuple[Problem, ...]]:
    """Load the settings and treat invalid ones as not set, for callers that must continue.

    Returns:
        The settings, and every problem.
    """
    reader = _SettingsReader(path, env, {})
    config = reader.build_valid_config()
    return Loaded(config, path, reader.all_origins()), tuple(reader.problems)


class _SettingsReader:
    """Collects values from file, environment and flags, with their origins and problems."""

    def __init__(self, path: Path | None, env: Mapping[str, str], flags: Mapping[str, Any]) -> None:
        self.values: dict[str, Any] = {}  # by `section.key`
        self.origins: dict[str, Origin] = {}
        self.problems: list[Problem] = []
        if path is not None:
            self._add_file(path)
        self._add_environment(env)
        self._add_flags(flags)
        self._add_secrets(env)

    def _add_file(self, path: Path) -> None:
        source = str(path)
        if path.is_fifo():
            self.problems.append(Problem(source, None, "", "is a pipe, but a command may read its settings twice"))
            return
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except OSError as error:
            self.problems.append(Problem(source, None, "", f"cannot be read: {error.strerror}"))
            return
        except UnicodeDecodeError as error:
            line = error.object[: error.start].count(b"\n") + 1
            self.problems.append(Problem(source, line, "", "is not UTF-8"))
            return
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            line, message = parse_syntax_error(str(error), text)
            self.problems.append(Problem(source, line, "", f"not valid TOML: {message}"))
            return
        self._add_document(source, document, find_key_lines(text))

    def _add_document(self, source: str, document: Mapping[str, Any], lines: Mapping[str, int]) -> None:
        for section, table in document.items():
            line = lines.get(section)
            if section not in SECTIONS:
                message = "unknown section" if isinstance(table, dict) else "must be inside a section"
                self.problems.append(Problem(source, line, section, message, _suggest_section(section)))
                continue
            if not isinstance(table, dict):
                self.problems.append(Problem(source, line, section, f"must be a section, [{section}]"))
                continue
            for key, value in table.items():
                name = f"{section}.{key}"
                key_line = lines.get(name, line)
                if name not in SETTINGS:
                    nearest = _suggest_key(section, key)
                    self.problems.append(Problem(source, key_line, name, "unknown key", nearest))
                    continue
                self._set_value(name, value, Origin("file", source, key_line))

    def _add_environment(self, env: Mapping[str, str]) -> None:
        """Add environment variables. An unknown one is a problem, because it would have no effect."""
        known = {variable_name(setting): setting for setting in SETTINGS}
        for name in sorted(env):
            if not name.startswith(ENV_PREFIX) or name in NON_SETTING_VARIABLES:
                continue
            setting = known.get(name)
            if setting is None:
                nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
                self.problems.append(Problem(name, None, name, "unknown variable", nearest[0] if nearest else None))
                continue
            try:
                self._set_value(setting, _parse_value(setting, env[name]), Origin("env", name))
            except ValueError as error:
                self.problems.append(Problem(name, None, setting, str(error)))

    def _add_flags(self, flags: Mapping[str, Any]) -> None:
        for setting, value in flags.items():
            if setting not in SETTINGS:
                raise KeyError(f"unknown setting {setting}")
            if value is not None:
                self._set_value(setting, value, Origin("flag", f"flag {setting}"))

    def _add_secrets(self, env: Mapping[str, str]) -> None:
        """Add secrets from files: those named in the settings, then systemd credentials."""
        passed = {}
        if directory := env.get(CREDENTIALS_DIRECTORY):
            files = {name: Path(directory, file) for name, file in {**CREDENTIALS, **FILE_CREDENTIALS}.items()}
            passed = {name: file for name, file in files.items() if name not in self.values and file.exists()}
        for setting in CREDENTIALS:
            file_setting = f"{setting}_file"
            file_name = self.values.get(file_setting)
            if file_name and isinstance(file_name, str):
                if self.values.get(setting):
                    key = setting.partition(".")[2]
                    self._add_problem(file_setting, f"cannot be combined with {key}: remove one of them")
                else:
                    self._add_secret(setting, Path(file_name), file_setting)
            elif setting in passed:
                self._add_secret(setting, passed[setting], setting)
        for setting in FILE_CREDENTIALS.keys() & passed.keys():
            self._set_value(setting, str(passed[setting]), Origin("file", str(passed[setting])))

    def _add_secret(self, setting: str, file: Path, reported_as: str) -> None:
        """Set a setting to the first line of a file. Problems are reported for the setting `reported_as`."""
        origin = Origin("file", str(file))
        try:
            lines = file.read_text("utf-8").splitlines()
        except UnicodeDecodeError:
            problem = f"{file} is not UTF-8"
        except OSError as error:
            problem = f"{file} cannot be read: {error.strerror}"
        else:
            if lines and lines[0]:
                self._set_value(setting, lines[0], origin)
                return
            problem = f"{file}: the first line is empty, it must be the {setting.partition('.')[2]}"
        self._add_problem(reported_as, problem, self.origins.get(reported_as, origin))

    def _add_problem(self, setting: str, message: str, origin: Origin | None = None) -> None:
        """Add a problem of a setting, by default at the origin of its value."""
        place = self.origins[setting] if origin is None else origin
        self.problems.append(Problem(place.source, place.line, setting, message))

    def _set_value(self, setting: str, value: Any, origin: Origin) -> None:
        self.values[setting] = value
        self.origins[setting] = origin

    def build_config(self) -> Config:
        """Validate all values and return the settings. Raises SettingsError if there are problems."""
        config: Config | None = None
        try:
            config = Config.model_validate(self._group_by_section())
        except ValidationError as error:
            for details in error.errors(include_url=False):
                setting = f"{details['loc'][0]}.{details['loc'][1]}"
                self._add_problem(setting, _describe_validation_error(setting, details))
        if config is not None:
            for setting, message in find_contradictions(config):
                self._add_problem(setting, message)
        if self.problems or config is None:
            raise SettingsError(sorted(self.problems, key=lambda p: (p.source, p.line or 0)))
        return config

    def build_valid_config(self) -> Config:
        """Return the settings without the invalid ones, or the defaults if the remaining ones are invalid too."""
        with suppress(SettingsError):
            return self.build_config()
        for setting in {problem.key for problem in self.problems} & self.values.keys():
            del self.values[setting]
            del self.origins[setting]
        try:
            return Config.model_validate(self._group_by_section())
        except ValidationError:
            return Config()

    def _group_by_section(self) -> dict[str, dict[str, Any]]:
        tables: dict[str, dict[str, Any]] = {}
        for setting, value in self.values.items():
            section, _, key = setting.partition(".")
            tables.setdefault(section, {})[key] = value
        return tables

    def all_origins(self) -> dict[str, Origin]:
        """Return the origin of every setting, including defaults."""
        default = Origin("default", "default")
        return {setting: self.origins.get(setting, default) for setting in SETTINGS}


def _suggest_section(name: str) -> str | None:
    """Find a section with a similar name, or a setting with this name."""
    for section in SECTIONS:
        if name in SECTIONS[section]:
            return f"[{section}] {name}"
    close = difflib.get_close_matches(name, SECTIONS, n=1)
    return f"[{close[0]}]" if close else None


def _suggest_key(section: str, name: str) -> str | None:
    """Find a key with a similar name, first in the same section."""
    close = difflib.get_close_matches(name, SECTIONS[section], n=1, cutoff=0.7)
    if close:
        return f"{section}.{close[0]}"
    everywhere = {key: other for other in SECTIONS for key in SECTIONS[other]}
    close = difflib.get_close_matches(name, everywhere, n=1, cutoff=0.8)
    return f"{everywhere[close[0]]}.{close[0]}" if close else None


def _setting_type(setting: str) -> type:
    """Return the plain type of a setting: bool, int, float, str, or tuple for a list of addresses."""
    field = SETTINGS[setting]
    if get_origin(field.annotation) is tuple:
        return tuple
    return float if field.annotation is float else type(field.default)


def _parse_value(setting: str, text: str) -> Any:
    """Parse the value of an environment variable; lists are separated by commas.

    Empty entries are dropped, except in the list of RPC URLs, where they mean a node without RPC.
    """
    kind = _setting_type(setting)
    if kind is tuple:
        parts = [part.strip() for part in text.split(",")]
        if setting != "chain.rpc":
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


def _describe_validation_error(setting: str, details: Mapping[str, Any]) -> str:
    """Describe a validation error, without the value, which may be secret."""
    place = f"entry {details['loc'][2] + 1}: " if len(details["loc"]) > 2 and _setting_type(setting) is tuple else ""
    message = str(details["msg"]).removeprefix("Value error, ").replace("Input should be", "must be", 1)
    return place + message.replace("valid tuple", "list")
