"""Runs one coroutine function for many items with limited concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from helper.errors import HelperError

T = TypeVar("T")
R = TypeVar("R")


async def gather_limited(items: Sequence[T], work: Callable[[T], Awaitable[R]], limit: int) -> list[R]:
    """Call `work` for every item, at most `limit` calls concurrently. Returns the results in the order of the items.

    Raises:
        HelperError: the first error, after all calls in progress have ended; no call starts after an error.
    """
    results: dict[int, R] = {}
    errors: list[HelperError] = []
    slots = asyncio.Semaphore(limit)

    async def run(number: int, item: T) -> None:
        async with slots:
            if errors:
                return
            try:
                results[number] = await work(item)
            except HelperError as error:
                errors.append(error)

    async with asyncio.TaskGroup() as group:
        for number, item in enumerate(items):
            group.create_task(run(number, item))
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(items))]
