"""Reads the settings for the checks: reports invalid values and uses the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from helper.config import Config, Problem, find_file, load_what_can_be
from helper.doctor.result import CheckResult, fail, ok, warn

SECRETS: Final = frozenset({"helper.api_token", "operator.token", "helper.sentry_dsn", "store.url"})


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings for the checks.

    Attributes:
        config: the settings; invalid values are replaced by defaults.
        path: the settings file, None if there is none.
        readable: whether the file could be read; if not, `config` holds only defaults.
        holds_secrets: whether the file itself contains a secret.
        findings: one result for each problem, or one `ok`.
    """

    config: Config
    path: Path | None
    readable: bool
    holds_secrets: bool
    findings: tuple[CheckResult, ...]


def read_settings(explicit: Path | None, env: Mapping[str, str]) -> Settings:
    """Read the file and the environment. Never raises for invalid content."""
    path = find_file(explicit, env)
    loaded, problems = load_what_can_be(path, env)
    readable = all(problem.key or problem.source != str(path) for problem in problems)
    secret = any(
        origin.kind == "file" and origin.detail.startswith(f"{path}:") and name in SECRETS
        for name, origin in loaded.origins.items()
    )
    return Settings(loaded.config, path, readable, secret, tuple(_judge(path, problems)))


def _judge(path: Path | None, problems: tuple[Problem, ...]) -> list[CheckResult]:
    if problems:
        advice = "Fix it: `svote-helper config validate` lists all problems. The helper does not start until then."
        return [fail("settings", str(problem), advice, key=problem.key, line=problem.line) for problem in problems]
    if path is None:
        advice = "Create a file with `svote-helper config init`, and set your nodes in it."
        return [warn("settings", "no settings file: defaults apply, with a dev chain on this machine", advice)]
    return [ok("settings", f"{path} is valid", path=str(path))]
