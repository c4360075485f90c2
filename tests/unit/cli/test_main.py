"""The command line: available commands, and exit codes of errors."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import typer

from helper.cli.conventions import emit_json
from helper.cli.main import COMMANDS, Command, load_function, main
from helper.cli.terminal import emit_table
from helper.errors import HelperError, UsageError
from tests.support.schemas import assert_conforms


def run_command(*arguments: str) -> int:
    """Return the exit code of a command line."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    code = caught.value.code
    assert isinstance(code, int) or code is None
    return code or 0


def read_json(capsys: pytest.CaptureFixture[str], schema: str | None = None) -> Any:
    """Return the JSON of a command, the only line on standard output; check it against this schema."""
    out = capsys.readouterr().out
    assert out.endswith("\n")
    assert out.count("\n") == 1
    result = json.loads(out)
    if schema is not None:
        assert_conforms(schema, result)
    return result


def read_last_json(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return the JSON of the last of several commands."""
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_of_group_lists_commands_whatever_follows(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("queue", option, "list") == 0
    assert "Show the state and history of a share" in capsys.readouterr().out


def test_no_arguments_prints_help_and_exits_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command() == 2
    assert "Usage" in "".join(capsys.readouterr())


def test_help_names_setting_of_each_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("serve", "--help") == 0
    assert "(default: [helper] host)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("queue", "list", "--nonsense"),
        ("config",),
        ("queue", "show"),
        ("devnet", "--rest-port", "99999"),
        ("devnet", "--rpc-port", "65535", "--extra-nodes", "1"),
    ],
)
def test_invalid_command_line_exits_usage(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(*arguments) == 2
    assert "Usage" in "".join(capsys.readouterr())


def test_unknown_command_suggests_none_and_help_says_how_to_pause(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("queue", "pause") == 2
    error = capsys.readouterr().err
    assert "No such command 'pause'." in error
    assert "svote-helper queue --help" in error
    assert "purge" not in error
    assert run_command("queue", "--help") == 0
    assert "To pause, stop the helper" in capsys.readouterr().out


@pytest.fixture
def plugin_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A command in its own module, which works without the modules of the others."""
    module = ModuleType("helper.cli.plugged")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    commands = {"plugged": Command(module.__name__, "run", "Run."), "group absent": Command("absent", "run", "Run.")}
    monkeypatch.setattr("helper.cli.main.COMMANDS", commands)
    monkeypatch.setattr("helper.cli.main.GROUPS", {"group": "A group."})
    return module


def test_command_runs_without_modules_of_others(plugin_module: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def echo(text: str) -> None:
        """Print a word."""
        typer.echo(text)

    vars(plugin_module)["run"] = echo
    assert run_command("plugged", "hello") == 0
    assert capsys.readouterr().out == "hello\n"
    assert run_command("group", "--help") == 0
    assert "absent  Run." in capsys.readouterr().out


def test_output_that_cannot_be_encoded_is_escaped(plugin_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        emit_table(("name",), [("Höhle",)])
        emit_json({"name": "Höhle"})

    vars(plugin_module)["run"] = run
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(output := BytesIO(), encoding="ascii"))
    assert run_command("plugged") == 0
    assert output.getvalue().splitlines() == [b"name", rb"H\xf6hle", rb'{"name":"H\u00f6hle"}']


def test_helper_error_prints_message_and_advice(plugin_module: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise HelperError("it does not work", advice="Do something.")

    vars(plugin_module)["run"] = broken
    assert run_command("plugged") == 1
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", "it does not work\nDo something.\n")


@pytest.mark.parametrize(("error", "code"), [(UsageError, 2), (ValueError, None)])
def test_only_errors_of_arguments_exit_usage(
    error: type[ValueError], code: int | None, plugin_module: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise error("limit is wrong")

    vars(plugin_module)["run"] = broken
    if code is None:
        with pytest.raises(ValueError, match="limit is wrong"):  # the interpreter prints it, and exits with 1
            main(["plugged"])
    else:
        assert run_command("plugged") == code
        assert capsys.readouterr().err == "limit is wrong\n"


@pytest.mark.parametrize(
    ("services", "name", "is_output_broken", "message"),
    [
        ("", "q.db", False, "cannot read file: [Errno 5] failed: 'q.db'\n"),
        ("run", "q.db", False, "cannot use file: [Errno 5] failed: 'q.db'\n"),
        ("", None, False, "cannot read file: [Errno 5] failed\n"),
        ("run", None, False, "cannot use file: [Errno 5] failed\n"),
        ("", None, True, "the output cannot be written: failed\n"),
    ],
)
def test_error_of_file_is_not_reported_as_one_of_the_output(
    services: str,
    name: str | None,
    is_output_broken: bool,
    message: str,
    plugin_module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "failed", name)

    def broken() -> None:
        if is_output_broken:
            monkeypatch.setattr("sys.stdout", Mock(flush=fail))
        fail()

    monkeypatch.setattr("helper.cli.main.SERVICES", {services})
    monkeypatch.setattr("helper.cli.main.discard_output", lambda: None)
    vars(plugin_module)["run"] = broken
    assert run_command("plugged") == 1
    assert capsys.readouterr().err == message


def test_interrupt_prints_no_traceback(plugin_module: ModuleType) -> None:
    def slow() -> None:
        raise KeyboardInterrupt

    vars(plugin_module)["run"] = slow
    assert run_command("plugged") == 130


def test_command_imports_no_other_command_and_no_native_code() -> None:
    """A short command must start fast, and work when another command's libraries are broken."""
    code = (
        "import sys\n"
        "from helper.cli.main import create_cli\n"
        "create_cli(['queue', 'list'])\n"
        "print([n for n in ('httpx', 'uvicorn', 'proofs', 'starlette', 'helper.cli.db') if n in sys.modules])"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout == "[]\n"


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_summary_begins_the_help_of_its_command(command: Command) -> None:
    assert " ".join((load_function(command).__doc__ or "").split()).startswith(command.summary)


@pytest.mark.parametrize(
    ("streams", "code", "error"),
    [
        ("<&- >&-", 0, "All shares are revealed in time."),
        ("> /dev/full", 1, "the output cannot be written: No space left on device"),
    ],
)
def test_closed_and_full_streams_cause_no_traceback(streams: str, code: int, error: str) -> None:
    command = f"{sys.executable} -m helper plan --voters 1 --proposals 1 --helpers 1 {streams}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    assert error in done.stderr
