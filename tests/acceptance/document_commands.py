"""Parses the commands of docs/operations.md and runs them in a shell."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PLACEHOLDER = "…"
TIMEOUT_SECONDS = 240.0
_BLOCK = re.compile(r"<!-- (?P<kind>[a-z]+): (?P<name>[a-z0-9]+) -->\n```console\n(?P<text>.*?)```\n", re.DOTALL)


@dataclass(frozen=True, slots=True)
class DocumentedCommand:
    """A command and the output lines that the page shows."""

    command_line: str
    output_lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CommandBlock:
    """A block of commands with its mark."""

    kind: str
    name: str
    commands: tuple[DocumentedCommand, ...]


def parse_blocks(page: Path) -> list[CommandBlock]:
    """Return all marked blocks in order. A console block without a mark is an error, because no test would run it."""
    text = page.read_text()
    blocks = [
        CommandBlock(match["kind"], match["name"], _parse_commands(match["text"])) for match in _BLOCK.finditer(text)
    ]
    assert text.count("```console") == len(blocks), "a console block has no marker"
    return blocks


def _parse_commands(text: str) -> tuple[DocumentedCommand, ...]:
    commands: list[DocumentedCommand] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            commands.append(DocumentedCommand(line[2:], ()))
        else:
            last = commands.pop()
            commands.append(DocumentedCommand(last.command_line, (*last.output_lines, line)))
    return tuple(commands)


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Exit status and output of a command."""

    exit_code: int
    output: str


class DocumentShell:
    """One shell for all commands, so that variables are preserved between them.

    Args:
        directory: working directory.
        env: environment.
        places: replacements on this machine for names on the page.
    """

    def __init__(self, directory: Path, env: Mapping[str, str], places: Mapping[str, str]) -> None:
        self._directory = directory
        self._env = dict(env)
        self._path_mapping = dict(places)
        longest_first = sorted(places, key=len, reverse=True)
        self._variable_names = re.compile("|".join(map(re.escape, longest_first)))
        self._variables = directory / ".variables"
        self._variables.touch()

    def localize(self, text: str) -> str:
        """Replace the page's names with those of this machine."""
        return self._variable_names.sub(lambda match: self._path_mapping[match[0]], text)

    def run_command(self, command: DocumentedCommand) -> CommandResult:
        """Run one command and wait for its end."""
        out = self._directory / ".out"
        script = (
            f"set -a; . {self._variables}; set +a; cd {self._directory}\n{self.localize(command.command_line)}\n"
            f"code=$?; declare -p ROUND >{self._variables} 2>/dev/null; exit $code"
        )
        with out.open("wb") as file:
            completed = subprocess.run(
                ["bash", "-c", script],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        return CommandResult(completed.returncode, out.read_text())

    @contextmanager
    def start_background(self, command: DocumentedCommand) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command in the background until it is terminated with SIGTERM. Its output can be read."""
        words = self.localize(command.command_line).split()
        process = subprocess.Popen(
            words, env=self._env, cwd=self._directory, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        try:
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=TIMEOUT_SECONDS)

    def first_missing_line(self, command: DocumentedCommand, result: CommandResult) -> str | None:
        """Return the first expected line that is missing from the output, in order; None if all were printed."""
        lines = iter(result.output.splitlines())
        for expected in map(self.localize, command.output_lines):
            pattern = re.compile(".*".join(map(re.escape, expected.split(PLACEHOLDER))))
            if not any(pattern.fullmatch(line) for line in lines):
                return expected
        return None
