"""What a curious node reads out of its request log: rhythms, triggers, anchors."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from typing import Any

LogEntry = Mapping[str, Any]
RequestGroup = tuple[str, ...]

GROUP_STARTS = {"rest": "blocks", "rpc": "status"}
"""The route with which a look at a node begins, by port."""


def count_request_groups(log: Iterable[LogEntry]) -> Counter[RequestGroup]:
    """The looks at the node: the routes asked from one beginning to the next, repeats in a row once, by port.

    A look that was cut at either end of the log is left out.
    """
    found: Counter[RequestGroup] = Counter()
    ordered = sorted(log, key=lambda entry: float(entry["time"]))
    for port, begin in GROUP_STARTS.items():
        groups: list[list[str]] = []
        for route in (str(entry["route"]) for entry in ordered if entry["port"] == port):
            if route == begin:
                groups.append([])
            if groups:
                groups[-1].append(route)
        found.update((port, *(route for route, _ in itertools.groupby(look))) for look in groups[:-1])
    return found


def count_request_kinds(log: Iterable[LogEntry]) -> Counter[RequestGroup]:
    """How often each kind of request came."""
    return Counter((str(entry["port"]), str(entry["method"]), str(entry["route"])) for entry in log)


def post_correlation(times: Sequence[float], posts: Sequence[float], begin: float, end: float, window: float) -> float:
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
    requests_near_posts = sum(
        _last_post_before(posts, time) <= time < _last_post_before(posts, time) + window for time in inside
    )
    share = covered / (end - begin)
    return (requests_near_posts - len(inside) * share) / sqrt(max(1.0, len(inside) * share * (1 - share)))


def _last_post_before(posts: Sequence[float], time: float) -> float:
    """The last POST up to a time, long ago when there was none."""
    place = bisect_right(posts, time)
    return posts[place - 1] if place else float("-inf")


def anchor_staleness(
    anchor_height: int, sent_at: float, root_times: Mapping[int, float], root_queries: Sequence[float]
) -> float:
    """How long the helper had been told of a newer root than its reveal's when it sent the reveal, in seconds.

    Args:
        anchor_height: the height of the root that the reveal was made against.
        sent_at: when the node heard the reveal.
        root_times: the time of the block with each root, by height.
        root_queries: when the helper asked the node for its newest root, in order.

    Returns:
        Nought or less when it knew of none.
    """
    newer = [time for height, time in root_times.items() if height > anchor_height]
    if not newer:
        return 0.0
    place = bisect_right(root_queries, min(newer))
    return sent_at - root_queries[place] if place < len(root_queries) else 0.0
