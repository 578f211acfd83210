"""Exact partition of a chain: the smallest possible slowest stage."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from pipelane.errors import PartitionError

__all__ = ["chain_partition"]

_EPSILON = 1e-12


def chain_partition(
    costs: Sequence[float], stages: int, *, boundary: Sequence[float] = ()
) -> list[int]:
    """Cut a chain into consecutive stages so that the slowest stage is as fast as possible.

    A stage takes the sum of its layers' costs plus the cost of the boundary before it and of the
    boundary behind it. Among the best partitions the one with the least sum of squared stage
    times is taken, so that what is not the bottleneck is even too.

    Dynamic programme over (number of stages, first layers) with the recurrence
    ``best[k][j] = min over i of max(best[k-1][i], time(i, j))``. A greedy bisection over the
    bottleneck is wrong here, because with boundary costs a longer stage can be cheaper. Starts i
    are pruned where the compute alone of layers i..j exceeds the best value found.

    Args:
        costs: seconds per layer, >= 0.
        stages: number of stages, exactly; 1 to ``len(costs)``.
        boundary: seconds of sending (and of receiving) between layers i and i + 1,
            ``len(costs) - 1`` entries; free if empty.

    Returns:
        Layers per stage.

    Raises:
        PartitionError: impossible sizes or costs.
    """
    _check(costs, stages, boundary)
    n = len(costs)
    total = [0.0, *accumulate(costs)]
    edge = [0.0, *boundary, 0.0] if boundary else [0.0] * (n + 1)

    def time(i: int, j: int) -> float:
        return total[j] - total[i] + edge[i] + edge[j]

    best = _bottleneck(n, stages, total, edge)
    limit = best + _EPSILON * max(1.0, best)
    # Second pass: least sum of squares among the partitions within the bottleneck.
    score = [math.inf] * (n + 1)
    score[0] = 0.0
    back: list[list[int]] = []
    for k in range(1, stages + 1):
        following = [math.inf] * (n + 1)
        cut = [0] * (n + 1)
        for j in range(k, n - (stages - k) + 1):
            i = max(k - 1, bisect_left(total, total[j] - limit))
            least, where = math.inf, 0
            for start in range(i, j):
                if score[start] < math.inf:
                    seconds = time(start, j)
                    if seconds <= limit:
                        value = score[start] + seconds * seconds
                        if value < least:
                            least, where = value, start
            following[j], cut[j] = least, where
        score = following
        back.append(cut)
    sizes: list[int] = []
    end = n
    for cut in reversed(back):
        sizes.append(end - cut[end])
        end = cut[end]
    return sizes[::-1]


def _bottleneck(n: int, stages: int, total: Sequence[float], edge: Sequence[float]) -> float:
    """The smallest possible slowest stage, by the dynamic programme."""
    best = [math.inf] * (n + 1)
    best[0] = 0.0
    bound = _upper_bound(n, stages, total, edge)
    for k in range(1, stages + 1):
        following = [math.inf] * (n + 1)
        for j in range(k, n - (stages - k) + 1):
            least = bound
            end, behind = total[j], edge[j]
            # From the longest stage that may still be within the bound to the shortest.
            for i in range(max(k - 1, bisect_left(total, end - bound)), j):
                before = best[i]
                if before < least:
                    seconds = end - total[i] + edge[i] + behind
                    value = seconds if seconds > before else before
                    if value < least:
                        least = value
            following[j] = least
        best = following
    return min(best[n], bound)


def _upper_bound(n: int, stages: int, total: Sequence[float], edge: Sequence[float]) -> float:
    """The bottleneck of an even split by compute, a valid partition to prune against."""
    cuts = [0]
    for k in range(1, stages):
        wanted = bisect_left(total, total[n] * k / stages)
        cuts.append(min(max(wanted, cuts[-1] + 1), n - (stages - k)))
    cuts.append(n)
    return max(total[b] - total[a] + edge[a] + edge[b] for a, b in pairwise(cuts))


def _check(costs: Sequence[float], stages: int, boundary: Sequence[float]) -> None:
    if stages < 1:
        raise PartitionError(f"stages must be at least 1, got {stages}")
    if stages > len(costs):
        raise PartitionError(
            f"{stages} stages for {len(costs)} layers: every stage needs at least one; use at most "
            f"{len(costs)} stages"
        )
    if boundary and len(boundary) != len(costs) - 1:
        raise PartitionError(
            f"{len(boundary)} boundaries for {len(costs)} layers; expected {len(costs) - 1}"
        )
    for what, values in (("layer", costs), ("boundary", boundary)):
        for index, value in enumerate(values):
            if not (math.isfinite(value) and value >= 0):
                raise PartitionError(f"{what} {index}: cost must be finite and >= 0, got {value}")
