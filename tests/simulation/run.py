"""Plays one seed: the world, and stand-ins for what a process has but no simulation may use."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import secrets
import time
import warnings
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any
from unittest.mock import patch

import anyio.to_thread
import structlog

from tests.simulation.event_log import Story
from tests.simulation.fakes import SimTree
from tests.simulation.scenario import draw
from tests.simulation.virtual_loop import SimLoop, StuckError
from tests.simulation.world import World, stream

UNEXPECTED = re.compile(r"\w+(Error|Exception|Exit|Group)\(")
"""How the reason of a warning begins that is an exception's repr."""


@dataclass
class Result:
    """What came of a seed.

    Attributes:
        broken: promises that were broken; none when all is well.
        digest: a hash of all that happened.
        virtual: seconds simulated.
        counts: how much happened.
    """

    seed: int
    broken: list[str]
    digest: str
    virtual: float
    wall: float
    counts: dict[str, int]
    lines: list[str] = field(default_factory=list, repr=False)


class _Unexpected:
    """A log processor: an exception that is none of the product's own is a broken promise."""

    def __init__(self, story: Story) -> None:
        self._story = story

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if event.get("exc_info") or UNEXPECTED.match(str(event.get("reason"))):
            self._story.fail("an unexpected error", *map(str, event.values()))
        raise structlog.DropEvent


@contextmanager
def stand_ins(seed: int, story: Story, *, verbose: bool = False) -> Iterator[None]:
    """In the place of threads, of the system's randomness, of slow hashing and of the log."""
    keys = stream(seed, "keys")

    async def inline(func: Any, *args: Any, **_options: Any) -> Any:
        await asyncio.sleep(0)
        return func(*args)

    def written(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        story.tell("log", method, *(f"{key}={value}" for key, value in sorted(event.items()) if key != "exc_info"))
        return event

    before = structlog.get_config()
    structlog.configure(
        processors=[written, _Unexpected(story)] if verbose else [_Unexpected(story)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if verbose else logging.WARNING),
        cache_logger_on_first_use=False,
    )
    try:
        with (
            patch.object(anyio.to_thread, "run_sync", inline),
            patch.object(secrets, "token_bytes", keys.randbytes),
            patch.object(secrets, "token_hex", lambda size: keys.randbytes(size).hex()),
            patch("helper.chain.round_tree.CommitmentTree", SimTree),
            patch("helper.chain.commitment_tree.CommitmentTree", SimTree),
        ):
            yield
    finally:
        structlog.configure(**before)


def run_seed(seed: int, *, verbose: bool = False) -> Result:
    """Play one seed.

    Args:
        seed: everything comes of it.
        verbose: the product's own log goes into the story.
    """
    with _swept():
        return _run(seed, verbose=verbose)


@contextmanager
def _swept() -> Iterator[None]:
    """Without the collector running in the midst; what a seed leaves is collected after it, and is nobody's business:
    a task that was killed before its first step leaves a coroutine that was never awaited.
    """
    gc.disable()
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            gc.collect()
        gc.enable()


def _run(seed: int, *, verbose: bool) -> Result:
    began = time.perf_counter()
    plan = draw(seed)
    loop = SimLoop(stream(seed, "loop"), shuffled=plan.shuffled)
    world = World(seed, loop, plan)
    lines: list[str] = []
    broken: list[str] = []
    with stand_ins(seed, world.story, verbose=verbose), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        try:
            loop.run_until_complete(world.run())
        except StuckError as error:
            broken.append(repr(error))
    for fault in loop.faults:
        broken.append(f"an error that nobody took: {fault.get('message')} {fault.get('exception')!r}")
    story = world.story
    counts = dict(sorted(world.judge.counts.items()))
    if broken or story.broken or verbose:
        lines = story.lines()
    traced = sha256(f"{story.digest} {loop.passes} {loop.time()}".encode()).hexdigest()
    world.disk.close()
    loop.close()
    broken += story.broken
    return Result(seed, broken, traced, loop.time(), time.perf_counter() - began, counts, lines)
