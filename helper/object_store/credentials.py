"""Shared credentials files of S3 tools: INI files with one section per profile."""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from helper.errors import ConfigError

CREDENTIALS_DIRECTORY: Final = "CREDENTIALS_DIRECTORY"
"""Environment variable: the directory of the credentials that a service manager passes (systemd.exec(5))."""
CREDENTIAL: Final = "s3-credentials"
"""Name of the file as a systemd credential (systemd.exec(5), LoadCredential)."""
SHARED: Final = "AWS_SHARED_CREDENTIALS_FILE"
PROFILE: Final = "AWS_PROFILE"


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys that sign requests. Not part of the representation, so that they are never logged."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


def credentials_file(named: str, env: Mapping[str, str]) -> Path | None:
    """Find the credentials file: the configured one, the systemd credential, or the environment's.

    Returns:
        None if there is none. The client then finds keys itself: AWS_ACCESS_KEY_ID and related variables, a web
        identity, or the role of the container or machine.
    """
    if named:
        return Path(named)
    if folder := env.get(CREDENTIALS_DIRECTORY):
        credential = Path(folder, CREDENTIAL)
        if credential.exists():
            return credential
    return Path(env[SHARED]) if env.get(SHARED) else None


def read_keys(path: Path, profile: str = "default") -> Keys:
    """Read the keys of a profile from a credentials file.

    Raises:
        ConfigError: it cannot be read or has no keys. The message quotes nothing from the file.
    """
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, configparser.Error):
        raise ConfigError(f"{path} is not a credentials file: [{profile}], then aws_access_key_id = …") from None
    if not parser.has_section(profile):
        raise ConfigError(f"{path} has no section [{profile}]")
    section = parser[profile]
    access, secret = section.get("aws_access_key_id", ""), section.get("aws_secret_access_key", "")
    if not access or not secret:
        raise ConfigError(f"{path}: [{profile}] needs aws_access_key_id and aws_secret_access_key")
    return Keys(access, secret, section.get("aws_session_token") or None)
