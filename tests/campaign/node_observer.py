"""Analysis of a node's request log: timing, triggers and anchors."""

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
"""The first route of a health check, by port."""


def count_request_groups(log: Iterable[LogEntry]) -> Counter[RequestGroup]:
    """Count request groups by port: the routes from one first route to the next, without immediate repeats.

    Groups cut off at either end of the log are omitted.
    """
    counts: Counter[RequestGroup] = Counter()
    ordered = sorted(log, key=lambda entry: float(entry["time"]))
    for port, first_route in GROUP_STARTS.items():
        groups: list[list[str]] = []
        for route in (str(entry["route"]) for entry in ordered if entry["port"] == port):
            if route == first_route:
                groups.append([])
            if groups:
                groups[-1].append(route)
        counts.update((port, *(route for route, _ in itertools.groupby(group))) for group in groups[:-1])
    return counts


def count_request_kinds(log: Iterable[LogEntry]) -> Counter[RequestGroup]:
    return Counter((str(entry["port"]), str(entry["method"]), str(entry["route"])) for entry in log)


def post_correlation(times: Sequence[float], posts: Sequence[float], start: float, end: float, window: float) -> float:
    """Return by how many standard deviations requests shortly after a POST exceed chance.

    Args:
        times: request times, Unix seconds.
        posts: times of the POSTs, in order.
        start: start of the span.
        end: end of the span.
        window: seconds after a POST that count as shortly after it.
    """
    in_span = [time for time in times if start <= time < end]
    covered, until = 0.0, start
    for post in posts:
        covered += max(0.0, min(post + window, end) - max(post, until))
        until = max(until, post + window)
    requests_near_posts = sum(
        _last_post_before(posts, time) <= time < _last_post_before(posts, time) + window for time in in_span
    )
    share = covered / (end - start)
    return (requests_near_posts - len(in_span) * share) / sqrt(max(1.0, len(in_span) * share * (1 - share)))


def _last_post_before(posts: Sequence[float], time: float) -> float:
    """Return the last POST up to a time, or a time long before if there was none."""
    index = bisect_right(posts, time)
    return posts[index - 1] if index else float("-inf")


def anchor_staleness(
    anchor_height: int, sent_at: float, root_times: Mapping[int, float], root_queries: Sequence[float]
) -> float:
    """Return the seconds for which a newer root was known when the helper sent a reveal.

    Args:
        anchor_height: height of the root that the reveal was made against.
        sent_at: when the node received the reveal.
        root_times: block time of each root, by height.
        root_queries: when the helper requested the node's newest root, in order.

    Returns:
        Zero or less if no newer root was known.
    """
    newer = [time for height, time in root_times.items() if height > anchor_height]
    if not newer:
        return 0.0
    index = bisect_right(root_queries, min(newer))
    return sent_at - root_queries[index] if index < len(root_queries) else 0.0
