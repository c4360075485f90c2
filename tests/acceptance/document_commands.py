"""Parses the commands of docs/operations.md and runs them in a shell."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

PLACEHOLDER = "…"
TIMEOUT_SECONDS = 240.0
RETRY_SECONDS = 1.0
"""Interval between two attempts, in seconds. Each attempt takes CPU time from the helper's startup."""
_BLOCK = re.compile(r"<!-- (?P<kind>[a-z]+): (?P<name>[a-z0-9]+) -->\n```console\n(?P<text>.*?)```\n", re.DOTALL)


@dataclass(frozen=True, slots=True)
class DocumentedCommand:
    """A command and the output lines that the page shows."""

    command_line: str
    output_lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CommandBlock:
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
        places: replacements on this machine for names on the page.
        prefix: a command that runs the command appended to it, for example in a container.
        inside: path of the working directory for the commands, if it differs.
        read_journal: returns the log of what the commands start; a failure shows its end.
    """

    def __init__(
        self,
        directory: Path,
        env: Mapping[str, str],
        places: Mapping[str, str],
        *,
        prefix: Sequence[str] = (),
        inside: Path | None = None,
        read_journal: Callable[[], str] = str,
    ) -> None:
        self._directory = directory
        self._inside = inside or directory
        self._prefix = tuple(prefix)
        self._read_journal = read_journal
        self._env = dict(env)
        self._path_mapping = dict(places)
        longest_first = sorted(places, key=len, reverse=True)
        self._variable_names = re.compile("|".join(map(re.escape, longest_first)))
        (directory / ".variables").touch()

    def localize(self, text: str) -> str:
        """Replace the page's names with those of this machine."""
        if not self._path_mapping:
            return text
        return self._variable_names.sub(lambda match: self._path_mapping[match[0]], text)

    def run_command(self, command: DocumentedCommand) -> CommandResult:
        out, variables = self._directory / ".out", self._inside / ".variables"
        script = (
            f"set -a; . {variables}; set +a; cd {self._inside}\n{self.localize(command.command_line)}\n"
            f"code=$?; declare -p ROUND >{variables} 2>/dev/null; exit $code"
        )
        with out.open("wb") as file:
            completed = subprocess.run(
                [*self._prefix, "bash", "-c", script],
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
        words = [*self._prefix, *self.localize(command.command_line).split()]
        process = subprocess.Popen(
            words, env=self._env, cwd=self._directory, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        try:
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=TIMEOUT_SECONDS)

    def run_block(self, block: CommandBlock) -> None:
        """Run a block. Every command must succeed and print what the page shows."""
        self._run_until(block, succeeds=True, seconds=0)

    def repeat_until(self, block: CommandBlock, *, succeeds: bool) -> None:
        """Repeat a block until every command prints what the page shows and has the expected exit status."""
        self._run_until(block, succeeds=succeeds, seconds=TIMEOUT_SECONDS)

    def _run_until(self, block: CommandBlock, *, succeeds: bool, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for command in block.commands:
            while True:
                result = self.run_command(command)
                missing = self.first_missing_line(command, result)
                if missing is None and (result.exit_code == 0) == succeeds:
                    break
                reason = f"not printed: {missing}" if missing else f"exit status {result.exit_code}"
                failure = f"{command.command_line}\n{reason}\nit printed:\n{result.output}"
                assert time.monotonic() < deadline, f"{failure}\njournal:\n{self._read_journal()[-3000:]}"
                time.sleep(RETRY_SECONDS)

    def first_missing_line(self, command: DocumentedCommand, result: CommandResult) -> str | None:
        """Return the first expected line that is missing from the output, in order; None if all were printed."""
        lines = iter(result.output.splitlines())
        for expected in map(self.localize, command.output_lines):
            pattern = re.compile(".*".join(map(re.escape, expected.split(PLACEHOLDER))))
            if not any(pattern.fullmatch(line) for line in lines):
                return expected
        return None

    @contextmanager
    def run_in_background(self, block: CommandBlock) -> Iterator[None]:
        """Run the program of a block in the background. Yields when it listens."""
        (command,) = block.commands
        with self.start_background(command) as process:
            assert process.stdout is not None
            assert process.stdout.readline(), "the process exited during startup"
            yield


def run_page(shell: DocumentShell, blocks: Sequence[CommandBlock], *, skipped_faults: Sequence[str] = ()) -> None:
    """Run the page from installation to recovery: cause, see and repair each fault except the given ones."""
    by_name = {(block.kind, block.name): block for block in blocks}
    healthy = by_name["until", "healthy"]
    with ExitStack() as stack:
        for block in blocks:
            if block.kind == "background":
                stack.enter_context(shell.run_in_background(block))
            elif block.kind == "do":
                shell.run_block(block)
            elif block.kind == "until":
                shell.repeat_until(block, succeeds=True)
            elif block.kind == "cause" and block.name not in skipped_faults:
                shell.run_block(block)
                shell.repeat_until(by_name["see", block.name], succeeds=False)
                shell.run_block(by_name["fix", block.name])
                shell.repeat_until(healthy, succeeds=True)
