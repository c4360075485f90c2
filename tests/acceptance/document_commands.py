"""The commands of docs/operations.md: read from the page, typed, and held to what the page says they print."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ANYTHING = "…"
PATIENCE = 240.0
_BLOCK = re.compile(r"<!-- (?P<kind>[a-z]+): (?P<name>[a-z0-9]+) -->\n```console\n(?P<text>.*?)```\n", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Command:
    """What is typed, and the lines that the page shows of what it prints."""

    typed: str
    printed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A block of commands with its mark."""

    kind: str
    name: str
    commands: tuple[Command, ...]


def blocks_of(page: Path) -> list[Block]:
    """Every marked block, in order; a console block without a mark is an error, as nobody would try it."""
    text = page.read_text()
    found = [Block(match["kind"], match["name"], _commands(match["text"])) for match in _BLOCK.finditer(text)]
    assert text.count("```console") == len(found), "a console block has no mark"
    return found


def _commands(text: str) -> tuple[Command, ...]:
    commands: list[Command] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            commands.append(Command(line[2:], ()))
        else:
            last = commands.pop()
            commands.append(Command(last.typed, (*last.printed, line)))
    return tuple(commands)


@dataclass(frozen=True, slots=True)
class Typed:
    """How a command ended: exit status, and all that it printed."""

    code: int
    out: str


class Shell:
    """One shell in which everything is typed: variables that a command sets are there for the next.

    Args:
        folder: where it works.
        env: its environment.
        places: what stands on this machine for what the page names.
    """

    def __init__(self, folder: Path, env: Mapping[str, str], places: Mapping[str, str]) -> None:
        self._folder = folder
        self._env = dict(env)
        self._places = dict(places)
        longest_first = sorted(places, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, longest_first)))
        self._kept = folder / ".variables"
        self._kept.touch()

    def here(self, text: str) -> str:
        """A text of the page with this machine's places."""
        return self._names.sub(lambda found: self._places[found[0]], text)

    def type(self, command: Command) -> Typed:
        """Type one command and wait for its end."""
        out = self._folder / ".out"
        script = (
            f"set -a; . {self._kept}; set +a; cd {self._folder}\n{self.here(command.typed)}\n"
            f"code=$?; declare -p ROUND >{self._kept} 2>/dev/null; exit $code"
        )
        with out.open("wb") as file:
            ended = subprocess.run(
                ["bash", "-c", script],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                timeout=PATIENCE,
                check=False,
            )
        return Typed(ended.returncode, out.read_text())

    @contextmanager
    def background(self, command: Command) -> Iterator[subprocess.Popen[bytes]]:
        """A command that goes on, until it is ended with SIGTERM; its output can be read."""
        words = self.here(command.typed).split()
        process = subprocess.Popen(
            words, env=self._env, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        try:
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=PATIENCE)

    def missing(self, command: Command, typed: Typed) -> str | None:
        """The first line of the page's that was not printed, each after the one before it; None when all were."""
        lines = iter(typed.out.splitlines())
        for expected in map(self.here, command.printed):
            pattern = re.compile(".*".join(map(re.escape, expected.split(ANYTHING))))
            if not any(pattern.fullmatch(line) for line in lines):
                return expected
        return None
