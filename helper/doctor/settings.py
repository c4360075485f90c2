"""Reads the settings for the checks. Invalid values are reported and replaced by defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from helper.config import Config, Problem, find_file, load_valid_settings
from helper.config.value_text import SECRET_SETTINGS
from helper.doctor.result import CheckResult, fail, ok, warn


@dataclass(frozen=True, slots=True)
class DoctorSettings:
    """Settings for the checks.

    Attributes:
        config: the settings; invalid values are replaced by defaults.
        path: the settings file, None if there is none.
        is_readable: whether the file could be read; if not, `config` holds only defaults.
        has_secrets: whether the file itself contains a secret.
        findings: one result for each problem, or one `ok`.
    """

    config: Config
    path: Path | None
    is_readable: bool
    has_secrets: bool
    findings: tuple[CheckResult, ...]


def read_settings(config_file: Path | None, env: Mapping[str, str]) -> DoctorSettings:
    """Read the file and the environment. Never raises for invalid content."""
    path = find_file(config_file, env)
    loaded, problems = load_valid_settings(path, env)
    readable = all(problem.key or problem.source != str(path) for problem in problems)
    secret_origins = [loaded.origins[f"{section}.{key}"] for section, key in SECRET_SETTINGS]
    secret = any(origin.kind == "file" and origin.detail.startswith(f"{path}:") for origin in secret_origins)
    return DoctorSettings(loaded.config, path, readable, secret, tuple(_judge_settings(path, problems)))


def _judge_settings(path: Path | None, problems: tuple[Problem, ...]) -> list[CheckResult]:
    if problems:
        advice = "Fix it: `svote-helper config validate` lists all problems. The helper does not start until then."
        return [fail("settings", str(problem), advice, key=problem.key, line=problem.line) for problem in problems]
    if path is None:
        advice = "Create a file with `svote-helper config init`, and set your nodes in it."
        return [warn("settings", "no settings file: defaults apply, with a dev chain on this machine", advice)]
    return [ok("settings", f"{path} is valid", path=str(path))]
