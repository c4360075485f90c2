"""The same work for each of many things, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from helper.errors import HelperError

T = TypeVar("T")
R = TypeVar("R")


async def gather_limited(items: Sequence[T], work: Callable[[T], Awaitable[R]], at_once: int) -> list[R]:
    """Do the same with every item, some at once; what came of each, in their order.

    Raises:
        HelperError: the first trouble, when what was begun has ended; what was not begun by then is not done.
    """
    done: dict[int, R] = {}
    troubles: list[HelperError] = []
    slots = asyncio.Semaphore(at_once)

    async def one(number: int, item: T) -> None:
        async with slots:
            if troubles:
                return
            try:
                done[number] = await work(item)
            except HelperError as error:
                troubles.append(error)

    async with asyncio.TaskGroup() as group:
        for number, item in enumerate(items):
            group.create_task(one(number, item))
    if troubles:
        raise troubles[0]
    return [done[number] for number in range(len(items))]
