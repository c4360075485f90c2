"""Exhaustive breadth-first search of the states that a set of functions can reach."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

S = TypeVar("S", bound=Hashable)
T = TypeVar("T")
Label = tuple[object, ...]


class BrokenPromiseError(AssertionError):
    """A reached state or a step breaks a promise. The text ends with the shortest way there."""


class Model(Protocol[S]):
    """What is searched: real functions of the product, driven by every choice of their environment."""

    def initial(self) -> S:
        """The first state."""

    def steps(self, state: S) -> Iterable[tuple[Label, S]]:
        """Every step from a state: a label that begins with the step's kind, and the state after it."""

    def check(self, state: S) -> None:
        """Raise `BrokenPromiseError` if the state breaks a promise."""


@dataclass(frozen=True)
class Exploration:
    """Size and cost of a search, and how often each kind of step led to a new state."""

    states: int
    steps: int
    seconds: float
    kinds: Counter[str]


def explore(model: Model[S]) -> Exploration:
    """Visit every reachable state.

    Raises:
        BrokenPromiseError: a promise is broken, with the shortest sequence of steps that breaks it.
    """
    started_at, first = time.perf_counter(), model.initial()
    cause: dict[S, tuple[S, Label] | None] = {first: None}
    queue, count, kinds = deque([first]), 0, Counter[str]()
    while queue:
        state = queue.popleft()
        try:
            model.check(state)
            for name, after in model.steps(state):
                count += 1
                if after not in cause:
                    cause[after] = (state, name)
                    kinds[str(name[0])] += 1
                    queue.append(after)
        except BrokenPromiseError as broken:
            way = [str(state)]
            while (step := cause[state]) is not None:
                state = step[0]
                way.append(" ".join(map(str, step[1])))
            raise BrokenPromiseError("\n".join([str(broken), *reversed(way)])) from None
    return Exploration(len(cause), count, time.perf_counter() - started_at, kinds)


def replace_at(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])
