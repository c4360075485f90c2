"""The settings as they can be read: what is wrong with them is told, and the rest is gone by."""

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
    """What the checks go by.

    Attributes:
        config: the settings, without those that are wrong.
        path: the file, None where there is none.
        readable: whether the file could be read at all; where not, the settings tell nothing of this machine.
        holds_secrets: whether a token, or another secret, stands in the file itself.
        findings: a line a problem, or one that all is well.
    """

    config: Config
    path: Path | None
    readable: bool
    holds_secrets: bool
    findings: tuple[CheckResult, ...]


def read_settings(explicit: Path | None, env: Mapping[str, str]) -> Settings:
    """Read file and environment; never raises for what is in them."""
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
        advice = "Mend it: `svote-helper config validate` shows all. The helper does not start with it."
        return [fail("settings", str(problem), advice, key=problem.key, line=problem.line) for problem in problems]
    if path is None:
        advice = "Write a file with `svote-helper config init`, and name your nodes in it."
        return [
            warn("settings", "there is no settings file: the defaults hold, with a dev chain on this machine", advice)
        ]
    return [ok("settings", f"{path} is right", path=str(path))]
