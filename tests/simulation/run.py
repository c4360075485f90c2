"""Runs one seed in an environment without threads, system randomness and slow hashing."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import secrets
import warnings
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any
from unittest.mock import patch

import anyio.to_thread
import structlog

import proofs
from tests.simulation.event_log import EventLog
from tests.simulation.fakes import SimTree, commitment
from tests.simulation.scenario import LiarPlan, Scenario, draw_liar, draw_scenario
from tests.simulation.virtual_loop import SimLoop, StuckError
from tests.simulation.world import World, seeded_random

UNEXPECTED_ERROR = re.compile(r"\w+(Error|Exception|Exit|Group)\(")
"""Start of a warning's reason that is the repr of an exception."""
MAX_THREAD_SECONDS = (0.0, 0.02, 0.5)
"""Maximum seconds that work in a thread takes; each seed has one of these. Work takes a random part of them."""


@dataclass
class SeedResult:
    """Result of a seed.

    Attributes:
        digest: hash of the complete run.
    """

    seed: int
    violations: list[str]
    digest: str
    virtual_seconds: float
    counts: dict[str, int]
    lines: list[str] = field(default_factory=list, repr=False)
    broken: dict[str, int] = field(default_factory=dict)


class _UnexpectedErrorProcessor:
    """Log processor that records unexpected exceptions as violations."""

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if event.get("exc_info") or UNEXPECTED_ERROR.match(str(event.get("reason"))):
            self._event_log.record_violation("an unexpected error", *map(str, event.values()))
        raise structlog.DropEvent


@contextmanager
def _never_awaited_ignored() -> Iterator[None]:
    """Ignore the warning about a task that was killed before its first step: its coroutine was never awaited."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        yield


@contextmanager
def patch_environment(seed: int, event_log: EventLog, *, verbose: bool = False) -> Iterator[None]:
    """Replace threads, system randomness, slow hashing and the log."""
    key_rng, thread_rng = seeded_random(seed, "keys"), seeded_random(seed, "threads")
    max_thread_seconds = thread_rng.choice(MAX_THREAD_SECONDS)

    async def run_inline(func: Any, *args: Any, **_options: Any) -> Any:
        await asyncio.sleep(thread_rng.random() * max_thread_seconds)
        return func(*args)

    def record_log_event(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event_log.record(
            "log", method, *(f"{key}={value}" for key, value in sorted(event.items()) if key != "exc_info")
        )
        return event

    previous_config = structlog.get_config()
    structlog.configure(
        processors=[record_log_event, _UnexpectedErrorProcessor(event_log)]
        if verbose
        else [_UnexpectedErrorProcessor(event_log)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if verbose else logging.WARNING),
        cache_logger_on_first_use=False,
    )
    try:
        with (
            patch.object(anyio.to_thread, "run_sync", run_inline),
            patch.object(secrets, "token_bytes", key_rng.randbytes),
            patch.object(secrets, "token_hex", lambda size: key_rng.randbytes(size).hex()),
            patch("helper.chain.commitment_trees.CommitmentTree", SimTree),
            patch.object(proofs, "vote_commitment", commitment),
            _never_awaited_ignored(),
        ):
            yield
    finally:
        structlog.configure(**previous_config)


def run_seed(seed: int, *, verbose: bool = False, liar: LiarPlan | None = None) -> SeedResult:
    """Run one seed.

    Args:
        verbose: whether the event log includes the service's own log.
        liar: lies of one node; None if the seed draws whether one lies.
    """
    with _garbage_collection_paused():
        return _simulate(seed, verbose=verbose, liar=liar)


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Disable garbage collection during a seed and collect its objects after it."""
    gc.disable()
    if not gc.get_freeze_count():
        gc.freeze()  # exempts the objects of before the first seed
    try:
        yield
    finally:
        with _never_awaited_ignored():
            gc.collect()
        gc.enable()


@contextmanager
def create_world(seed: int, plan: Scenario, *, verbose: bool = False) -> Iterator[World]:
    """Create the world of a scenario in its environment, and close it at the end."""
    world = World(seed, SimLoop(seeded_random(seed, "loop"), shuffled=plan.is_shuffled), plan)
    with patch_environment(seed, world.event_log, verbose=verbose):
        yield world
    world.disk.close()
    world.loop.close()


def _simulate(seed: int, *, verbose: bool, liar: LiarPlan | None) -> SeedResult:
    lines: list[str] = []
    violations: list[str] = []
    with create_world(seed, draw_scenario(seed, liar or draw_liar(seed)), verbose=verbose) as world:
        loop, event_log = world.loop, world.event_log
        try:
            loop.run_until_complete(world.run())
        except StuckError as error:
            violations.append(repr(error))
    for fault in loop.unhandled_errors:
        violations.append(f"an unhandled error: {fault.get('message')} {fault.get('exception')!r}")
    counts = dict(sorted(world.promise_checker.counts.items()))
    if violations or event_log.violations or verbose:
        lines = event_log.format_lines()
    digest = sha256(f"{event_log.digest} {loop.passes} {loop.time()}".encode()).hexdigest()
    violations += event_log.violations
    return SeedResult(seed, violations, digest, loop.time(), counts, lines, dict(event_log.broken))
