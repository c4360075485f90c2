"""`config init`, `show` and `validate`."""

from __future__ import annotations

import errno
import json
import os
import stat
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from helper.chain.node_pool import create_nodes
from helper.clock import SystemClock
from helper.config.loader import load
from helper.config.sections import Config
from helper.store.sqlite.file_lock import AGE_HEADER
from helper.store.sqlite.opening import DATABASE_HEADER
from tests.support.clock import FakeClock
from tests.unit.chain.fakes import FakeNetwork, FakeNode
from tests.unit.cli.test_main import read_json, run_command


def test_init_writes_defaults_and_private_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("config", "init") == 0
    written = Path("helper.toml")
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    config = load(written).config
    assert config.model_copy(update={"operator": Config().operator, "helper": Config().helper}) == Config()
    assert config.db_path == Path.cwd() / "svote-helper.db", "a start in another directory finds the same queue"
    assert len(config.operator.token) >= 43
    assert len([line for line in written.read_text().splitlines() if line and line[0] not in "#["]) == 2
    output = capsys.readouterr()
    next_step = "Next: set [chain] endpoints in it, then run `svote-helper config validate helper.toml`."
    assert (output.out, output.err) == ("", f"wrote helper.toml\n{next_step}\n")
    assert run_command("config", "init", "--output", "other.toml") == 0
    assert load(Path("other.toml")).config.operator.token != config.operator.token


