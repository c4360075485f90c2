"""Settings: defaults, files, environment, flags; all problems with their lines."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from helper.cli.config import REDACTED, render_example, to_display_value
from helper.config.loader import Problem, SettingsError, load
from helper.config.sections import SECTIONS, SETTINGS, Config
from helper.config.settings_file import ENV_PREFIX, find_file, find_key_lines, variable_name
from helper.errors import ConfigError
from scripts.cli_docs import EXAMPLE_FILE


def write_config(path: Path, text: str) -> Path:
    file = path / "helper.toml"
    file.write_text(text)
    return file


def load_problems(tmp_path: Path, text: str, env: dict[str, str] | None = None) -> list[Problem]:
    file = write_config(tmp_path, text)
    with pytest.raises(SettingsError) as caught:
        load(file, env)
    for problem in caught.value.problems:
        assert str(problem) in str(caught.value)
    return list(caught.value.problems)


def test_load_without_file_uses_defaults() -> None:
    config = load().config
    assert (config.helper.host, config.helper.port) == ("127.0.0.1", 8090)
    assert config.chain_nodes == ()
    with pytest.raises(ConfigError, match="no node is configured"):
        config.require_nodes()
    assert config.db_path == Path("svote-helper.db")
    assert config.socket_path == Path("helper.sock")
    assert config.helper.max_attempts == 5
    assert (config.chain.stale_seconds, config.chain.clock_skew_seconds) == (90, 120)
    assert config.proof_slots >= 1


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("s3.endpoint", "", ""),
        ("s3.endpoint", "https://s3.example.org/", "https://s3.example.org"),
        ("s3.endpoint", "http://127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("s3.endpoint", "http://[::1]:5000", "http://[::1]:5000"),
        ("s3.endpoint", "http://localhost", "http://localhost"),
        ("server.unix_socket", "/run/svote-helper/wallets.sock", "/run/svote-helper/wallets.sock"),
        ("server.onion_address", "a2" * 28 + ".onion", "a2" * 28 + ".onion"),
        ("server.tor_socks", "unix:/run/tor/socks", "unix:/run/tor/socks"),
        ("server.tor_socks", "127.0.0.1:9050", "127.0.0.1:9050"),
        ("archive.place", "s3://votes/proofs/", "s3://votes/proofs"),
    ],
)
def test_load_valid_text_is_accepted(tmp_path: Path, name: str, text: str, value: str) -> None:
    section, key = name.split(".")
    config = load(write_config(tmp_path, f'[{section}]\n{key} = "{text}"\n')).config
    assert getattr(getattr(config, section), key) == value


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("s3.endpoint", '"http://s3.example.org"', ""),
        ("s3.endpoint", '"http://10.0.0.1"', ""),
        ("s3.endpoint", '"http://127.0.0.1.example.org"', ""),
        ("s3.endpoint", '"s3.example.org"', ""),
        ("server.unix_socket", '"wallets.sock"', ""),
        ("server.unix_socket", f'"/{"x" * 107}"', ""),
        ("server.onion_address", f'"{"a1" * 28}.onion"', ""),
        ("server.onion_address", f'"http://{"a2" * 28}.onion"', ""),
        ("server.tor_socks", '"unix:socks"', ""),
        ("server.tor_socks", '"9050"', ""),
        ("server.tor_socks", '""', ""),
        ("archive.place", '"https://votes"', "s3://bucket/path"),
        ("helper.port", "65536", ""),
        ("helper.port", "-1", ""),
        ("helper.db_path", '""', ""),
        ("helper.api_token", '" x"', ""),
        ("helper.api_token", '"a\\nb"', ""),
        ("helper.max_concurrent_proofs", "1.0", ""),
        ("helper.purge_after_hours", "-1", ""),
        ("helper.purge_after_hours", "inf", ""),
        ("helper.sentry_dsn", '"x"', ""),
        ("helper.trusted_proxies", '["proxy.example"]', ""),
        ("helper.trusted_proxies", '["10.0.0.1/8"]', ""),
        ("admin.config_url", '"https://a.example/x.json?checksum=sha256:AB"', "64 lower-case hexadecimal digits"),
        ("chain.clock_skew_seconds", "121", "must be less than or equal to 120"),
        ("chain.endpoints", '"http://a:1"', "must be a list"),
    ],
)
def test_load_invalid_value_is_refused(tmp_path: Path, name: str, value: str, message: str) -> None:
    section, key = name.split(".")
    (problem,) = load_problems(tmp_path, f"[{section}]\n{key} = {value}\n")
    assert (problem.line, problem.key) == (2, name)
    assert message in problem.message


def test_load_original_helper_file_keeps_its_meaning(tmp_path: Path) -> None:
    file = write_config(
        tmp_path,
        """
        [helper]
        disable = true
        api_token = "secret"
        expose_queue_status = true
        db_path = "/var/lib/helper.db"
        chain_api_port = 1317
        max_concurrent_proofs = 3
        sentry_dsn = "https://key@sentry.example/1"
        [admin]
        disable = true
        config_url = "https://example.org/voting-config.json"
        db_path = "admin.db"
        [ui]
        enable = true
        dist_path = "ui/dist"
        """,
    )
    config = load(file).config
    assert config.helper.disable
    assert config.chain_nodes == (("http://127.0.0.1:1317", ""),)
    assert config.proof_slots == 3
    assert config.socket_path == Path("/var/lib/helper.sock")
    assert config.admin.config_url == "https://example.org/voting-config.json"


def test_endpoints_default_to_local_port_and_are_unique(tmp_path: Path) -> None:
    file = write_config(
        tmp_path,
        '[helper]\nchain_api_port = 1317\n[chain]\nendpoints = ["http://a:1/", "http://127.0.0.1:1317", "http://a:1"]',
    )
    assert load(file).config.chain_endpoints == ("http://127.0.0.1:1317", "http://a:1")


@pytest.mark.parametrize(
    ("port", "endpoints", "rpc", "nodes"),
    [
        (0, ["http://a:1", "http://b:1"], ["http://a:2", "http://b:2"], [("a:1", "a:2"), ("b:1", "b:2")]),
        (7, ["http://b:1"], ["http://b:2"], [("127.0.0.1:7", ""), ("b:1", "b:2")]),
        (0, ["http://a:1", "http://b:1"], ["", "http://b:2"], [("a:1", ""), ("b:1", "b:2")]),
        (0, ["http://a:1", "http://b:1"], ["http://a:2"], [("a:1", "a:2"), ("b:1", "")]),
        (
            7,
            ["http://a:1", "http://127.0.0.1:7", "http://a:1", "http://b:1"],
            ["", "http://l:2", "http://a:2", "http://b:2"],
            [("127.0.0.1:7", "l:2"), ("a:1", "a:2"), ("b:1", "b:2")],
        ),
        (7, [], [], [("127.0.0.1:7", "")]),
    ],
)
def test_rpc_addresses_match_endpoints_by_position(
    port: int, endpoints: list[str], rpc: list[str], nodes: list[tuple[str, str]]
) -> None:
    config = Config.model_validate({"helper": {"chain_api_port": port}, "chain": {"endpoints": endpoints, "rpc": rpc}})
    bare = [(rest.removeprefix("http://"), node.removeprefix("http://")) for rest, node in config.chain_nodes]
    assert bare == nodes
    assert config.chain_endpoints == tuple(rest for rest, _ in config.chain_nodes)


def test_rpc_address_without_endpoint_is_reported_with_other_problems(tmp_path: Path) -> None:
    text = '[helper]\nport = -1\n[chain]\nendpoints = ["http://b:1"]\nrpc = ["http://b:2", "http://x:2"]\n'
    problems = {(p.line, p.key): p.message for p in load_problems(tmp_path, text)}
    assert problems == {
        (2, "helper.port"): "must be greater than or equal to 0",
        (5, "chain.rpc"): "has 2 entries, more than endpoints (1)",
    }
    (problem,) = load_problems(tmp_path, '[helper]\nchain_api_port = 1\n[chain]\nrpc = ["http://b:2"]\n')
    assert problem.key == "chain.rpc"


def test_flags_override_environment_and_environment_overrides_file(tmp_path: Path) -> None:
    file = write_config(tmp_path, '\n[helper]\nport = 1\nhost = "a"\ndb_path = "x.db"\n')
    loaded = load(
        file,
        {"SVOTE_HELPER_HELPER_PORT": "2", "SVOTE_HELPER_HELPER_HOST": "b", "PATH": "/bin"},
        {"helper.port": 3, "helper.max_attempts": None},
    )
    settings = loaded.config.helper
    assert (settings.port, settings.host, settings.db_path, settings.max_attempts) == (3, "b", "x.db", 5)
    origins = {name: str(loaded.origins[f"helper.{name}"]) for name in ("port", "host", "db_path", "max_attempts")}
    assert origins == {
        "port": "flag helper.port",
        "host": "env SVOTE_HELPER_HELPER_HOST",
        "db_path": f"{file}:5",
        "max_attempts": "default",
    }
    assert loaded.origins.keys() == SETTINGS.keys()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("CHAIN_ENDPOINTS", "http://a:1, http://b:2/ ,", ("http://a:1", "http://b:2")),
        ("CHAIN_ENDPOINTS", "", ()),
        ("CHAIN_RPC", "", ()),
        ("CHAIN_POLL_SECONDS", "0.5", 0.5),
        ("HELPER_EXPOSE_QUEUE_STATUS", "True", True),
        ("HELPER_EXPOSE_QUEUE_STATUS", "0", False),
        ("HELPER_API_TOKEN", "", ""),
        ("PROVER_CIRCUIT", "k11", "k11"),
        ("HELPER_TRUSTED_PROXIES", "10.0.0.0/8, ::1", ("10.0.0.0/8", "::1")),
    ],
)
def test_environment_accepts_every_type(name: str, text: str, value: Any) -> None:
    config = load(None, {ENV_PREFIX + name: text}).config
    section, _, key = name.lower().partition("_")
    assert getattr(getattr(config, section), key) == value


def test_environment_can_omit_rpc_of_a_node() -> None:
    env = {"SVOTE_HELPER_CHAIN_ENDPOINTS": "http://a:1,http://b:1", "SVOTE_HELPER_CHAIN_RPC": ", http://b:2,"}
    assert load(None, env).config.chain_nodes == (("http://a:1", ""), ("http://b:1", "http://b:2"))


def test_every_setting_has_its_own_variable() -> None:
    names = [variable_name(setting) for setting in SETTINGS]
    assert len(set(names)) == len(names)


def test_load_reports_all_problems_with_line_key_and_suggestion(tmp_path: Path) -> None:
    text = """\
