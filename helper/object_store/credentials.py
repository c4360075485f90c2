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
SYSTEMD_CREDENTIAL: Final = "s3-credentials"
"""Name of the file as a systemd credential (systemd.exec(5), LoadCredential)."""
CREDENTIALS_FILE_VARIABLE: Final = "AWS_SHARED_CREDENTIALS_FILE"
PROFILE_VARIABLE: Final = "AWS_PROFILE"


@dataclass(frozen=True, slots=True)
class AccessKeys:
    """Keys that sign requests. Not part of the representation, so that they are never logged."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


def find_credentials_file(configured: str, env: Mapping[str, str]) -> Path | None:
    """Find the credentials file: the configured one, the systemd credential, or the environment's.

    Returns:
        None if there is none. The client then finds keys itself: AWS_ACCESS_KEY_ID and related variables, a web
        identity, or the role of the container or machine.
    """
    if configured:
        return Path(configured)
    if folder := env.get(CREDENTIALS_DIRECTORY):
        credential = Path(folder, SYSTEMD_CREDENTIAL)
        if credential.exists():
            return credential
    return Path(env[CREDENTIALS_FILE_VARIABLE]) if env.get(CREDENTIALS_FILE_VARIABLE) else None


def read_access_keys(path: Path, profile: str = "default") -> AccessKeys:
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
    return AccessKeys(access, secret, section.get("aws_session_token") or None)
