"""The best schedule of all, proven, for small pipelines; needs ortools, an optional extra.

Constraint programming (CP-SAT): a start per action, no two actions of a rank at once, each input
in time, and the bytes of every rank within its memory. Micro-batches are alike, so they go through
each stage in order.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pipelane.actions import Action, Kind
from pipelane.costs import Costs
from pipelane.errors import ConfigError, ScheduleError
from pipelane.schedule import Schedule, Shape, looped_placement

__all__ = ["Exact", "exact"]

#: Times are whole numbers of so many steps of the time that all actions take one after the other.
_STEPS = 20_000


class Exact(NamedTuple):
    """A schedule, and what was proven.

    Attributes:
        schedule: the best one found, with input and weight gradients apart.
        lower_bound: seconds that no schedule can be below.
        optimal: whether the search came to its end; the lower bound is then the optimum but for
            the rounding of times, a 20 000th of all work per action.
    """

    schedule: Schedule
    lower_bound: float
    optimal: bool


def exact(
    shape: Shape,
    costs: Costs,
    memory: float | Sequence[float] | None = None,
    *,
    meter: Literal["makespan", "span"] = "makespan",
    placement: Sequence[int] | None = None,
    seconds: float = 60.0,
) -> Exact:
    """Search all schedules; practical up to some 60 actions (p <= 3, m <= 6).

    Args:
        shape: ranks, micro-batches, chunks.
        costs: per stage; a link is not taken by one message at a time here.
        memory: bytes that activations may take, of a rank or of each.
        meter: what is minimised.
        placement: rank of each stage; looped if not given.
        seconds: time limit.

    Raises:
        ConfigError: ortools is not installed.
        ScheduleError: nothing fits into the memory, or nothing was found in time.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ConfigError(
            "the exact solver needs ortools: pip install 'torch-pipelane[exact]'"
        ) from error
    m, stages = shape.microbatches, range(shape.stages)
    where = looped_placement(shape) if placement is None else tuple(placement)
    times = {Kind.F: costs.forward, Kind.I: costs.input_grad, Kind.W: costs.weight_grad}
    # One number both ways: the faster, so that the bound holds.
    hops = [min(costs.hop(where, s, s + 1), costs.hop(where, s + 1, s)) for s in stages[:-1]]
    work = m * (sum(map(sum, times.values())) + 2 * sum(hops))
    unit = work / _STEPS if work else 1.0

    def steps(value: float) -> int:
        """Rounded down, so that the bound holds for the times as they are."""
        return math.floor(value / unit * (1 + 1e-12))

    model: Any = cp_model.CpModel()
    horizon = _STEPS
    starts = {
        (kind, s, i): model.new_int_var(0, horizon, "")
        for kind in times
        for s in stages
        for i in range(m)
    }
    ends = {key: start + steps(times[key[0]][key[1]]) for key, start in starts.items()}
    for s in stages:
        for i in range(m):
            if s:
                model.add(starts[Kind.F, s, i] >= ends[Kind.F, s - 1, i] + steps(hops[s - 1]))
            if s < shape.stages - 1:
                model.add(starts[Kind.I, s, i] >= ends[Kind.I, s + 1, i] + steps(hops[s]))
            model.add(starts[Kind.I, s, i] >= ends[Kind.F, s, i])
            model.add(starts[Kind.W, s, i] >= ends[Kind.I, s, i])
            for kind in times if i else ():
                model.add(starts[kind, s, i] >= ends[kind, s, i - 1])
    goal = model.new_int_var(0, horizon, "")
    limits: Sequence[float | None]
    if memory is None or isinstance(memory, (int, float)):
        limits = [memory] * shape.ranks
    else:
        limits = memory
    for rank in range(shape.ranks):
        own = [key for key in starts if where[key[1]] == rank]
        model.add_no_overlap(
            [
                model.new_fixed_size_interval_var(starts[key], steps(times[key[0]][key[1]]), "")
                for key in own
            ]
        )
        first = starts[min(key for key in own if key[0] is Kind.F)]
        for key in own:
            model.add(goal >= ends[key] - (first if meter == "span" else 0))
        limit = limits[rank]
        if limit is not None:
            _limit_memory(model, costs, starts, ends, own, limit)
    model.minimize(goal)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.random_seed = 0
    solver.parameters.num_workers = min(8, os.cpu_count() or 1)
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        word = "fits into the memory" if status == cp_model.INFEASIBLE else "was found in time"
        raise ScheduleError(f"no schedule for {shape} {word}; give more of it")
    orders: list[list[tuple[int, int, Action]]] = [[] for _ in range(shape.ranks)]
    for number, (kind, s, i) in enumerate(starts):
        # Actions without time may start together: what others wait for comes first.
        order = (solver.value(starts[kind, s, i]), solver.value(ends[kind, s, i]), number)
        orders[where[s]].append((order[0] * 2 + (order[0] < order[1]), number, Action(kind, s, i)))
    schedule = Schedule(
        "exact", shape, where, tuple(tuple(a for *_, a in sorted(order)) for order in orders)
    )
    return Exact(schedule, solver.best_objective_bound * unit, status == cp_model.OPTIMAL)


def _limit_memory(
    model: Any,
    costs: Costs,
    starts: dict[tuple[Kind, int, int], Any],
    ends: dict[tuple[Kind, int, int], Any],
    own: Sequence[tuple[Kind, int, int]],
    limit: float,
) -> None:
    """Bytes as whole numbers, rounded in favour of what fits."""
    held, kept = costs.held_bytes, costs.kept_bytes
    scale = 1e4 / max(*held, 1e-300)
    times, changes = [], []
    for key in own:
        kind, s, _ = key
        most, rest = math.floor(held[s] * scale), math.floor(kept[s] * scale)
        times.append(starts[key] if kind is Kind.F else ends[key])
        changes.append({Kind.F: most, Kind.I: rest - most, Kind.W: -rest}[kind])
    model.add_reservoir_constraint(times, changes, 0, math.ceil(limit * scale))