port = 8090
[helper]
prot = 3
host = ["a",
  "port = 3"]
"port" = true
max_attempts = 0
api_token = 5

[chian]
endpoints = []
[chain]
endpoints = ["ftp://x", 4, "http://ok:1", "http://x?y=1"]
poll_seconds = nan
stale_second = 1
[prover]
circuit = "k12"
max_attempts = 4
[ui]
enable = "yes"
[log]
level.x = 1
"""
    env = {
        "SVOTE_HELPER_HELPER_PROT": "1",
        "SVOTE_HELPER_HELPER_DISABLE": "maybe",
        "SVOTE_HELPER_HELPER_EXPOSE_QUEUE_STATUS": "2",
        "SVOTE_HELPER_CONFIG": "x",
    }
    problems = {(p.line, p.key): p for p in load_problems(tmp_path, text, env)}
    messages = {place: (p.message, p.nearest) for place, p in problems.items()}
    assert messages[1, "port"] == ("must be inside a section", "[helper] port")
    assert messages[3, "helper.prot"] == ("unknown key", "helper.port")
    assert messages[4, "helper.host"] == ("must be a valid string", None)
    assert messages[6, "helper.port"] == ("must be a valid integer", None)
    assert messages[7, "helper.max_attempts"] == ("must be greater than or equal to 1", None)
    assert messages[8, "helper.api_token"] == ("must be a valid string", None)
    assert messages[10, "chian"] == ("unknown section", "[chain]")
    assert (13, "chain.endpoints") in messages
    assert messages[14, "chain.poll_seconds"] == ("must be a finite number", None)
    assert messages[15, "chain.stale_second"] == ("unknown key", "chain.stale_seconds")
    assert messages[17, "prover.circuit"] == ("must be 'auto', 'k10' or 'k11'", None)
    assert messages[18, "prover.max_attempts"] == ("unknown key", "helper.max_attempts")
    assert messages[20, "ui.enable"] == ("must be a valid boolean", None)
    assert messages[22, "log.level"][0].startswith("must be 'debug', ")
    assert messages[None, "SVOTE_HELPER_HELPER_PROT"] == ("unknown variable", "SVOTE_HELPER_HELPER_PORT")
    with pytest.raises(SettingsError, match=r"SVOTE_HELPER_FOO: unknown variable$"):
        load(None, {"SVOTE_HELPER_FOO": "1"})
    assert messages[None, "helper.disable"] == ("must be true or false", None)
    assert messages[None, "helper.expose_queue_status"] == ("must be true or false", None)
    assert len(messages) == 17


def test_load_reports_each_invalid_address_of_list(tmp_path: Path) -> None:
    text = '[chain]\nendpoints = ["ftp://x", 4, "http://ok:1", "http://x?y=1", "http://[", "http://x:99999"]'
    entries = [problem.message.partition(":")[0] for problem in load_problems(tmp_path, text)]
    assert entries == ["entry 1", "entry 2", "entry 4", "entry 5", "entry 6"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[helper]\nport = \n", 2),
        ("[helper\n", 1),
        ("[helper]\nport = 1\nport = 2\n", 3),
        ('[helper]\nhost = "a\n', 2),
        ("[chain]\n\n\nendpoints = [", 4),
    ],
)
def test_load_invalid_toml_reports_line(tmp_path: Path, text: str, line: int) -> None:
    (problem,) = load_problems(tmp_path, text)
    assert problem.line == line
    assert problem.message.startswith("not valid TOML")


def test_load_missing_or_binary_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nothing\.toml: cannot be read"):
        load(tmp_path / "nothing.toml")
    file = tmp_path / "helper.toml"
    file.write_bytes(b'[helper]\nhost = "\xff"\n')
    with pytest.raises(SettingsError, match=r"helper\.toml:2: is not UTF-8"):
        load(file)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SettingsError, match=r"pipe: is a pipe"):
        load(tmp_path / "pipe")


def test_load_ignores_the_mark_at_the_beginning_of_a_file_from_windows(tmp_path: Path) -> None:
    file = tmp_path / "helper.toml"
    file.write_bytes(b"\xef\xbb\xbf[helper]\r\nport = 81\r\n")
    assert load(file).config.helper.port == 81


def test_load_unknown_flag_is_a_programming_error() -> None:
    with pytest.raises(KeyError):
        load(None, None, {"helper.prot": 1})


def test_find_config_searches_paths_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, by_env, local, etc = (tmp_path / name for name in ("named", "env", "here", "etc"))
    monkeypatch.setattr("helper.config.settings_file.DEFAULT_FILES", (local, etc))
    env = {"SVOTE_HELPER_CONFIG": str(by_env)}
    assert find_file(named, env) == named
    assert find_file(None, env) == by_env
    assert find_file(None, {}) is None
    etc.touch()
    assert find_file(None, {"SVOTE_HELPER_CONFIG": ""}) == etc
    local.touch()
    assert find_file(None, {}) == local


def test_line_lookup_finds_sections_and_keys() -> None:
    text = """\
