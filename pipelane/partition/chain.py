"""Exact partition of a chain: the smallest possible slowest stage, then the most even one.

A stage that holds layers i, ..., j - 1 takes ``starts[i] + ends[j]`` seconds, where
``starts[i] = boundary before i - costs up to i`` and ``ends[j] = costs up to j + boundary at j``.
A greedy bisection over the bottleneck would be wrong: with boundary costs a longer stage can be
cheaper. Both dynamic programmes below use only that form, so that they need no window of likely
cuts and stay fast on very uneven chains: O(K n log n) and O(K n log n) for n layers, K stages.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from pipelane.errors import PartitionError

__all__ = ["chain_partition"]

#: Rounding of a stage's seconds, as a share of the whole chain's: ties within it are ties.
_ROUNDING = 1e-14

#: Ranges of cuts up to this size are searched pair by pair.
_SMALL = 12


def chain_partition(
    costs: Sequence[float],
    stages: int,
    *,
    boundary: Sequence[float] = (),
    at_most: bool = False,
) -> list[int]:
    """Cut a chain into consecutive stages so that the slowest stage is as fast as possible.

    A stage takes the sum of its layers' costs plus the cost of the boundary before it and of the
    boundary behind it. Among the best partitions the one with the least sum of squared stage
    times is taken, so that what is not the bottleneck is even too.

    Args:
        costs: seconds per layer, >= 0.
        stages: number of stages; 1 to ``len(costs)``, more with ``at_most``.
        boundary: seconds of sending (and of receiving) between layers i and i + 1,
            ``len(costs) - 1`` entries; free if empty.
        at_most: fewer stages are welcome where communication makes them faster; of equally fast
            numbers of stages the smallest is taken.

    Returns:
        Layers per stage.

    Raises:
        PartitionError: impossible sizes or costs.
    """
    _check(costs, stages, boundary, at_most)
    total = [0.0, *accumulate(costs)]
    edge = [0.0, *(boundary or [0.0] * (len(costs) - 1)), 0.0]
    starts = [e - t for e, t in zip(edge, total, strict=True)]
    ends = [e + t for e, t in zip(edge, total, strict=True)]
    slack = _ROUNDING * (total[-1] + 2 * max(edge)) * math.sqrt(len(costs))

    most = min(stages, len(costs))
    bottlenecks = _bottlenecks(starts, ends, most)
    if at_most:
        best = min(bottlenecks)
        stages = next(k for k, b in enumerate(bottlenecks, 1) if b <= best + slack)
    return _evenest(starts, ends, total, stages, bottlenecks[stages - 1] + slack)


def _bottlenecks(starts: Sequence[float], ends: Sequence[float], stages: int) -> list[float]:
    """The smallest possible slowest stage with exactly 1, 2, ..., ``stages`` stages.

    ``best[k][j] = min over i < j of max(best[k-1][i], starts[i] + ends[j])``, where ``best[k][j]``
    is for the first j layers in k stages. Of the cuts i only those are kept that no other cut
    beats in both ``best`` and ``starts``: sorted by the one they are sorted backwards by the
    other, so that the minimum is where the two terms cross, found by bisection.
    """
    n = len(starts) - 1
    before = [math.inf] * (n + 1)
    before[0] = 0.0
    found: list[float] = []
    for k in range(1, stages + 1):
        after = [math.inf] * (n + 1)
        bests: list[float] = []  # ascending
        fronts: list[float] = []  # starts, descending
        for j in range(k, n + 1):
            _insert(bests, fronts, before[j - 1], starts[j - 1])
            end = ends[j]
            low, high = 0, len(bests)
            while low < high:  # the first cut whose own bottleneck is not below the new stage
                middle = (low + high) // 2
                if bests[middle] < fronts[middle] + end:
                    low = middle + 1
                else:
                    high = middle
            value = bests[low] if low < len(bests) else math.inf
            if low:
                value = min(value, fronts[low - 1] + end)
            after[j] = value
        found.append(after[n])
        before = after
    return found


def _insert(bests: list[float], fronts: list[float], best: float, front: float) -> None:
    """Add a cut unless another is at least as good in both; drop those it makes useless."""
    at = bisect_left(bests, best)
    if at < len(bests) and bests[at] == best and fronts[at] <= front:
        return
    if at and fronts[at - 1] <= front:
        return
    end = at
    while end < len(bests) and fronts[end] >= front:
        end += 1
    bests[at:end] = [best]
    fronts[at:end] = [front]


class _Range:
    """A range of cuts, halved: each pair i < j with i left and j right is looked at once."""

    def __init__(self, low: int, high: int, starts: Sequence[float], ends: Sequence[float]) -> None:
        self.low, self.high = low, high
        self.halves: list[_Range] = []
        if high - low > _SMALL:
            middle = (low + high) // 2
            self.halves = [_Range(low, middle, starts, ends), _Range(middle, high, starts, ends)]
            self.left = sorted(range(low, middle), key=starts.__getitem__)
            self.right = sorted(range(middle, high), key=ends.__getitem__, reverse=True)


class _Evenness:
    """One step of the second programme: from k - 1 stages to k.

    ``after[j] = min over i < j of before[i] + (starts[i] + ends[j]) ** 2``, over the i whose stage
    is within ``limit``. Expanded, each i is a line in ``ends[j]`` with slope ``2 * starts[i]``, and
    the minimum is the lower envelope of the lines. With the left half sorted by ``starts`` and the
    right half by falling ``ends``, lines join in the order of their slopes as the limit allows
    more of them, and leave at the other end as they are overtaken: linear time (the monotone
    convex hull trick).
    """

    def __init__(self, starts: Sequence[float], ends: Sequence[float], limit: float) -> None:
        self.starts, self.ends, self.limit = starts, ends, limit
        self.tree = _Range(0, len(starts), starts, ends)

    def step(self, before: Sequence[float], first: int, last: int) -> tuple[list[float], list[int]]:
        """Scores and cuts of the ends ``first`` to ``last``; infinite elsewhere."""
        self.before = before
        self.first, self.last = first, last
        self.after = [math.inf] * len(before)
        self.cuts = [0] * len(before)
        self._visit(self.tree)
        return self.after, self.cuts

    def _visit(self, part: _Range) -> None:
        if part.high <= self.first or part.low > self.last:
            if part.low > self.last:
                return
            # Only ends are restricted: no end of interest lies in here.
            return
        if not part.halves:
            self._pairs(part.low, part.high)
            return
        for half in part.halves:
            self._visit(half)
        self._cross(part.left, part.right)

    def _pairs(self, low: int, high: int) -> None:
        for j in range(max(low + 1, self.first), min(high, self.last + 1)):
            for i in range(low, j):
                if self.before[i] < math.inf:
                    self._offer(i, j)

    def _offer(self, i: int, j: int) -> None:
        seconds = self.starts[i] + self.ends[j]
        if seconds <= self.limit:
            score = self.before[i] + seconds * seconds
            if score < self.after[j]:
                self.after[j], self.cuts[j] = score, i

    def _cross(self, left: Sequence[int], right: Sequence[int]) -> None:
        starts, before = self.starts, self.before
        lines: deque[tuple[float, float, int]] = deque()  # starts, height at 0, cut
        waiting = iter([i for i in left if before[i] < math.inf])
        i = next(waiting, None)
        for j in right:
            if i is None and not lines:
                return
            if not self.first <= j <= self.last:
                continue
            end = self.ends[j]
            while i is not None and starts[i] + end <= self.limit:
                _join(lines, starts[i], before[i] + starts[i] * starts[i], i)
                i = next(waiting, None)
            at = 2 * end
            while len(lines) > 1 and lines[1][0] * at + lines[1][1] <= lines[0][0] * at + lines[0][1]:
                lines.popleft()
            if lines:
                self._offer(lines[0][2], j)


def _join(lines: deque[tuple[float, float, int]], slope: float, height: float, cut: int) -> None:
    """Add a line with the largest slope so far to a lower envelope."""
    if lines and lines[-1][0] == slope:
        if lines[-1][1] <= height:
            return
        lines.pop()
    while len(lines) > 1:
        (s0, h0, _), (s1, h1, _) = lines[-2], lines[-1]
        # The middle one is nowhere lowest if the outer two cross where it is not below them.
        if (h1 - h0) * (slope - s1) < (height - h1) * (s1 - s0):
            break
        lines.pop()
    lines.append((slope, height, cut))
