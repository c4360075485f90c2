"""Commands and options in the documents match the program's help."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import jsonschema_rs
import pytest

from helper.cli.conventions import ExitCode
from helper.cli.main import COMMANDS, GROUPS
from scripts.cli_docs import (
    DOCUMENT,
    ROOT,
    SCHEMAS,
    has_json,
    json_schema_path,
    list_commands,
    render_document,
    render_help,
)
from scripts.json_schemas import render_schemas
from tests.unit.cli.test_main import run_command

COMMAND_TREE = dict(list_commands())
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_cli_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == render_document(), "run `make docs`"


def test_generated_json_schemas_are_up_to_date() -> None:
    for name, text in render_schemas().items():
        assert (SCHEMAS / f"{name}.json").read_text() == text, "run `make docs`"


def test_cli_document_contains_every_command() -> None:
    assert {" ".join(path) for path in COMMAND_TREE} == set(COMMANDS)
    for code in ExitCode:
        assert re.search(rf"^\| {code.value} \|", DOCUMENT.read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", COMMAND_TREE, ids=" ".join)
def test_cli_document_contains_help_text(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run_command(*path, "--help") == 0
    output = capsys.readouterr()
    assert output.out.strip() == render_help(path)
    assert f"```text\n{output.out.strip()}\n```" in DOCUMENT.read_text()
    assert output.err == ""


def test_cli_document_contains_every_json_schema() -> None:
    with_json = {json_schema_path(path).name for path, command in COMMAND_TREE.items() if has_json(command)}
    assert {path.name for path in SCHEMAS.glob("*.json")} == with_json, "a file in docs/schemas for each --json"
    for path in SCHEMAS.glob("*.json"):
        schema = json.loads(path.read_text())
        jsonschema_rs.Draft202012Validator(schema)
        jsonschema_rs.meta.validate(schema)
        assert schema["title"].startswith(f"svote-helper {path.stem.replace('-', ' ')}")


def find_named_commands(document: Path) -> Iterator[list[str]]:
    """The command lines in a document, as words, with placeholders."""
    text = document.read_text().replace("\\\n", " ")
    for line in re.findall(r"svote-helper ((?:[a-z]|--)[^`#\n|<>)]*)", text):
        yield shlex.split(line.strip().rstrip(".,;:"), posix=False)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_only_existing_commands(document: Path) -> None:
    for words in find_named_commands(document):
        path = next((tuple(words[:size]) for size in (2, 1) if tuple(words[:size]) in COMMAND_TREE), None)
        if path is None:
            assert words[0] in {*COMMANDS, *GROUPS}, f"{document.name}: svote-helper {' '.join(words)}"
            continue
        options = {option for parameter in COMMAND_TREE[path].params for option in parameter.opts} | {"--help"}
        for word in words[len(path) :]:
            option = word.split("=")[0]
            assert not option.startswith("--") or option in options, f"{document.name}: {' '.join(words)}"


def test_readme_names_commands() -> None:
    named = {words[0] for words in find_named_commands(ROOT / "README.md")}
    assert {"serve", "queue", "rounds", "doctor", "proof", "tx", "completion"} <= named
