"""What a curious node reads out of its request log: rhythms, triggers, anchors."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from typing import Any

Entry = Mapping[str, Any]
Word = tuple[str, ...]

BEGINS = {"rest": "blocks", "rpc": "status"}
"""The route with which a look at a node begins, by port."""


def words(log: Iterable[Entry]) -> Counter[Word]:
    """The looks at the node: the routes asked from one beginning to the next, repeats in a row once, by port.

    A look that was cut at either end of the log is left out.
    """
    found: Counter[Word] = Counter()
    heard = sorted(log, key=lambda entry: float(entry["time"]))
    for port, begin in BEGINS.items():
        looks: list[list[str]] = []
        for route in (str(entry["route"]) for entry in heard if entry["port"] == port):
            if route == begin:
                looks.append([])
            if looks:
                looks[-1].append(route)
        found.update((port, *(route for route, _ in itertools.groupby(look))) for look in looks[:-1])
    return found


def kinds(log: Iterable[Entry]) -> Counter[Word]:
    """How often each kind of request came."""
    return Counter((str(entry["port"]), str(entry["method"]), str(entry["route"])) for entry in log)


def after_posts(times: Sequence[float], posts: Sequence[float], begin: float, end: float, window: float) -> float:
    """By how many standard deviations there are more requests shortly after a POST than chance would bring there.

    Args:
        times: of the requests, unix seconds.
        posts: of the POSTs, in order.
        begin: of the span.
        end: of the span.
        window: seconds after a POST that count as shortly after it.
    """
    inside = [time for time in times if begin <= time < end]
    covered, until = 0.0, begin
    for post in posts:
        covered += max(0.0, min(post + window, end) - max(post, until))
        until = max(until, post + window)
    near = sum(_last(posts, time) <= time < _last(posts, time) + window for time in inside)
    share = covered / (end - begin)
    return (near - len(inside) * share) / sqrt(max(1.0, len(inside) * share * (1 - share)))


def _last(posts: Sequence[float], time: float) -> float:
    """The last POST up to a time, long ago when there was none."""
    place = bisect_right(posts, time)
    return posts[place - 1] if place else float("-inf")


def staleness(anchor: int, sent: float, roots: Mapping[int, float], asked: Sequence[float]) -> float:
    """How long the helper had been told of a newer root than its reveal's when it sent the reveal, in seconds.

    Args:
        anchor: the height of the root that the reveal was made against.
        sent: when the node heard the reveal.
        roots: the time of the block with each root, by height.
        asked: when the helper asked the node for its newest root, in order.

    Returns:
        Nought or less when it knew of none.
    """
    newer = [time for height, time in roots.items() if height > anchor]
    if not newer:
        return 0.0
    place = bisect_right(asked, min(newer))
    return sent - asked[place] if place < len(asked) else 0.0
