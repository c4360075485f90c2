"""The documents say of the commands what the commands say of themselves."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import jsonschema_rs
import pytest

from helper.cli.command_line import COMMANDS
from helper.cli.output import Exit
from scripts.cli_docs import DOCUMENT, ROOT, SCHEMAS, commands, has_json, help_of, json_schema, render
from tests.unit.cli.test_main import run

ALL = dict(commands())
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_document_is_that_of_these_commands() -> None:
    assert DOCUMENT.read_text() == render(), "run `make docs`"


def test_every_command_is_in_it() -> None:
    assert {path[0] for path in ALL} == set(COMMANDS)
    for code in Exit:
        assert re.search(rf"^\| {code.value} \|", DOCUMENT.read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_is_what_the_document_has(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(*path, "--help") == 0
    told = capsys.readouterr()
    assert told.out.strip() == help_of(path)
    assert f"```text\n{told.out.strip()}\n```" in DOCUMENT.read_text()
    assert told.err == ""


def test_each_machines_line_has_its_shape_documented() -> None:
    with_json = {json_schema(path).name for path, command in ALL.items() if has_json(command)}
    assert {path.name for path in SCHEMAS.glob("*.json")} == with_json, "a file in docs/schemas for each --json"
    for path in SCHEMAS.glob("*.json"):
        schema = json.loads(path.read_text())
        jsonschema_rs.Draft202012Validator(schema)
        jsonschema_rs.meta.validate(schema)
        assert schema["title"].startswith(f"svote-helper {path.stem.replace('-', ' ')}")


def named(document: Path) -> Iterator[list[str]]:
    """The command lines that a document names, as words; what is a placeholder is left in."""
    text = document.read_text().replace("\\\n", " ")
    for line in re.findall(r"svote-helper ((?:[a-z]|--)[^`#\n|<>)]*)", text):
        yield shlex.split(line.strip().rstrip(".,;:"), posix=False)


@pytest.mark.parametrize("document", WRITTEN, ids=lambda path: path.name)
def test_no_document_names_a_command_that_there_is_not(document: Path) -> None:
    for words in named(document):
        path = next((tuple(words[:size]) for size in (2, 1) if tuple(words[:size]) in ALL), None)
        if path is None:
            assert words[0] in COMMANDS, f"{document.name}: svote-helper {' '.join(words)}"
            continue
        options = {option for parameter in ALL[path].params for option in parameter.opts} | {"--help"}
        for word in words[len(path) :]:
            option = word.split("=")[0]
            assert not option.startswith("--") or option in options, f"{document.name}: {' '.join(words)}"


def test_the_readme_names_commands_at_all() -> None:
    told = {words[0] for words in named(ROOT / "README.md")}
    assert {"serve", "queue", "rounds", "doctor", "proof", "tx", "completion"} <= told
