"""Integer programme for graphs with too many downsets; needs scipy (HiGHS), an optional extra.

Variables: ``y[i, s]``, whether item i is in stage s or an earlier one (so y grows with s, and
``y[i, s] >= y[j, s]`` where i must not be later than j); ``t[c, s]``, whether stage s pays for cut
c; and the bottleneck. A stage pays for a cut if it holds one of its items and lacks another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

from pipelane.partition.downsets import Rule
from pipelane.partition.problem import Problem, bits

__all__ = ["Answer", "available", "solve"]

#: Above, HiGHS would not even start within a sensible time.
MOST_VARIABLES = 60_000


class Answer(NamedTuple):
    """Masks of the stages (empty if none was found), and the proven lower bound."""

    stages: tuple[int, ...]
    lower_bound: float


def available() -> bool:
    """Whether scipy is installed."""
    return find_spec("scipy") is not None


def solve(
    problem: Problem,
    rules: Sequence[Rule],
    *,
    exactly: bool,
    seconds: float,
    placement: Sequence[int] | None = None,
) -> Answer | None:
    """Run HiGHS for at most ``seconds``; None if the programme is too large or says nothing.

    With a ``placement`` (rank of each stage) the times and bytes of a rank's stages add up.
    """
    import numpy
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    n, k = len(problem.items), len(rules)
    cuts = [cut for cut in problem.cuts if cut.seconds > 0]
    count = n * k + len(cuts) * k + 1
    if count > MOST_VARIABLES:
        return None
    last = count - 1

    def y(item: int, s: int) -> int:
        return item * k + s

    def t(cut: int, s: int) -> int:
        return n * k + cut * k + s

    rows: list[tuple[dict[int, float], float, float]] = []  # coefficients, low, high

    def inside(item: int, s: int) -> dict[int, float]:
        """Whether an item is in stage s: y[i, s] - y[i, s - 1]."""
        return {y(item, s): 1.0} | ({y(item, s - 1): -1.0} if s else {})

    def row(terms: Sequence[tuple[float, dict[int, float]]], low: float, high: float) -> None:
        found: dict[int, float] = {}
        for factor, part in terms:
            for column, value in part.items():
                found[column] = found.get(column, 0.0) + factor * value
        rows.append((found, low, high))

    for item in range(n):
        for s in range(k - 1):
            row([(1, {y(item, s + 1): 1.0}), (-1, {y(item, s): 1.0})], 0, 1)
        for other in bits(problem.before[item]):
            for s in range(k - 1):
                row([(1, {y(other, s): 1.0}), (-1, {y(item, s): 1.0})], 0, 1)
    where = range(k) if placement is None else placement
    for rank in sorted(set(where)):
        times: list[tuple[float, dict[int, float]]] = [(-1, {last: 1.0})]
        held: list[tuple[float, dict[int, float]]] = []
        for s in (s for s in range(k) if where[s] == rank):
            rule = rules[s]
            for i, one in enumerate(problem.items):
                times.append((one.seconds / rule.speed, inside(i, s)))
                held.append((rule.needs(one.static_bytes, one.activation_bytes), inside(i, s)))
            times += [(cut.seconds, {t(c, s): 1.0}) for c, cut in enumerate(cuts)]
            if exactly:
                row([(1, inside(i, s)) for i in range(n)], 1, n)
        row(times, -math.inf, 0)
        limit = rules[where.index(rank)].memory
        if limit < math.inf:
            row(held, -math.inf, limit)
    for c, cut in enumerate(cuts):
        members = list(bits(cut.items))
        payers = members if problem.charge == "both" else [cut.source]
        for s in range(k):
            for i in payers:
                for j in members:
                    if i != j:
                        row([(1, {t(c, s): 1.0}), (-1, inside(i, s)), (1, inside(j, s))], 0, 2)
    entries = [
        (r, column, value)
        for r, (found, _, _) in enumerate(rows)
        for column, value in found.items()
    ]
    matrix = csr_array(
        ([e[2] for e in entries], ([e[0] for e in entries], [e[1] for e in entries])),
        shape=(len(rows), count),
    )
    low, high = numpy.zeros(count), numpy.ones(count)
    high[last] = math.inf
    for item in range(n):
        low[y(item, k - 1)] = 1.0
    integral = numpy.zeros(count)
    integral[: n * k] = 1
    goal = numpy.zeros(count)
    goal[last] = 1.0
    result = milp(
        goal,
        constraints=LinearConstraint(matrix, [r[1] for r in rows], [r[2] for r in rows]),
        bounds=Bounds(low, high),
        integrality=integral,
        options={"time_limit": max(seconds, 0.1), "mip_rel_gap": 1e-9},
    )
    bound = getattr(result, "mip_dual_bound", None)
    stages: tuple[int, ...] = ()
    if result.x is not None:
        masks = [0] * k
        for item in range(n):
            masks[next(s for s in range(k) if result.x[y(item, s)] > 0.5)] |= 1 << item
        if all(masks) or len(set(rules)) == 1:  # else moving up changes what a stage can do
            stages = tuple(mask for mask in masks if mask)
    if bound is None and not stages:
        return None
    return Answer(stages, float(bound) if bound is not None else 0.0)
