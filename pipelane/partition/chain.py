"""Exact partition of a chain: the smallest possible slowest stage, then the most even one.

A stage that holds layers i, ..., j - 1 takes ``starts[i] + ends[j]`` seconds, where
``starts[i] = boundary before i - costs up to i`` and ``ends[j] = costs up to j + boundary at j``.
A greedy bisection over the bottleneck would be wrong: with boundary costs a longer stage can be
cheaper. Both dynamic programmes below use only that form, so that they need no window of likely
cuts and stay fast on very uneven chains: both take O(K n log n) for n layers and K stages.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from pipelane.errors import PartitionError

__all__ = ["chain_partition"]

#: Rounding of a sum, per term and as a share of the sum: stage times that differ by no more tie.
_ROUNDING = 2.0**-52

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
    bottlenecks = _bottlenecks(starts, ends, min(stages, len(costs)))
    best = min(bottlenecks) if at_most else bottlenecks[-1]
    limit = best + _ROUNDING * len(costs) * (total[-1] + best)
    if at_most:
        stages = next(k for k, found in enumerate(bottlenecks, 1) if found <= limit)
    return _evenest(starts, ends, total, stages, limit)


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


def _evenest(
    starts: Sequence[float],
    ends: Sequence[float],
    total: Sequence[float],
    stages: int,
    limit: float,
) -> list[int]:
    """Layers per stage: the least sum of squares with no stage above ``limit``."""
    n = len(starts) - 1
    most = limit * (1 + 1e-9)  # not to lose a cut to rounding
    search = _Evenness(starts, ends, limit)
    scores = [math.inf] * (n + 1)
    scores[0] = 0.0
    alive = range(1)
    steps: list[list[int]] = []
    for k in range(1, stages + 1):
        # What is left behind the cut must fit into the stages that are left, and each needs one.
        first = max(k, bisect_left(total, total[n] - (stages - k) * most))
        last = min(n - (stages - k), bisect_right(total, k * most) - 1)
        ahead = range(first, last + 1)
        scores, cuts = search.step(scores, alive, ahead)
        steps.append(cuts)
        alive = ahead
    sizes: list[int] = []
    end = n
    for cuts in reversed(steps):
        sizes.append(end - cuts[end])
        end = cuts[end]
    return sizes[::-1]


class _Range:
    """A range of cuts, halved again and again.

    Each pair of cuts i < j, if not together in a small range, is on the two sides of exactly one
    halving.
    """

    def __init__(self, low: int, high: int, starts: Sequence[float], ends: Sequence[float]) -> None:
        self.low, self.high = low, high
        self.middle = (low + high) // 2
        self.halves: tuple[_Range, ...] = ()
        if high - low > _SMALL:
            left, right = range(low, self.middle), range(self.middle, high)
            self.halves = (
                _Range(low, self.middle, starts, ends),
                _Range(self.middle, high, starts, ends),
            )
            self.left = sorted(left, key=starts.__getitem__)
            self.right = sorted(right, key=ends.__getitem__, reverse=True)


class _Evenness:
    """The steps of the second programme, each from k - 1 stages to k.

    ``after[j] = min over i < j of before[i] + (starts[i] + ends[j]) ** 2``, over those i whose
    stage is within ``limit``. Expanded, each i is a line in ``2 * ends[j]`` with slope
    ``starts[i]``, and the minimum is the lower envelope of the lines. With the left half of a
    range sorted by ``starts`` and the right half by falling ``ends``, lines join in the order of
    their slopes as the limit allows more of them, and leave at the other end as they are overtaken:
    the monotone convex hull trick, linear in the length of the range.
    """

    def __init__(self, starts: Sequence[float], ends: Sequence[float], limit: float) -> None:
        self.starts, self.ends, self.limit = starts, ends, limit
        self.whole = _Range(0, len(starts), starts, ends)

    def step(
        self, before: list[float], alive: range, ahead: range
    ) -> tuple[list[float], list[int]]:
        """Scores of the ends in ``ahead``, infinite elsewhere, and the cuts before them.

        ``alive`` is where ``before`` may be finite.
        """
        self.before, self.alive, self.ahead = before, alive, ahead
        self.after = [math.inf] * len(before)
        self.cuts = [0] * len(before)
        self._visit(self.whole)
        return self.after, self.cuts

    def _visit(self, part: _Range) -> None:
        if not (_overlap(self.ahead, part.low, part.high) and self.alive.start < part.high):
            return
        if not part.halves:
            for j in range(max(part.low + 1, self.ahead.start), min(part.high, self.ahead.stop)):
                for i in range(max(part.low, self.alive.start), min(j, self.alive.stop)):
                    self._offer(i, j)
            return
        for half in part.halves:
            self._visit(half)
        if _overlap(self.alive, part.low, part.middle):
            self._cross(part.left, part.right)

    def _offer(self, i: int, j: int) -> None:
        seconds = self.starts[i] + self.ends[j]
        if seconds <= self.limit:
            score = self.before[i] + seconds * seconds
            if score < self.after[j]:
                self.after[j], self.cuts[j] = score, i

    def _cross(self, left: Sequence[int], right: Sequence[int]) -> None:
        starts, before, first, stop = self.starts, self.before, self.ahead.start, self.ahead.stop
        joining = [i for i in left if before[i] < math.inf]
        joined = 0
        lines: deque[_Line] = deque()
        for j in right:
            if not first <= j < stop:
                continue
            allowed = self.limit - self.ends[j]
            while joined < len(joining) and starts[joining[joined]] <= allowed:
                i = joining[joined]
                _join(lines, (starts[i], before[i] + starts[i] * starts[i], i))
                joined += 1
            at = 2 * self.ends[j]
            while (
                len(lines) > 1 and lines[1][0] * at + lines[1][1] <= lines[0][0] * at + lines[0][1]
            ):
                lines.popleft()
            if lines:
                self._offer(lines[0][2], j)


_Line = tuple[float, float, int]  # slope, height at 0, cut


def _join(lines: deque[_Line], line: _Line) -> None:
    """Add a line with the largest slope so far to a lower envelope."""
    slope, height, _ = line
    if lines and lines[-1][0] == slope:
        if lines[-1][1] <= height:
            return
        lines.pop()
    while len(lines) > 1:
        (s0, h0, _), (s1, h1, _) = lines[-2], lines[-1]
        # The last one stays if it is the lowest somewhere between its neighbours.
        if (h1 - h0) * (slope - s1) < (height - h1) * (s1 - s0):
            break
        lines.pop()
    lines.append(line)


def _overlap(cuts: range, low: int, high: int) -> bool:
    return cuts.start < high and cuts.stop > low


def _check(costs: Sequence[float], stages: int, boundary: Sequence[float], at_most: bool) -> None:
    n = len(costs)
    if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1:
        raise PartitionError(f"stages must be a whole number of at least 1, got {stages!r}")
    if not n:
        raise PartitionError("there are no layers to partition; give at least one")
    if stages > n and not at_most:
        raise PartitionError(
            f"{stages} stages for {n} layers: every stage needs at least one; use at most {n} "
            "stages, or split the layers"
        )
    if boundary and len(boundary) != n - 1:
        raise PartitionError(f"{len(boundary)} boundaries for {n} layers; expected {n - 1}")
    for what, values in (("layer", costs), ("boundary behind layer", boundary)):
        for index, value in enumerate(values):
            if not (math.isfinite(value) and value >= 0):
                raise PartitionError(
                    f"{what} {index}: cost must be a finite number of seconds >= 0, got {value}"
                )
