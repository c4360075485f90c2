"""Reads and checks the settings: the file, the strength of tokens, the published addresses.

Invalid values are reported and replaced by defaults. No message contains a token or a URL of the chain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from helper.app.listeners import published_addresses
from helper.config.loader import Problem, load_valid_settings
from helper.config.sections import Config
from helper.config.settings_file import find_file
from helper.config.settings_text import SECRET_SETTINGS
from helper.doctor.result import CheckResult, fail, ok, warn

MIN_ENTROPY_BITS: Final = 64.0
"""Sufficient against guesses over the network, which are slow and rate-limited."""
_CREATE_ADVICE: Final = "Create one with `openssl rand -hex 32`."
_TOKEN_SETTINGS: Final = {
    "api_token": ("[helper] api_token", "shares are accepted from any client, as public wallets need"),
    "operator token": ("[operator] token", "the operator API over HTTP is disabled"),
}


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
    secret = any(origin.kind == "file" and origin.source == str(path) for origin in secret_origins)
    return DoctorSettings(
        loaded.config, path, readable, secret, tuple(_evaluate_settings(path, problems, loaded.config))
    )


def _evaluate_settings(path: Path | None, problems: tuple[Problem, ...], config: Config) -> list[CheckResult]:
    if problems:
        advice = "Fix it: `svote-helper config validate` lists all problems. The helper does not start until then."
        return [fail("settings", str(problem), advice, key=problem.key, line=problem.line) for problem in problems]
    if path is None:
        advice = "Create a file with `svote-helper config init`, and set your nodes in it."
        return [warn("settings", "no settings file: defaults apply", advice)]
    if not config.store.url and not config.db_path.is_absolute():
        text = f"[helper] db_path is relative ({config.db_path}): a start in another directory creates an empty queue"
        return [warn("settings", text, "Set it to the absolute path of the queue database.", path=str(path))]
    return [ok("settings", f"{path} is valid", path=str(path))]


def entropy_bits(token: str) -> float:
    """Upper bound of a token's entropy in bits: length times log2 of the number of distinct characters."""
    return len(token) * math.log2(len(set(token))) if token else 0.0


def evaluate_tokens(api_token: str, operator_token: str) -> list[CheckResult]:
    """Check both tokens."""
    if api_token and api_token == operator_token:
        advice = f"Every wallet that knows it can watch the queue. {_CREATE_ADVICE}"
        return [fail("operator token", "identical to [helper] api_token", advice)]
    return [_evaluate_token("api_token", api_token), _evaluate_token("operator token", operator_token)]


def _evaluate_token(subject: str, token: str) -> CheckResult:
    setting, unset = _TOKEN_SETTINGS[subject]
    if not token:
        return ok(subject, f"{setting} is not set: {unset}")
    entropy = math.floor(entropy_bits(token))
    if entropy < MIN_ENTROPY_BITS:
        return warn(
            subject, f"{setting} is weak: {len(token)} characters, at most {entropy} bits", _CREATE_ADVICE, bits=entropy
        )
    return ok(subject, f"{setting} is set and strong enough", bits=entropy)


def evaluate_publication(config: Config) -> CheckResult:
    """Check `/api/chain`: no required address is missing, and none contains credentials."""
    subject = "published addresses"
    if config.admin.disable:
        return ok(subject, "none: [admin] disable is set")
    set_for_publication = {"chain_rest": config.ui.chain_rest, "chain_rpc": config.ui.chain_rpc}
    secret = [name for name, url in set_for_publication.items() if url and _may_hold_secret(url)]
    if secret:
        advice = "Anyone can read it at /api/chain. Set an address that needs no credentials or key."
        return warn(subject, f"[ui] {' and '.join(secret)} contains credentials or a query", advice, settings=secret)
    names = ("chain_rest", "chain_rpc")
    missing = [name for name, url in zip(names, published_addresses(config), strict=True) if not url]
    if missing and config.ui.enable:
        advice = (
            f"Set [ui] {' and '.join(missing)} to a public address. Only https addresses without path, query and"
            " credentials are taken from [chain], because others may be private or contain a key."
        )
        return warn(
            subject,
            "browser wallets cannot add the chain: no public address of a node",
            advice,
            missing=missing,
        )
    return ok(subject, "no credentials in the chain addresses that /api/chain shows")


def _may_hold_secret(url: str) -> bool:
    parts = urlsplit(url)
    return "@" in parts.netloc or bool(parts.query)