helper.port = 1 # a = b
[ chain ]
rpc = [
  "own = true",
]
own = true
log = { level = "x" }
[[more]]
"""
    lines = find_key_lines(text)
    assert lines["helper.port"] == 1
    assert lines["chain"] == 2
    assert lines["chain.rpc"] == 3
    assert lines["chain.own"] == 6
    assert lines["more"] == 8


def test_example_file_equals_generated() -> None:
    assert EXAMPLE_FILE.read_text() == render_example(), "run `make docs`"


def test_example_file_has_every_key_at_default(tmp_path: Path) -> None:
    assert load(write_config(tmp_path, render_example())).config == Config()
    opened = re.sub(r"^#(?! )", "", render_example(), flags=re.MULTILINE)
    assert {section: set(keys) for section, keys in tomllib.loads(opened).items()} == {
        section: set(keys) for section, keys in SECTIONS.items()
    }
    assert load(write_config(tmp_path, opened)).config == Config()


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("helper.api_token", "secret", REDACTED),
        ("helper.api_token", "", ""),
        ("operator.token", "secret", REDACTED),
        ("helper.sentry_dsn", "https://secret@sentry.example/1", REDACTED),
        ("chain.endpoints", ("http://u:secret@h:1/secret", "http://h:2"), ["http://***@h:1/***", "http://h:2"]),
        ("admin.config_url", "https://h/x?key=secret", "https://h/x?***"),
        ("helper.port", 8090, 8090),
    ],
)
def test_config_repr_shows_no_secret(setting: str, value: Any, expected: Any) -> None:
    assert to_display_value(setting, value) == expected


def test_tokens_are_read_from_files(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("for wallets\nanother line\n")
    second.write_text("for operators")
    file = write_config(tmp_path, f'[helper]\napi_token_file = "{first}"\n')
    loaded = load(file, {"SVOTE_HELPER_OPERATOR_TOKEN_FILE": str(second)})
    assert loaded.config.helper.api_token == "for wallets"
    assert loaded.config.operator.token == "for operators"
    assert str(loaded.origins["helper.api_token"]) == str(first)
    assert str(loaded.origins["operator.token"]) == str(second)


def test_systemd_credentials_are_read(tmp_path: Path) -> None:
    directory = tmp_path / "credentials"
    directory.mkdir()
    env = {"CREDENTIALS_DIRECTORY": str(directory)}
    assert load(None, env).config == Config()
    (directory / "operator-token").write_text("credential\n")
    loaded = load(None, env)
    assert loaded.config.operator.token == "credential"
    assert str(loaded.origins["operator.token"]) == str(directory / "operator-token")
    # A configured value takes precedence, also when it is empty.
    assert load(write_config(tmp_path, '[operator]\ntoken = "mine"\n'), env).config.operator.token == "mine"
    assert load(write_config(tmp_path, '[operator]\ntoken = ""\n'), env).config.operator.token == ""
    named = tmp_path / "named"
    named.write_text("named")
    assert load(write_config(tmp_path, f'[operator]\ntoken_file = "{named}"\n'), env).config.operator.token == "named"


def test_systemd_credential_is_the_key_file(tmp_path: Path) -> None:
    directory = tmp_path / "credentials"
    directory.mkdir()
    env = {"CREDENTIALS_DIRECTORY": str(directory)}
    assert load(None, env).config.store.key_file == ""
    (directory / "store-key").write_text("ab" * 32)
    (directory / "s3-credentials").write_text("[default]")
    loaded = load(None, env)
    assert loaded.config.store.key_file == str(directory / "store-key")
    assert loaded.config.s3.credentials_file == str(directory / "s3-credentials")
    assert str(loaded.origins["store.key_file"]) == str(directory / "store-key")
    assert load(write_config(tmp_path, '[store]\nkey_file = "mine"\n'), env).config.store.key_file == "mine"
    assert load(write_config(tmp_path, '[store]\nkey_file = ""\n'), env).config.store.key_file == ""


def test_token_file_without_token_is_reported(tmp_path: Path) -> None:
    empty, bad, spaced = tmp_path / "empty", tmp_path / "bad", tmp_path / "spaced"
    empty.write_text("\n")
    bad.write_bytes(b"\xff\xfe")
    spaced.write_text(" hush \n")
    assert [
        str(problem).removeprefix(str(tmp_path))
        for text in ("none", "empty", "bad")
        for problem in load_problems(tmp_path, f'[operator]\ntoken_file = "{tmp_path / text}"\n')
    ] == [
        f"/helper.toml:2: operator.token_file: {tmp_path}/none cannot be read: No such file or directory",
        f"/helper.toml:2: operator.token_file: {tmp_path}/empty: the first line is empty, it must be the token",
        f"/helper.toml:2: operator.token_file: {tmp_path}/bad is not UTF-8",
    ]
    (problem,) = load_problems(tmp_path, f'[operator]\ntoken_file = "{spaced}"\n')
    assert problem.source == str(spaced)
    assert "must not begin or end with a space" in problem.message
    assert "hush" not in str(problem)
    (problem,) = load_problems(tmp_path, f'[operator]\ntoken = "hush"\ntoken_file = "{spaced}"\n')
    assert str(problem).endswith("operator.token_file: cannot be combined with token: remove one of them")
    (tmp_path / "operator-token").mkdir()
    (problem,) = load_problems(tmp_path, "", {"CREDENTIALS_DIRECTORY": str(tmp_path)})
    assert "operator-token cannot be read: Is a directory" in str(problem)


def test_load_conflicting_settings_are_reported_with_lines(tmp_path: Path) -> None:
    problems = load_problems(
        tmp_path, '[helper]\nrole = "prover"\n[sender]\nlease = "postgres"\nstandby = true\n[prover]\nnice = 3\n'
    )
    assert [(problem.line, problem.key) for problem in problems] == [
        (2, "helper.role"),
        (4, "sender.lease"),
        (5, "sender.standby"),
    ]
    problems = load_problems(tmp_path, '[prover]\nrelease_manifest = "release.json"\nrequire_verified = true\n')
    assert [str(problem).rpartition(": ")[2] for problem in problems] == ["requires [prover] allowed_signers"]
    text = '[helper]\ndb_path = "/var/lib/x/queue.db"\n[server]\nunix_socket = "/var/lib/x/helper.sock"\n'
    (problem,) = load_problems(tmp_path, text)
    assert problem.key == "server.unix_socket"
    assert "only for operators" in problem.message
    (problem,) = load_problems(tmp_path, '[helper]\nrole = "api"\n[store]\nurl = "postgresql://helper@db/helper"\n')
    assert str(problem).endswith("store.url: requires [store] key_file: secrets in a shared database must be encrypted")


def test_database_url_is_validated_and_may_be_in_a_file(tmp_path: Path) -> None:
    (problem,) = load_problems(tmp_path, '[store]\nurl = "mysql://db"\nkey_file = "keys"\n')
    assert "must be empty or a URL such as postgresql://" in str(problem)
    (problem,) = load_problems(tmp_path, '[store]\nurl = "hush@db"\nkey_file = "keys"\n')
    assert "hush" not in str(problem)
    problems = load_problems(tmp_path, f'[store]\nschema_name = "Public;"\nhost = "{"x" * 64}"\n')
    assert [problem.key for problem in problems] == ["store.schema_name", "store.host"]
    (tmp_path / "url").write_text("postgresql://helper:hush@db/helper\n")
    config = load(
        write_config(tmp_path, f'[helper]\nrole = "sender"\n[store]\nurl_file = "{tmp_path}/url"\nkey_file = "k"\n')
    ).config
    assert config.store.url.endswith("@db/helper")
    assert config.helper.role == "sender"
