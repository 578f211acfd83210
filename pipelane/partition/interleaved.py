"""Several stages per rank: what counts is the sum of each rank's stages.

Start from the dynamic programme that balances the single stages, then move boundaries while the
slowest rank gets faster, from several starts. For few layers all ways to cut are tried, with
bounds, which proves the optimum.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from time import perf_counter

from pipelane.errors import PartitionError
from pipelane.partition import milp
from pipelane.partition.downsets import Lattice, Rule, prefixes, search, stage_time
from pipelane.partition.orders import topological_orders
from pipelane.partition.problem import Problem
from pipelane.partition.solve import Solution

__all__ = ["solve_interleaved"]

#: Ways to go on that are looked at before the proof is given up.
_MOST_NODES = 300_000
_RESTARTS = 12
#: Up to so many stages, several boundaries are moved together.
_SHIFTED = 16
#: Seconds for moving boundaries.
_SEARCH_SECONDS = 3.0
#: The integer programme only adds a proof, or a last improvement: it gets a few seconds.
_PROOF_SECONDS = 10.0
_ROUNDING = 1e-12


def solve_interleaved(
    problem: Problem, placement: Sequence[int], rules: Sequence[Rule], *, deadline: float
) -> Solution:
    """Minimise the slowest rank.

    Args:
        problem: the items.
        placement: rank of each stage.
        rules: per stage: speed and memory of its rank, and the micro-batches it holds.
        deadline: on the clock of ``time.perf_counter``.

    Raises:
        PartitionError: more stages than items, or no partition fits into memory.
    """
    stages = len(placement)
    problem.refuse_empty_stages(stages)
    average = sum(item.seconds for item in problem.items) / _total_speed(placement, rules)
    fastest = max(rule.speed for rule in rules)
    heaviest = max(problem.items, key=lambda item: item.seconds)
    bound, reason = average, f"the average of {max(placement) + 1} ranks"
    if heaviest.seconds / fastest > average:
        bound = heaviest.seconds / fastest
        reason = f"the heaviest layer, {heaviest.names[0]!r}, which cannot be cut"
    if problem.is_plain_chain and stages > 1:
        # Each of the stages but one pays for a boundary, and so does its neighbour.
        paid = sum(sorted(problem.boundaries())[: stages - 1])
        least = 2 * paid * min(rule.speed for rule in rules)
        average += least / _total_speed(placement, rules)
        if average >= bound:
            bound, reason = (
                average,
                f"the average of {max(placement) + 1} ranks with what they send",
            )
    best: _Cutting | None = None
    search_ends = min(deadline, perf_counter() + _SEARCH_SECONDS)
    for order in topological_orders(problem, 8):
        cutting = _Cutting(problem, order, placement, rules)
        cutting.improve(search_ends)
        if best is None or cutting.value < best.value:
            best = cutting
        if best.value[1] <= bound * (1 + _ROUNDING) or perf_counter() > search_ends:
            break
    assert best is not None
    exact = not best.value[0] and best.value[1] <= bound * (1 + _ROUNDING)
    method = "local search over boundaries"
    if not exact and problem.has_one_order and best.prove(deadline):
        exact = True
        method = "all ways to cut, with bounds"
        bound, reason = best.value[1], "no other cuts between layers do better"
    masks, value = best.masks(), best.value[:2]
    if not exact and milp.available() and perf_counter() < deadline:
        left = min(deadline - perf_counter(), _PROOF_SECONDS)
        found = milp.solve(problem, rules, exactly=True, seconds=left, placement=placement)
        if found is not None and found.lower_bound > bound:
            bound, reason = found.lower_bound, "what the integer programme has proven"
        if found is not None and len(found.stages) == stages:
            slowest = _slowest(problem, found.stages, placement, rules)
            if (0.0, slowest) < value:
                masks, value = found.stages, (0.0, slowest)
                method = "integer programme (HiGHS)"
        exact = not value[0] and value[1] <= bound * (1 + 1e-9)
    if value[0]:
        raise PartitionError(best.lacking(proven=exact))
    return Solution(problem, masks, (False,) * stages, bound, reason, exact, method)


def _slowest(
    problem: Problem, masks: Sequence[int], placement: Sequence[int], rules: Sequence[Rule]
) -> float:
    time = [0.0] * (max(placement) + 1)
    for mask, rank, rule in zip(masks, placement, rules, strict=True):
        time[rank] += stage_time(problem, mask, rule)
    return max(time)


def _total_speed(placement: Sequence[int], rules: Sequence[Rule]) -> float:
    return sum({rank: rule.speed for rank, rule in zip(placement, rules, strict=True)}.values())


class _Cutting:
    """One topological order and where it is cut.

    ``value`` is what is minimised: bytes above the limits, the slowest rank, and unevenness.
    """

    def __init__(
        self,
        problem: Problem,
        order: Sequence[int],
        placement: Sequence[int],
        rules: Sequence[Rule],
    ) -> None:
        self.problem, self.order, self.placement, self.rules = problem, order, placement, rules
        self.ranks = max(placement) + 1
        self.n, self.stages = len(order), len(placement)
        self.prefix = prefixes(order)
        self._known: dict[tuple[int, int, int], tuple[float, float]] = {}
        ordered = [problem.items[item] for item in order]
        self.sums = tuple(
            [0.0, *accumulate(getattr(item, key) for item in ordered)]
            for key in ("seconds", "static_bytes", "activation_bytes")
        )
        self.is_chain = problem.is_plain_chain
        self.edge = [0.0, *problem.boundaries(), 0.0] if self.is_chain else []
        self.limit = [0.0] * self.ranks
        for rank, rule in zip(placement, rules, strict=True):
            self.limit[rank] = rule.memory
        self.cuts = self._start()
        self.value = self.value_of(self.cuts)

    def _start(self) -> tuple[int, ...]:
        """The most even single stages."""
        lattice = Lattice(self.problem, self.prefix)
        plain = [Rule(rule.speed) for rule in self.rules]
        found = search(lattice, plain, exactly=True)
        assert found is not None
        ends, inside = [0], 0
        for mask in found.stages:
            inside |= mask
            ends.append(inside.bit_count())
        return tuple(ends)

    def stage(self, s: int, begin: int, end: int) -> tuple[float, float]:
        """Seconds and bytes of a stage."""
        key = (s, begin, end)
        found = self._known.get(key)
        if found is None:
            rule = self.rules[s]
            seconds, static, activation = (sums[end] - sums[begin] for sums in self.sums)
            mask = self.prefix[end] & ~self.prefix[begin]
            if self.is_chain:
                paid = self.edge[begin] + self.edge[end]
            else:
                paid = sum(cut.seconds for cut in self.problem.transfers(mask))
            found = seconds / rule.speed + paid, rule.needs(static, activation)
            self._known[key] = found
        return found

    def value_of(self, cuts: Sequence[int]) -> tuple[float, float, float]:
        time, held = [0.0] * self.ranks, [0.0] * self.ranks
        for s, rank in enumerate(self.placement):
            seconds, size = self.stage(s, cuts[s], cuts[s + 1])
            time[rank] += seconds
            held[rank] += size
        excess = max(max(0.0, h - limit) for h, limit in zip(held, self.limit, strict=True))
        return excess, max(time), sum(t * t for t in time)

    def improve(self, deadline: float) -> None:
        """Descend from the start and from disturbed copies of the best."""
        draw = random.Random(0)
        self.cuts, self.value = self._descend(self.cuts, self.value, deadline)
        for _ in range(_RESTARTS):
            if perf_counter() > deadline or self.stages == 1:
                return
            moved = list(self.cuts)
            for _ in range(draw.randint(2, 4)):
                index = draw.randrange(1, self.stages)
                moved[index] = draw.randint(moved[index - 1] + 1, moved[index + 1] - 1)
            cuts, value = self._descend(tuple(moved), self.value_of(moved), deadline)
            if value < self.value:
                self.cuts, self.value = cuts, value

    def _descend(
        self, cuts: tuple[int, ...], value: tuple[float, float, float], deadline: float
    ) -> tuple[tuple[int, ...], tuple[float, float, float]]:
        better = True
        while better:
            better = False
            for other in self._neighbours(cuts):
                other_value = self.value_of(other)
                if other_value < value:
                    cuts, value, better = other, other_value, True
                    break
                if perf_counter() > deadline:
                    return cuts, value
        return cuts, value

    def _neighbours(self, cuts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """One boundary moved, by a little or far, or all between two boundaries moved by one."""
        for index in range(1, self.stages):
            low, high = cuts[index - 1] + 1, cuts[index + 1] - 1
            for step in (-1, 1, -2, 2, -4, 4, -8, 8):
                if low <= cuts[index] + step <= high:
                    yield (*cuts[:index], cuts[index] + step, *cuts[index + 1 :])
        for first in range(1, self.stages if self.stages <= _SHIFTED else 1):
            for last in range(first + 1, self.stages):
                for step in (-1, 1):
                    moved = (
                        *cuts[:first],
                        *(cut + step for cut in cuts[first : last + 1]),
                        *cuts[last + 1 :],
                    )
                    if moved[first - 1] < moved[first] and moved[last] < moved[last + 1]:
                        yield moved

    def prove(self, deadline: float) -> bool:
        """Try all ways to cut this order, leaving out what cannot be better; False if too many.

        Raises nothing; ``cuts`` and ``value`` become the optimum.
        """
        rest = [0.0] * (self.n + 1)  # seconds behind each prefix
        for position in range(self.n - 1, -1, -1):
            rest[position] = rest[position + 1] + self.problem.items[self.order[position]].seconds
        speed = [0.0] * self.ranks
        for rank, rule in zip(self.placement, self.rules, strict=True):
            speed[rank] = rule.speed
        seen = 0
        time, held = [0.0] * self.ranks, [0.0] * self.ranks
        chosen = [0]

        def visit(s: int) -> bool:
            """False when there is too much to look at."""
            nonlocal seen
            begin = chosen[-1]
            if s == self.stages:
                value = self.value_of(chosen)
                if value[:2] < self.value[:2]:
                    self.cuts, self.value = tuple(chosen), value
                return True
            rank = self.placement[s]
            ends = range(begin + 1, self.n - (self.stages - s - 1) + 1)
            for end in ends if s < self.stages - 1 else (self.n,):
                seen += 1
                if seen > _MOST_NODES or (not seen & 1023 and perf_counter() > deadline):
                    return False
                seconds, size = self.stage(s, begin, end)
                time[rank] += seconds
                held[rank] += size
                chosen.append(end)
                if self._may_be_better(time, held, rest[end], speed) and not visit(s + 1):
                    return False
                chosen.pop()
                time[rank] -= seconds
                held[rank] -= size
            return True

        return visit(0)

    def _may_be_better(
        self, time: Sequence[float], held: Sequence[float], rest: float, speed: Sequence[float]
    ) -> bool:
        excess, worst, _ = self.value
        if excess:
            worst = float("inf")  # what fits is better, however slow
        tight = worst * (1 - _ROUNDING)
        over = max(h - limit for h, limit in zip(held, self.limit, strict=True))
        if over > excess or max(time) >= tight:
            return False
        room = sum((tight - t) * v for t, v in zip(time, speed, strict=True))
        return rest <= room

    def masks(self) -> tuple[int, ...]:
        return tuple(self.prefix[b] & ~self.prefix[a] for a, b in pairwise(self.cuts))

    def lacking(self, proven: bool) -> str:
        """What the partition that comes nearest lacks."""
        held = [0.0] * self.ranks
        for s, rank in enumerate(self.placement):
            held[rank] += self.stage(s, self.cuts[s], self.cuts[s + 1])[1]
        short, rank = max(
            (h - limit, r) for r, (h, limit) in enumerate(zip(held, self.limit, strict=True))
        )
        stages = [s for s, owner in enumerate(self.placement) if owner == rank]
        sure = "no partition fits" if proven else "no partition that fits was found"
        return (
            f"{sure}: in the one that comes nearest, rank {rank} with stages {stages} needs "
            f"{held[rank]:.0f} bytes, {short:.0f} more than {self.limit[rank]:.0f}; give more "
            "memory or ranks, or use smaller micro-batches"
        )
