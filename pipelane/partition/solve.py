"""The best partition of a problem, how good it is for certain, and why.

First topological orders are cut as if they were chains: an upper bound. If it does not meet a
simple lower bound, the dynamic programme over all downsets finds the optimum and proves it. Where
there are too many downsets, an integer programme (HiGHS, if scipy is installed) or a search over
orders goes on until the time is over; then the answer comes with the lower bound that is proven.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

from pipelane.errors import PartitionError
from pipelane.partition import milp
from pipelane.partition.chain import chain_partition
from pipelane.partition.downsets import (
    Found,
    Lattice,
    Rule,
    Timeout,
    all_downsets,
    prefixes,
    search,
    stage_time,
)
from pipelane.partition.orders import greedy, near, topological_orders
from pipelane.partition.problem import Item, Problem, bits, reduced

__all__ = ["MOST_DOWNSETS", "Rules", "Solution", "solve"]

#: Up to so many downsets are searched exactly.
MOST_DOWNSETS = 60_000
#: Up to so many, ties are broken towards evenness.
_EVEN_DOWNSETS = 3_000
_ORDERS = 16
#: Orders of so many items are cut in no time, and need no first guess.
_QUICK = 64
_ROUNDING = 1e-12

#: The rules of the stages of a pipeline with that many stages.
Rules = Callable[[int], Sequence[Rule]]


class Solution(NamedTuple):
    """Stages as masks of the items of ``problem`` (which may be a reduced one).

    ``reason`` says in words where the lower bound comes from.
    """

    problem: Problem
    stages: tuple[int, ...]
    recompute: tuple[bool, ...]
    lower_bound: float
    reason: str
    exact: bool
    method: str


def solve(
    problem: Problem,
    stages: int,
    rules: Rules,
    *,
    exactly: bool,
    recompute: bool = False,
    deadline: float = math.inf,
    most_downsets: int = MOST_DOWNSETS,
) -> Solution:
    """Minimise the slowest stage.

    Args:
        problem: the items; not reduced.
        stages: how many, exactly or at most.
        rules: what each stage can do.
        exactly: exactly ``stages``, none of them empty.
        recompute: whether a stage may recompute its activations where they do not fit.
        deadline: on the clock of ``time.perf_counter``; after it the best so far is returned.
        most_downsets: above, the search is not exhaustive.

    Raises:
        PartitionError: more stages than items, or memory that no partition meets; says which item
            or stage lacks how many bytes.
    """
    if exactly:
        problem.refuse_empty_stages(stages)
    stages = min(stages, len(problem.items))
    task = _Task(problem, stages, rules, exactly, recompute, deadline, most_downsets)
    if not task.limited and problem.is_plain_chain and task.even_speed:
        return _chain(task)
    _refuse_impossible_items(task)
    smaller = problem
    # A stage that recomputes holds what it receives; a fast rank may be worth an idle one before.
    if not (recompute and task.limited) and _may_leave_out(task):
        smaller = reduced(problem, memory=task.limited)
    if smaller is not problem:
        relaxed = task._replace(
            problem=smaller, exactly=False, stages=min(stages, len(smaller.items))
        )
        if not exactly:
            return _search(relaxed)
        # Exactly k stages are found among "at most k" or not at all there; then not reduced.
        try:
            found = _search(relaxed, tables=[rules(stages)[: relaxed.stages]])
        except PartitionError:
            found = None
        if found is not None and found.exact and len(found.stages) == stages:
            return found
    return _search(task)


def _may_leave_out(task: _Task) -> bool:
    """Whether the other stages can do as much when any one stage is left out."""
    for q in range(2, task.stages + 1):
        large, small = task.rules(q), task.rules(q - 1)
        if len({*large, *small}) == 1:
            continue
        for gone in range(q):
            for new, old in zip(small, (*large[:gone], *large[gone + 1 :]), strict=True):
                worse = new.speed < old.speed or new.memory < old.memory
                if worse or new.in_flight > old.in_flight:
                    return False
    return True


class _Task(NamedTuple):
    problem: Problem
    stages: int
    rules: Rules
    exactly: bool
    recompute: bool
    deadline: float
    most_downsets: int

    def tables(self) -> list[Sequence[Rule]]:
        """The rules to try: those of the largest pipeline, if they hold for smaller ones too."""
        largest = tuple(self.rules(self.stages))
        if self.exactly:
            return [largest]
        every = [tuple(self.rules(q)) for q in range(self.stages, 0, -1)]
        if all(table == largest[: len(table)] for table in every):
            return [largest]
        return [*every]

    @property
    def limited(self) -> bool:
        return any(rule.memory < math.inf for rule in self.rules(self.stages))

    @property
    def even_speed(self) -> bool:
        return all(rule.speed == 1.0 for rule in self.rules(self.stages))


class _Bound(NamedTuple):
    seconds: float
    reason: str


def _simple_bound(task: _Task) -> _Bound:
    """The larger of the average and the heaviest item."""
    problem, rules = task.problem, task.rules(task.stages)
    total = sum(item.seconds for item in problem.items)
    average = total / sum(rule.speed for rule in rules)
    heaviest = max(problem.items, key=lambda item: item.seconds)
    alone = heaviest.seconds / max(rule.speed for rule in rules)
    if alone >= average:
        return _Bound(alone, f"{_called(heaviest.names)} alone takes as long and cannot be cut")
    return _Bound(average, f"the average of {len(rules)} stages, which no partition can be below")


def _called(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"the single layer {names[0]!r}"
    if len(names) <= 3:
        return f"the group {', '.join(map(repr, names))}"
    return f"the group of {len(names)} layers with {names[0]!r}"


def _chain(task: _Task) -> Solution:
    """The programme for chains, which needs no arrays."""
    problem = task.problem
    costs = [item.seconds for item in problem.items]
    boundary = problem.boundaries()
    sizes = chain_partition(costs, task.stages, boundary=boundary, at_most=not task.exactly)
    masks, begin = [], 0
    for size in sizes:
        masks.append(((1 << size) - 1) << begin)
        begin += size
    rules = task.rules(len(sizes))
    worst = max(stage_time(problem, m, rule) for m, rule in zip(masks, rules, strict=True))
    bound = _simple_bound(task)
    reason = bound.reason
    if worst > bound.seconds * (1 + _ROUNDING):
        reason = _no_better(problem, masks, rules, "no other cuts between layers do better")
    return Solution(
        problem, tuple(masks), (False,) * len(masks), worst, reason, True,
        "dynamic programme over a chain",
    )  # fmt: skip


def _no_better(problem: Problem, masks: Sequence[int], rules: Sequence[Rule], proof: str) -> str:
    times = [stage_time(problem, m, rule) for m, rule in zip(masks, rules, strict=True)]
    stage = times.index(max(times))
    paid = any(cut.seconds for cut in problem.transfers(masks[stage]))
    extra = " with what it sends and receives" if paid else ""
    names = [name for item in bits(masks[stage]) for name in problem.items[item].names]
    if len(masks) == 1:
        return "a single stage holds everything"
    if masks[stage].bit_count() == 1:
        return f"stage {stage} is {_called(names)}{extra}, and {proof}"
    even = sum(item.seconds for item in problem.items) / len(masks)
    over = f"{times[stage] / even - 1:.1%}" if even else "0.0%"
    return (
        f"stage {stage} ({names[0]!r} to {names[-1]!r}){extra} is {over} above an even share of "
        f"the layers, and {proof}"
    )


def _search(task: _Task, tables: list[Sequence[Rule]] | None = None) -> Solution:
    problem = task.problem
    tables = task.tables() if tables is None else tables
    bound = _simple_bound(task)
    state = _State(task, tables)
    masks = all_downsets(problem, task.most_downsets)
    chain = masks is not None and len(masks) == len(problem.items) + 1
    lattice: Lattice | None = None
    for order in topological_orders(problem, _ORDERS):
        try:
            lattice = state.cut(order)
        except Timeout:
            break
        if state.value <= bound.seconds * (1 + _ROUNDING) and not chain:
            return state.solution(bound.seconds, bound.reason, True, "cutting topological orders")
    method = ""
    if masks is not None:
        if lattice is None or not chain:  # a chain's only order has all its downsets
            lattice = Lattice(problem, masks)
        try:
            for table in () if chain else tables:  # a chain's only order has been cut
                state.improve(lattice, table)
            if state.best is None:
                raise PartitionError(_why_infeasible(task, tables, lattice))
            proof = f"none of the {len(lattice)} downsets gives a better one"
            if chain:
                proof = "no other cuts do better"
            reason = _no_better(problem, state.best.stages, state.table, proof)
            state.even(lattice)
            method = f"dynamic programme over {len(lattice)} downsets"
            return state.solution(state.value, reason, True, method)
        except Timeout:
            method = f"dynamic programme over {len(lattice)} downsets, stopped by the time limit"
    if milp.available() and perf_counter() < task.deadline:
        proven = _integer_programme(state, tables)
        if proven is not None:
            if proven.seconds > bound.seconds:
                bound = proven
            method = "integer programme (HiGHS)"
    if state.best is None or state.value > bound.seconds * (1 + _ROUNDING):
        _search_orders(state)
        method = method or "search over topological orders"
    if state.best is None:
        raise PartitionError(
            f"no partition into {task.stages} stages that fits into memory was found within the "
            "time limit; this is no proof that there is none: give more time, memory or stages"
        )
    exact = state.value <= bound.seconds * (1 + 1e-9)
    return state.solution(bound.seconds, bound.reason, exact, method)


def _integer_programme(state: _State, tables: Sequence[Sequence[Rule]]) -> _Bound | None:
    """Improve by HiGHS; the bound that it proves for all tables."""
    task = state.task
    if task.recompute or len(tables) > 1:
        return None
    left = task.deadline - perf_counter()
    found = milp.solve(task.problem, tables[0], exactly=task.exactly, seconds=min(left, 600.0))
    if found is None:
        return None
    if found.stages:
        state.take(found.stages, tables[0])
    return _Bound(found.lower_bound, "what the integer programme has proven")


def _search_orders(state: _State) -> None:
    """Cut orders that are near to the best partition, until the time is over."""
    task, draw = state.task, random.Random(1)
    end = task.deadline if task.deadline < math.inf else perf_counter() + 10.0
    orders = topological_orders(task.problem, 10**6, seed=1)
    while perf_counter() < end:
        if state.best is None or draw.random() < 0.1:
            order = next(orders, None)
            if order is None:
                return
        else:
            order = near(task.problem, state.best.stages, draw)
        try:
            state.cut(order)
        except Timeout:
            return


class _State:
    """The best partition so far."""

    def __init__(self, task: _Task, tables: Sequence[Sequence[Rule]]) -> None:
        self.task = task
        self.tables = tables
        self.best: Found | None = None
        self.table: Sequence[Rule] = tables[0]
        self.value = math.inf

    def cut(self, order: Sequence[int]) -> Lattice:
        """Cut an order as if it were a chain; returns the lattice of its prefixes."""
        problem = self.task.problem
        lattice = Lattice(problem, prefixes(order))
        for table in self.tables:
            limit = self.value
            guess = None
            if len(order) > _QUICK and len(order) >= len(table):
                guess = greedy(problem, order, table, self.task.recompute)
            if guess is not None:
                limit = min(limit, guess * (1 + 1e-9))
            self.improve(lattice, table, limit)
        return lattice

    def improve(self, lattice: Lattice, table: Sequence[Rule], limit: float | None = None) -> None:
        """Search for a better one in a lattice; raises Timeout."""
        task = self.task
        found = search(
            lattice,
            table,
            exactly=task.exactly or len(self.tables) > 1,
            limit=self.value if limit is None else limit,
            recompute=task.recompute,
            # Some answer is better than none, and cutting one order takes no time.
            deadline=math.inf if self.best is None and limit is not None else task.deadline,
        )
        if found is not None and found.value < self.value:
            self.best, self.table, self.value = found, table[: len(found.stages)], found.value

    def take(self, stages: Sequence[int], table: Sequence[Rule]) -> None:
        """A partition that was found elsewhere."""
        used = table[: len(stages)]
        times = [stage_time(self.task.problem, m, r) for m, r in zip(stages, used, strict=True)]
        if max(times) < self.value:
            self.value, self.table = max(times), used
            self.best = Found(tuple(stages), (False,) * len(stages), max(times))

    def even(self, lattice: Lattice) -> None:
        """Among partitions as good as the best, take the most even one, if that is quick."""
        if self.best is None or len(lattice) > _EVEN_DOWNSETS:
            return
        found = search(
            lattice,
            self.table,
            exactly=True,
            limit=self.value * (1 + _ROUNDING),
            recompute=self.task.recompute,
            objective="even",
            deadline=self.task.deadline,
        )
        if found is not None:
            self.best = found

    def solution(self, bound: float, reason: str, exact: bool, method: str) -> Solution:
        assert self.best is not None
        best = self.best
        return Solution(
            self.task.problem, best.stages, best.recompute, bound, reason, exact, method
        )


def _refuse_impossible_items(task: _Task) -> None:
    """A layer that fits on no rank: no search needed, and a better message."""
    if not task.limited:
        return
    sizes = [task.stages] if task.exactly else range(1, task.stages + 1)
    rules = {rule for q in sizes for rule in task.rules(q)}
    worst: tuple[float, float, Item, Rule] | None = None
    for item in task.problem.items:
        ways = []
        for rule in rules:
            held = rule.needs(item.static_bytes, item.activation_bytes)
            if task.recompute:
                held = min(held, item.static_bytes + item.activation_bytes)
            ways.append((held - rule.memory, held, item, rule))
        best = min(ways, key=lambda way: way[0])
        if worst is None or best[0] > worst[0]:
            worst = best
    assert worst is not None
    short, held, item, rule = worst
    if short > 0:
        raise PartitionError(
            f"{_called(item.names)} needs {held:.0f} bytes by itself (static "
            f"{item.static_bytes:.0f}, activations {item.activation_bytes:.0f} x "
            f"{rule.in_flight} micro-batches), {short:.0f} more than the memory of "
            f"{rule.memory:.0f}; split it, give more memory, or use smaller micro-batches"
        )


def _why_infeasible(task: _Task, tables: Sequence[Sequence[Rule]], lattice: Lattice) -> str:
    """The partition that comes nearest to fitting, and what it lacks."""
    nearest: tuple[Found, Sequence[Rule]] | None = None
    for table in tables:
        found = search(
            lattice,
            table,
            exactly=task.exactly or len(tables) > 1,
            recompute=task.recompute,
            objective="excess",
        )
        if found is not None and (nearest is None or found.value < nearest[0].value):
            nearest = found, table
    if nearest is None:
        return f"there is no partition into {task.stages} stages"
    found, table = nearest
    return "memory that no partition meets: " + _lacking(task.problem, found, table)


def _lacking(problem: Problem, found: Found, table: Sequence[Rule]) -> str:
    excess = []
    for stage, (mask, rule) in enumerate(zip(found.stages, table, strict=False)):
        held = rule.needs(
            problem.total(mask, "static_bytes"), problem.total(mask, "activation_bytes")
        )
        excess.append((held - rule.memory, stage, held, rule))
    short, stage, held, rule = max(excess)
    names = [name for item in bits(found.stages[stage]) for name in problem.items[item].names]
    return (
        f"the one that comes nearest has {len(found.stages)} stages, and stage {stage} "
        f"({names[0]!r} to {names[-1]!r}) needs {held:.0f} bytes with {rule.in_flight} "
        f"micro-batches in flight, {short:.0f} more than {rule.memory:.0f}; give more memory or "
        "stages, or use smaller micro-batches or a schedule that holds fewer"
    )
