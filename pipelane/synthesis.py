"""``auto``: a schedule made from a pipeline's own costs and memory.

A list scheduler plays the pipeline once: whenever a rank is free it takes an input gradient if one
is there, else a forward if memory and the stage's share in flight allow it, and fills the gaps
that are left with weight gradients (the idea of Zero Bubble, arXiv 2401.10241, section 3.1, for
uneven stages). What it does depends on three numbers per stage: how many micro-batches may be in
flight, how large a gap must be for a weight gradient, and up to how many in flight a forward goes
first. It starts from many settings of these, then a local search changes those of the best.

The result is never worse than the schedules of the catalogue that fit into the same memory: the
best of all is what is returned.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from pipelane.actions import Action, Kind
from pipelane.catalogue import build_schedule, schedule_names
from pipelane.costs import Costs
from pipelane.errors import ScheduleError
from pipelane.memory import peak_bytes
from pipelane.schedule import Schedule, Shape, looped_placement, snake_placement
from pipelane.simulate import simulate

__all__ = ["auto"]

#: Actions that the list scheduler plans per second, roughly; turns a budget of seconds into a
#: number of tries, so that the result does not depend on how fast the machine is.
_ACTIONS_PER_SECOND = 400_000
_NAME = "auto"
_INFINITE = math.inf
_TINY = 1e-300  # where nothing takes any time


def auto(
    shape: Shape,
    costs: Costs | None = None,
    memory: float | Sequence[float] | None = None,
    *,
    seconds: float = 1.0,
    seed: int = 0,
) -> Schedule:
    """Make a schedule for these costs that fits into this memory.

    Bubble and memory: as small as it finds, within ``memory``; ``pipelane show auto`` prints the
    gap to the certified bound. Steps that follow each other without a barrier are limited by the
    span, a single one by the makespan: the sum of both, each over its least possible value, is
    minimised.

    Source: own; after the heuristic of Zero Bubble (arXiv 2401.10241, section 3.1).

    Args:
        shape: p ranks, m micro-batches, v chunks.
        costs: per stage; unit costs if not given.
        memory: bytes that activations may take, of a rank or of each; not limited if not given.
        seconds: about how long to search; at least every starting point is tried.
        seed: of the local search; the same seed gives the same schedule.

    Raises:
        ScheduleError: costs of another number of stages, or a rank has no memory for a single
            micro-batch; names rank and bytes.
    """
    costs = Costs.unit(shape.stages) if costs is None else costs
    if costs.stages != shape.stages:
        raise ScheduleError(f"costs are for {costs.stages} stages, {shape} has {shape.stages}")
    limits = _limits(shape, memory)
    known = [(s, _meters(s, costs)) for s in _from_catalogue(shape, costs, limits)]
    goal = _Goal(
        min((meters[0] for _, meters in known), default=_INFINITE),
        min((meters[1] for _, meters in known), default=_INFINITE),
    )
    own = [
        (schedule, _meters(schedule, costs))
        for placement in _placements(shape)
        for schedule in _made(shape, costs, limits, placement, goal, seconds, seed)
    ]
    if not own and not known:
        raise ScheduleError(_no_room(shape, costs, limits))
    found = own + known
    least = (
        max(min(meters[0] for _, meters in found), _TINY),
        max(min(meters[1] for _, meters in found), _TINY),
    )
    best, _ = min(found, key=lambda pair: goal.score(pair[1][0], pair[1][1], least))
    return replace(best, name=_NAME)


def _meters(schedule: Schedule, costs: Costs) -> tuple[float, float]:
    timeline = simulate(schedule, costs)
    return timeline.makespan, timeline.span


@dataclass(frozen=True)
class _Goal:
    """The least makespan and the least span of the catalogue: to be met, before all else."""

    makespan: float
    span: float

    def score(self, makespan: float, span: float, least: tuple[float, float]) -> float:
        """What is minimised: both meters over their least values, and what is above the goal."""
        above = max(0.0, makespan - self.makespan) / least[0]
        above += max(0.0, span - self.span) / least[1]
        return makespan / least[0] + span / least[1] + 10 * above


def _limits(shape: Shape, memory: float | Sequence[float] | None) -> list[float]:
    if memory is None:
        return [_INFINITE] * shape.ranks
    limits = [memory] * shape.ranks if isinstance(memory, (int, float)) else list(memory)
    if len(limits) != shape.ranks or not all(limit > 0 for limit in limits):
        raise ScheduleError(
            f"memory must be bytes above 0, one number or one for each of {shape.ranks} ranks, got "
            f"{memory!r}"
        )
    return limits


def _placements(shape: Shape) -> list[tuple[int, ...]]:
    """Looped, and with several chunks also the snake."""
    looped, snake = looped_placement(shape), snake_placement(shape)
    return [looped] if snake == looped else [looped, snake]


def _from_catalogue(shape: Shape, costs: Costs, limits: Sequence[float]) -> list[Schedule]:
    """The other schedules of this shape that fit."""
    found = []
    for name in schedule_names():
        if name == _NAME:
            continue
        try:
            schedule = build_schedule(
                name, shape.ranks, shape.microbatches, shape.chunks, costs, tuple(limits)
            )
        except ScheduleError:  # not of this shape, or a broken plug-in
            continue
        needed = peak_bytes(schedule, costs)
        if all(need <= limit for need, limit in zip(needed, limits, strict=True)):
            found.append(schedule)
    return found


def _no_room(shape: Shape, costs: Costs, limits: Sequence[float]) -> str:
    held = [0.0] * shape.ranks
    for stage, rank in enumerate(looped_placement(shape)):
        held[rank] += costs.held_bytes[stage]
    short, rank = max((held[r] - limit, r) for r, limit in enumerate(limits))
    return (
        f"no schedule fits: the stages of rank {rank} hold {held[rank]:.0f} bytes for a single "
        f"micro-batch, {short:.0f} more than the memory of {limits[rank]:.0f}; give more memory or "
        "make micro-batches smaller"
    )


@dataclass(frozen=True)
class _Policy:
    """Per stage: the most in flight, the gap for W as a share of W, and F first up to here."""

    most: tuple[int, ...]
    gap: tuple[float, ...]
    eager: tuple[int, ...]


@dataclass(frozen=True)
class _Plan:
    """What a policy leads to."""

    orders: tuple[tuple[Action, ...], ...]
    makespan: float
    span: float


def _made(
    shape: Shape,
    costs: Costs,
    limits: Sequence[float],
    placement: tuple[int, ...],
    goal: _Goal,
    seconds: float,
    seed: int,
) -> Iterator[Schedule]:
    """The best of the list scheduler with this placement: by span, by makespan, by both."""
    scheduler = _ListScheduler(shape, costs, limits, placement)
    least = scheduler.least()
    tries = max(0, int(seconds * _ACTIONS_PER_SECOND / (3 * shape.stages * shape.microbatches)))
    draw = random.Random(seed)

    def score(plan: _Plan | None) -> float:
        return _INFINITE if plan is None else goal.score(plan.makespan, plan.span, least)

    starts = [(policy, scheduler.play(policy)) for policy in scheduler.starts()]
    best_policy, best = min(starts, key=lambda pair: score(pair[1]))
    if best is None:
        return
    fastest = min((plan for _, plan in starts if plan), key=lambda plan: (plan.makespan, plan.span))
    narrowest = min(
        (plan for _, plan in starts if plan), key=lambda plan: (plan.span, plan.makespan)
    )
    for _ in range(tries - len(starts)):
        if score(best) <= 2 + 1e-9:
            break
        policy = _changed(best_policy, shape.microbatches, draw)
        plan = scheduler.play(policy)
        if plan is None:
            continue
        if score(plan) <= score(best):
            best_policy, best = policy, plan
        if plan.makespan < fastest.makespan:
            fastest = plan
        if plan.span < narrowest.span:
            narrowest = plan
    for plan in (best, fastest, narrowest):
        yield Schedule(_NAME, shape, placement, plan.orders)


def _changed(policy: _Policy, m: int, draw: random.Random) -> _Policy:
    """One to three numbers changed."""
    most, gap, eager = list(policy.most), list(policy.gap), list(policy.eager)
    for _ in range(draw.choice((1, 1, 2, 3))):
        stage, which = draw.randrange(len(most)), draw.random()
        if which < 0.4:
            most[stage] = max(1, min(m, most[stage] + draw.choice((-2, -1, 1, 2))))
        elif which < 0.7:
            gap[stage] = draw.choice((0.0, 0.25, 0.5, 0.75, 1.0))
        else:
            step = draw.choice((-m, -1, 1, 2))
            eager[stage] = max(0, min(most[stage], eager[stage] + step))
    return _Policy(tuple(most), tuple(gap), tuple(eager))


class _ListScheduler:
    """Plays a pipeline with a policy."""

    def __init__(
        self, shape: Shape, costs: Costs, limits: Sequence[float], placement: tuple[int, ...]
    ) -> None:
        stages, self.m = shape.stages, shape.microbatches
        self.shape, self.limits, self.placement = shape, limits, placement
        self.own = [
            [s for s in range(stages) if placement[s] == rank] for rank in range(shape.ranks)
        ]
        self.seconds = (costs.forward, costs.input_grad, costs.weight_grad)
        self.held, self.kept = costs.held_bytes, costs.kept_bytes
        # What must stay free behind a forward so that its micro-batch can go on to the end.
        self.reserve = [
            sum(self.held[t] for t in self.own[placement[s]] if t > s) for s in range(stages)
        ]
        self.hop = [costs.hop(placement, s, s + 1) for s in range(stages - 1)]
        self.back = [costs.hop(placement, s + 1, s) for s in range(stages - 1)]

    def least(self) -> tuple[float, float]:
        """Makespan and span that no schedule can be below: to compare them with each other."""
        forward, back, weight = self.seconds
        works = [
            self.m * sum(forward[s] + back[s] + weight[s] for s in stages) for stages in self.own
        ]
        trip = sum(forward) + sum(back) + sum(self.hop) + sum(self.back)
        return max(*works, trip, _TINY), max(*works, _TINY)

    def starts(self) -> Iterator[_Policy]:
        """Policies to begin with: as much in flight as covers the way there and back, as 1F1B
        has, or as much as fits; with weight gradients early, in between, or late."""
        stages, m = len(self.held), self.m
        forward, back, _ = self.seconds
        around = [0.0] * stages  # from the end of F until I can start, with nothing in the way
        for s in range(stages - 2, -1, -1):
            around[s] = around[s + 1] + forward[s + 1] + back[s + 1] + self.hop[s] + self.back[s]
        slowest = [max(sum(forward[t] for t in self.own[rank]), _TINY) for rank in self.placement]
        for gap, (kind, more) in product(
            (0.0, 0.5, 1.0),
            [("cover", d) for d in (-1, 0, 1, 2, 3)] + [("1f1b", d) for d in (-1, 0, 1, 2)]
            + [("all", 0)],
        ):  # fmt: skip
            if kind == "cover":
                most = [
                    math.ceil((around[s] + forward[s]) / slowest[s]) + more for s in range(stages)
                ]
            elif kind == "1f1b":
                most = [stages - s + more for s in range(stages)]
            else:
                most = [m] * stages
            yield _Policy(
                tuple(max(1, min(m, count)) for count in most), (gap,) * stages, (0,) * stages
            )

    def play(self, policy: _Policy) -> _Plan | None:
        """The orders that a policy leads to; None if it gets stuck for want of memory."""
        m, stages, ranks = self.m, len(self.held), self.shape.ranks
        last = stages - 1
        forwards, backs, weights = [0] * stages, [0] * stages, [0] * stages
        # When the next input of a stage is there; micro-batches come in order.
        forward_at = [[_INFINITE] * m for _ in range(stages)]
        back_at = [[_INFINITE] * m for _ in range(stages)]
        forward_at[0] = [0.0] * m
        clock, used = [0.0] * ranks, [0.0] * ranks
        first: list[float | None] = [None] * ranks
        orders: list[list[Action]] = [[] for _ in range(ranks)]
        events = [(0.0, rank) for rank in range(ranks)]
        while events:
            now, rank = heapq.heappop(events)
            if now < clock[rank]:
                continue
            choice, wake = self._choose(
                policy, rank, now, forwards, backs, weights, forward_at, back_at, used[rank]
            )
            if choice is None:
                if now < wake < _INFINITE:
                    heapq.heappush(events, (wake, rank))
                continue
            kind, s = choice
            end = now + self.seconds[kind][s]
            if first[rank] is None:
                first[rank] = now
            clock[rank] = end
            heapq.heappush(events, (end, rank))
            if kind == 0:
                number = forwards[s]
                forwards[s] += 1
                used[rank] += self.held[s]
                orders[rank].append(Action(Kind.F, s, number))
                if s == last:
                    back_at[s][number] = end
                else:
                    there = end + self.hop[s]
                    forward_at[s + 1][number] = there
                    heapq.heappush(events, (there, self.placement[s + 1]))
            elif kind == 1:
                number = backs[s]
                backs[s] += 1
                used[rank] -= self.held[s] - self.kept[s]
                orders[rank].append(Action(Kind.I, s, number))
                if s:
                    there = end + self.back[s - 1]
                    back_at[s - 1][number] = there
                    heapq.heappush(events, (there, self.placement[s - 1]))
            else:
                number = weights[s]
                weights[s] += 1
                used[rank] -= self.kept[s]
                orders[rank].append(Action(Kind.W, s, number))
        if sum(weights) < m * stages:
            return None
        spans = [end - (begin or 0.0) for end, begin in zip(clock, first, strict=True)]
        return _Plan(tuple(map(tuple, orders)), max(clock), max(spans))

    def _choose(
        self,
        policy: _Policy,
        rank: int,
        now: float,
        forwards: Sequence[int],
        backs: Sequence[int],
        weights: Sequence[int],
        forward_at: Sequence[Sequence[float]],
        back_at: Sequence[Sequence[float]],
        used: float,
    ) -> tuple[tuple[int, int] | None, float]:
        """What the rank does now, (0 F, 1 I, 2 W) and the stage; or when it should look again."""
        m, limit = self.m, self.limits[rank] * (1 + 1e-12)
        ready_back = ready_forward = pending = -1
        blocked = False
        wake = _INFINITE
        for s in reversed(self.own[rank]):  # later stages first: they free memory
            if backs[s] < m:
                there = back_at[s][backs[s]]
                if there <= now:
                    ready_back = s if ready_back < 0 else ready_back
                else:
                    wake = min(wake, there)
            if backs[s] > weights[s] and (pending < 0 or self.kept[s] > self.kept[pending]):
                pending = s
            if forwards[s] < m and forwards[s] - backs[s] < policy.most[s]:
                there = forward_at[s][forwards[s]]
                if used + self.held[s] + self.reserve[s] > limit:
                    blocked = blocked or there <= now
                elif there <= now:
                    ready_forward = s if ready_forward < 0 else ready_forward
                else:
                    wake = min(wake, there)
        if ready_forward >= 0:
            eager = forwards[ready_forward] - backs[ready_forward] < policy.eager[ready_forward]
            if ready_back < 0 or eager:
                return (0, ready_forward), now
        if ready_back >= 0:
            return (1, ready_back), now
        if pending >= 0:
            gap = policy.gap[pending] * self.seconds[2][pending]
            if blocked or wake == _INFINITE or wake - now >= gap:
                return (2, pending), now
        return None, wake