def test_init_applies_setup_options(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = ["--endpoint", "http://a:1317", "--endpoint", "http://b:1317", "--rpc", "http://a:26657"]
    assert run_command("config", "init", *nodes, "--db", "queue.db", "--json") == 0
    result = read_json(capsys)
    assert result == {
        "path": "helper.toml",
        "set": ["chain.endpoints", "chain.rpc", "helper.db_path", "operator.token"],
    }
    config = load(Path("helper.toml")).config
    assert config.chain_nodes == (("http://a:1317", "http://a:26657"), ("http://b:1317", ""))
    assert config.db_path == Path.cwd() / "queue.db"


def test_init_in_deleted_directory_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run_command("config", "init") == 5
    assert capsys.readouterr().err == "the working directory does not exist\n"


def test_init_with_invalid_values_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("config", "init", "--endpoint", "node:1317") == 2
    assert "chain.endpoints: entry 1: must be a URL" in capsys.readouterr().err
    assert not Path("helper.toml").exists()


def test_init_over_existing_file_requires_force(capsys: pytest.CaptureFixture[str]) -> None:
    existing = Path("mine.toml")
    existing.write_text("# mine\n[helper\n")
    existing.chmod(0o644)
    assert run_command("config", "init", "--output", "mine.toml") == 1
    assert existing.read_text() == "# mine\n[helper\n"
    assert "mine.toml already exists" in capsys.readouterr().err
    assert run_command("config", "init", "--output", "mine.toml", "--force") == 0
    assert load(existing).config.operator.token
    assert stat.S_IMODE(existing.stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [DATABASE_HEADER, AGE_HEADER, b"00" * 32, b'{"shares": []}'])
def test_init_replaces_only_settings(content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    other = Path("queue.db")
    other.write_bytes(content)
    assert run_command("config", "init", "--output", "queue.db", "--force") == 1
    assert "not a settings file" in capsys.readouterr().err
    assert other.read_bytes() == content


def test_init_on_full_disk_changes_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.posix_fallocate", refuse)
    Path("old.toml").write_text("[helper]\n")
    for name in ("old.toml", "new.toml"):
        assert run_command("config", "init", "--output", name, "--force") == 1
        assert "No space left" in capsys.readouterr().err
    assert Path("old.toml").read_text() == "[helper]\n"
    assert not Path("new.toml").exists()


def test_init_into_missing_directory_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("config", "init", "--output", "no/where.toml") == 1
    assert "cannot be written" in capsys.readouterr().err


def test_show_prints_effective_values_without_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("helper.toml").write_text('[helper]\napi_token = "hush"\nport = 1\n[operator]\ntoken = "hush"\n')
    monkeypatch.setenv("SVOTE_HELPER_CHAIN_ENDPOINTS", "http://me:hush@node:2")
    monkeypatch.setenv("SVOTE_HELPER_CHAIN_RPC", "http://me:hush@node:1")
    assert run_command("config", "show", "--json", "--origin") == 0
    result = read_json(capsys)
    assert result["path"] == "helper.toml"
    assert result["settings"]["helper"]["port"] == 1
    assert result["settings"]["chain"]["rpc"] == ["http://***@node:1"]
    assert result["origins"]["helper.port"] == "helper.toml:3"
    assert result["origins"]["chain.rpc"] == "env SVOTE_HELPER_CHAIN_RPC"
    assert result["origins"]["log.level"] == "default"
    assert "hush" not in json.dumps(result)
    assert run_command("config", "show", "--origin") == 0
    output = capsys.readouterr().out
    assert "port = 1  # helper.toml:3\n" in output
    assert "hush" not in output
    assert run_command("config", "show", "--json") == 0
    assert "origins" not in read_json(capsys)


def test_show_invalid_config_fails(capsys: pytest.CaptureFixture[str]) -> None:
    Path("helper.toml").write_text("[helper]\nprot = 1\n")
    assert run_command("config", "show") == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert "helper.toml:2: helper.prot: unknown key, did you mean helper.port?" in output.err
    assert "config validate" in output.err


def test_validate_reports_all_problems(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.toml").write_text("[helper]\nprot = 1\nport = true\n[chian]\n")
    assert run_command("config", "validate", "bad.toml") == 1
    assert capsys.readouterr().err.splitlines() == [
        "bad.toml:2: helper.prot: unknown key, did you mean helper.port?",
        "bad.toml:3: helper.port: must be a valid integer",
        "bad.toml:4: chian: unknown section, did you mean [chain]?",
    ]
    assert run_command("config", "validate", "--config", "bad.toml", "--json") == 1
    result = read_json(capsys)
    assert result["ok"] is False
    assert result["problems"][0] == {
        "source": "bad.toml",
        "line": 2,
        "key": "helper.prot",
        "message": "unknown key",
        "nearest": "helper.port",
    }


def test_validate_valid_config_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    Path("good.toml").write_text('[helper]\nport = 1\n[chain]\nendpoints = ["http://a:1"]\n')
    assert run_command("config", "validate", "good.toml") == 0
    assert capsys.readouterr().err == "good.toml: ok\n"
    assert run_command("config", "validate", "good.toml", "--json") == 0
    assert read_json(capsys) == {"ok": True, "problems": []}


def test_validate_node_listed_twice_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """The start refuses it: a node would confirm its own reports."""
    Path("helper.toml").write_text(
        '[chain]\nendpoints = ["http://a:1317", "http://b:1317"]\nrpc = ["http://a", "http://a"]\n'
    )
    assert run_command("config", "validate", "helper.toml") == 1
    assert "a node is listed twice: [chain] rpc" in capsys.readouterr().err


def test_validate_missing_file_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("config", "validate", "nothing.toml") == 1
    assert "nothing.toml: cannot be read: No such file or directory" in capsys.readouterr().err


def stub_nodes(monkeypatch: pytest.MonkeyPatch, *, responding: str, silent: str = "") -> None:
    """Configure nodes with these names of one letter each."""
    clock = SystemClock()
    network = FakeNetwork(**{name: FakeNode(cast(FakeClock, clock)) for name in responding})
    monkeypatch.setattr("helper.doctor.chain.create_nodes", partial(create_nodes, transport=network))
    monkeypatch.setenv("SVOTE_HELPER_CHAIN_ENDPOINTS", ",".join(f"http://{name}:1" for name in responding + silent))


def test_validate_online_reports_every_node(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stub_nodes(monkeypatch, responding="a")
    assert run_command("config", "validate", "--online") == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("ok    node a:1: chain svote-1, height 463")
    assert lines[-1] == "default settings: ok"

    stub_nodes(monkeypatch, responding="a", silent="b")
    assert run_command("config", "validate", "--online", "--json") == 3
    result = read_json(capsys)
    assert result["ok"] is False
    assert result["problems"] == []
    assert [(line["subject"], line["level"]) for line in result["online"]] == [
        ("node a:1", "ok"),
        ("node b:1", "warn"),
        ("chain", "ok"),
        ("clock", "ok"),
    ]

    stub_nodes(monkeypatch, responding="", silent="a")
    assert run_command("config", "validate", "--online") == 6
    text = capsys.readouterr().err
    assert "-> Check that the node is running" in text
    assert "settings: ok" not in text


def test_validate_online_invalid_config_queries_no_node(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.toml").write_text("[helper]\nprot = 1\n")
    assert run_command("config", "validate", "bad.toml", "--online", "--json") == 1
    assert read_json(capsys)["online"] == []
