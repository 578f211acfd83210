"""Topological orders to cut as if they were chains: upper bounds, quickly."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence

from pipelane.partition.downsets import Rule, stage_time
from pipelane.partition.problem import Problem, bits

__all__ = ["greedy", "near", "topological_orders"]


def topological_orders(problem: Problem, count: int, seed: int = 0) -> Iterator[list[int]]:
    """Different orders, the most promising first, at most ``count``; deterministic.

    The given order; last come, first served, which follows a branch to its end before the next;
    the way that is longest first; then random mixtures. A graph with one order gives one.
    """
    items = range(len(problem.items))
    if problem.has_one_order:
        yield list(items)
        return
    draw = random.Random(seed)
    ahead = [0.0] * len(problem.items)
    for item in reversed(items):
        behind = max((ahead[other] for other in bits(problem.after[item])), default=0.0)
        ahead[item] = behind + problem.items[item].seconds
    keys: list[Callable[[int, int], float]] = [
        lambda item, time: item,
        lambda item, time: -time,
        lambda item, time: -ahead[item],
        lambda item, time: time,
        lambda item, time: ahead[item],
        lambda item, time: problem.items[item].seconds,
    ]
    seen = set()
    for number in range(count):
        key = keys[number] if number < len(keys) else _random_key(draw, len(items), number % 2)
        order = _ordered(problem, key)
        if tuple(order) not in seen:
            seen.add(tuple(order))
            yield order


def _random_key(draw: random.Random, items: int, mixed: int) -> Callable[[int, int], float]:
    """Any order, or one that follows branches to their ends with some disorder."""
    noise = [draw.random() for _ in range(items)]
    if mixed:
        return lambda item, time: 3 * noise[item] - time
    return lambda item, time: noise[item]


def near(problem: Problem, stages: Sequence[int], draw: random.Random) -> list[int]:
    """A random order in which a partition, or one much like it, can be found by cutting."""
    noise = draw.choice([0.0, 0.3, 1.0, 1.5])
    rank = {
        item: stage + draw.uniform(0, noise)
        for stage, mask in enumerate(stages)
        for item in bits(mask)
    }
    depth_first = draw.random() < 0.5
    scale = 1e-6 if noise == 0.0 or draw.random() < 0.5 else 1e-2

    def key(item: int, time: int) -> float:
        return rank[item] - scale * time if depth_first else rank[item] + scale * draw.random()

    return _ordered(problem, key)


def _ordered(problem: Problem, key: Callable[[int, int], float]) -> list[int]:
    """The order that always takes the free item with the smallest ``key(item, when freed)``."""
    waiting = [mask.bit_count() for mask in problem.before]
    time = 0
    heap = []
    for item, count in enumerate(waiting):
        if not count:
            heap.append((key(item, time), item))
    heapq.heapify(heap)
    order = []
    while heap:
        item = heapq.heappop(heap)[1]
        order.append(item)
        time += 1
        for other in bits(problem.after[item]):
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(heap, (key(other, time), other))
    return order


def greedy(
    problem: Problem, order: Sequence[int], rules: Sequence[Rule], recompute: bool = False
) -> float | None:
    """The bottleneck of a fair partition of an order into exactly as many stages as rules.

    Stages are filled one after the other up to a level, which is found by bisection. Transfers do
    not count in the filling but in the result, which is an upper bound whatever it is.

    Returns:
        None if the filling runs out of memory or of items.
    """
    filling = _Filling(problem, order, rules, recompute)
    total = sum(item.seconds + item.again * recompute for item in problem.items)
    most = total / min(rule.speed for rule in rules)
    low, high = total / sum(rule.speed for rule in rules) / 2, most
    best = filling.cuts(most)
    for _ in range(24):
        level = (low + high) / 2
        cuts = filling.cuts(level)
        if cuts is None:
            low = level
        else:
            high, best = level, cuts
    if best is None:
        return None
    masks = [sum(1 << item for item in order[begin:end]) for begin, end, _ in best]
    return max(
        stage_time(problem, mask, rule, again)
        for mask, rule, (_, _, again) in zip(masks, rules, best, strict=True)
    )


class _Filling:
    """Stages filled one after the other, each as far as time and memory allow."""

    def __init__(
        self, problem: Problem, order: Sequence[int], rules: Sequence[Rule], recompute: bool
    ) -> None:
        self.items = [problem.items[item] for item in order]
        self.rules = rules
        self.recompute = recompute
        self.entering = [0.0] * len(order)  # bytes of what is open before each position
        if recompute:
            place = {item: position for position, item in enumerate(order)}
            for cut in problem.cuts:
                ends = sorted(place[item] for item in bits(cut.items))
                for position in range(ends[0] + 1, ends[-1] + 1):
                    self.entering[position] += cut.bytes

    def cuts(self, level: float) -> list[tuple[int, int, bool]] | None:
        """Begin, end and whether it recomputes, per stage."""
        begin = 0
        made = []
        for s, rule in enumerate(self.rules):
            last = len(self.items) - (len(self.rules) - s - 1)
            end, again = self._fill(begin, last, rule, level)
            if end == begin:
                return None
            made.append((begin, end, again))
            begin = end
        return made if begin == len(self.items) else None

    def _fill(self, begin: int, last: int, rule: Rule, level: float) -> tuple[int, bool]:
        seconds = second = static = activation = 0.0
        most = level * rule.speed * (1 + 1e-12)
        again = False
        for end in range(begin, last):
            item = self.items[end]
            seconds += item.seconds
            second += item.again
            static += item.static_bytes
            activation += item.activation_bytes
            twice = rule.needs(static, activation) > rule.memory
            if twice:
                held = static + activation + rule.in_flight * self.entering[begin]
                if not self.recompute or held > rule.memory:
                    return end, again
            if seconds + second * twice > most:
                return end, again
            again = twice
        return last, again
