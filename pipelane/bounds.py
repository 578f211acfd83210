"""Certified lower bounds: what no schedule with the same stages can beat, and why.

Every bound holds for every order of the same actions (same placement, micro-batches and kind of
backward), also with uneven stages, links with latency and bytes, and a memory limit. Each comes
from one rank and some stages Q of it, and counts only what is certain:

- *head*: no forward of Q can start before a micro-batch came through the stages before Q;
- the *work* of Q;
- *beta*: before Q's first backward, a micro-batch must go from Q's first stage to the end and back
  to Q's last. Meanwhile Q can only run forwards, at most as many as fit in memory;
- *delta*, for a single stage with fewer slots k than micro-batches: the last forward comes after
  the first backward, its micro-batch also takes the round trip R, and at most k - 1 others are left
  to work on meanwhile;
- *slots*: a micro-batch is held from its forward to the end of its backward, F + R + I + W; k at a
  time, m need ceil(m / k) such stays, one after the other. For several stages per rank: held bytes
  times seconds cannot exceed the rank's memory times its span;
- *later stages*: a rank's window holds the way to a later stage, all its work, and the way back;
- *tail*: after Q's last backward, that micro-batch goes back through the stages before Q, and each
  of them has a weight gradient to do.

Q is all of a rank's stages, or those from one of them on, or a single one. For a looped placement
with equal stages and whole backwards this gives max(m v + p - 1, v p + m - 1)(f + b).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from pipelane.actions import Kind
from pipelane.costs import Costs
from pipelane.errors import ConfigError
from pipelane.schedule import Schedule

__all__ = ["Bound", "makespan_bound", "span_bound", "span_bounds"]


class Bound(NamedTuple):
    """A certified lower bound in seconds, and what it comes from."""

    seconds: float
    reason: str


def makespan_bound(
    schedule: Schedule, costs: Costs, memory: float | Sequence[float] | None = None
) -> Bound:
    """A lower bound on the makespan of any schedule with this placement, m and kind of backward.

    Args:
        schedule: gives placement, number of micro-batches and kind of backward; its orders do not
            matter.
        costs: seconds and bytes per stage; a stage's ``activation_bytes`` are held from F to the
            end of B or I, and ``weight_grad_bytes`` of them to the end of W.
        memory: bytes per rank for activations, one number or one per rank; None for no limit.

    Raises:
        ConfigError: a rank cannot hold a single micro-batch, or memory has the wrong length.
    """
    facts = _facts(schedule, costs, memory)
    if facts.forward_only:
        return max(_forward_bounds(facts), key=_seconds)
    found = [Bound(facts.whole_way, "one micro-batch's way forward and back")]
    for rank, own in enumerate(facts.own):
        for stages in _subsets(own):
            found += _window_bounds(facts, rank, stages, facts.head[stages[0]], tail=True)
        if own:
            found += _memory_bounds(facts, rank, facts.head[own[0]], tail=True)
    return max(found, key=_seconds)


def span_bound(
    schedule: Schedule, costs: Costs, memory: float | Sequence[float] | None = None
) -> Bound:
    """A lower bound on the span, the widest rank's window; arguments as of the makespan's."""
    return max(span_bounds(schedule, costs, memory), key=_seconds, default=Bound(0.0, "no rank"))


def span_bounds(
    schedule: Schedule, costs: Costs, memory: float | Sequence[float] | None = None
) -> tuple[Bound, ...]:
    """Per rank, a lower bound on its window from first start to last end."""
    facts = _facts(schedule, costs, memory)
    bounds = []
    for rank, own in enumerate(facts.own):
        found = [Bound(0.0, f"rank {rank}: no stage")]
        if facts.forward_only:
            seconds = facts.m * sum(facts.forward[s] for s in own)
            found.append(Bound(seconds, f"rank {rank}: work"))
        else:
            for stages in _subsets(own):
                found += _window_bounds(facts, rank, stages, 0.0, tail=False)
            found += _memory_bounds(facts, rank, 0.0, tail=False)
            found += _later_stages(facts, rank)
        bounds.append(max(found, key=_seconds))
    return tuple(bounds)


@dataclass(frozen=True)
class _Facts:
    """Sums along the chain of stages. Seconds; by stage unless said otherwise."""

    m: int
    own: tuple[tuple[int, ...], ...]  # by rank: its stages, ascending
    forward: tuple[float, ...]
    back: tuple[float, ...]  # I, or a whole B
    weight: tuple[float, ...]  # W, or 0 with whole backwards
    head: list[float]  # from a micro-batch's start to its arrival at this stage
    tail: list[float]  # from the end of this stage's I to the end of stage 0's
    last_work: list[float]  # the least that is done after the end of this stage's last I
    turn: list[float]  # from the end of this stage's F to the start of its I
    held: tuple[float, ...]  # bytes of one micro-batch, from F to I or B
    kept: tuple[float, ...]  # of these, from I to W
    memory: tuple[float, ...] | None  # by rank
    forward_only: bool

    @property
    def whole_way(self) -> float:
        end = self.head[-1] + self.forward[-1] + self.back[-1]
        return end + self.last_work[-1]

    def slots(self, rank: int, stage: int) -> int:
        """How many micro-batches of a stage fit in the rank's memory, at most m."""
        if self.memory is None or self.held[stage] == 0:
            return self.m
        return min(self.m, _whole(self.memory[rank] / self.held[stage]))


def _whole(ratio: float) -> int:
    """Rounded down, but for what is whole up to rounding: a bound must not be too high."""
    return math.floor(ratio * (1 + 1e-9) + 1e-9) if ratio < 2**53 else 2**53


def _facts(schedule: Schedule, costs: Costs, memory: float | Sequence[float] | None) -> _Facts:
    stages, placement = costs.stages, schedule.placement
    if len(placement) != stages:
        raise ConfigError(
            f"costs are for {stages} stages, schedule {schedule.name!r} has {len(placement)}"
        )
    back, weight, forward_only = _backward(schedule, costs)
    forward = costs.forward

    way = partial(costs.hop, placement)
    head, tail, last_work = [0.0] * stages, [0.0] * stages, [0.0] * stages
    last_work[0] = weight[0]
    for s in range(1, stages):
        head[s] = head[s - 1] + forward[s - 1] + way(s - 1, s)
        step = way(s, s - 1) + back[s - 1]
        tail[s] = tail[s - 1] + step
        last_work[s] = max(weight[s], step + last_work[s - 1])
    turn = [0.0] * stages
    for s in range(stages - 2, -1, -1):
        after = forward[s + 1] + turn[s + 1] + back[s + 1]
        turn[s] = way(s, s + 1) + after + way(s + 1, s)
    own: list[list[int]] = [[] for _ in range(schedule.shape.ranks)]
    for s, rank in enumerate(placement):
        own[rank].append(s)
    held = costs.held_bytes
    limits = _limits(memory, tuple(map(tuple, own)), held)
    return _Facts(
        schedule.shape.microbatches, tuple(map(tuple, own)), forward, back, weight, head, tail,
        last_work, turn, held, costs.kept_bytes, limits, forward_only,
    )  # fmt: skip


def _backward(
    schedule: Schedule, costs: Costs
) -> tuple[tuple[float, ...], tuple[float, ...], bool]:
    """Seconds of I and of W that every backward takes at least; and whether there is none.

    A whole backward is an I as long as it, without W. Where some backwards are whole and some are
    split, a whole one is taken as an I and a W one after the other, and both as no longer than
    they are in either form.
    """
    kinds = {a.kind for order in schedule.orders for x in order for a in x.parts or (x,)}
    stages = range(costs.stages)
    whole = tuple(costs.backward(s) for s in stages)
    if Kind.I not in kinds and Kind.W not in kinds:
        return whole, (0.0,) * costs.stages, bool(kinds) and Kind.B not in kinds
    if Kind.B not in kinds:
        return costs.input_grad, costs.weight_grad, False
    back = tuple(min(costs.input_grad[s], whole[s]) for s in stages)
    return back, tuple(min(costs.weight_grad[s], whole[s] - back[s]) for s in stages), False


def _limits(
    memory: float | Sequence[float] | None, own: Sequence[Sequence[int]], held: Sequence[float]
) -> tuple[float, ...] | None:
    if memory is None:
        return None
    many = tuple(memory) if isinstance(memory, Sequence) else (memory,) * len(own)
    if len(many) != len(own):
        raise ConfigError(f"memory has {len(many)} entries for {len(own)} ranks")
    for rank, (limit, stages) in enumerate(zip(many, own, strict=True)):
        if math.isnan(limit) or limit < 0:
            raise ConfigError(f"memory of rank {rank} must be at least 0 bytes, got {limit}")
        needed = sum(held[s] for s in stages)
        if needed > limit * (1 + 1e-9):
            raise ConfigError(
                f"rank {rank} has {limit:g} bytes for activations, but one micro-batch needs "
                f"{needed:g} there; give it more memory, or cut smaller stages or micro-batches"
            )
    return many


def _subsets(own: Sequence[int]) -> Iterator[Sequence[int]]:
    """All stages, those from one of them on, and each by itself."""
    for first in range(len(own)):
        yield own[first:]
    for stage in own[:-1]:
        yield (stage,)


def _window_bounds(
    facts: _Facts, rank: int, stages: Sequence[int], start: float, *, tail: bool
) -> Iterator[Bound]:
    """From the first forward of these stages on: their work, and idle time around it."""
    m, first, top = facts.m, stages[0], stages[-1]
    forward = sum(facts.forward[s] for s in stages)
    back = sum(facts.back[s] for s in stages)
    weight = sum(facts.weight[s] for s in stages)
    # From the start of F on the first of them to the start of I on the last of them.
    way = facts.head[top] - facts.head[first] + facts.forward[top] + facts.turn[top]
    free = max(0.0, way - m * forward)
    beta = max(0.0, way - _forwards_that_fit(facts, rank, stages))
    delta = delta_back = 0.0
    if len(stages) == 1 and (slots := facts.slots(rank, top)) < m:
        delta = max(0.0, facts.turn[top] - _work_left(facts, rank, top, slots))
        # Weight gradients done meanwhile are not counted in the time up to the last I.
        delta_back = max(0.0, facts.turn[top] - (slots - 1) * back)
    limited = beta > free or delta > 0
    who = f"rank {rank}: its memory, " if limited else f"rank {rank}: "
    window = start + m * (forward + back + weight) + beta + delta
    if not tail:
        yield Bound(window, f"{who}{'warm-up and ' if beta else ''}work")
        return
    if weight:
        yield Bound(window, f"{who}warm-up and work")
    limited = beta > free or delta_back > 0
    who = f"rank {rank}: its memory, " if limited else f"rank {rank}: "
    end = start + m * (forward + back) + beta + delta_back + facts.last_work[first]
    yield Bound(end, f"{who}warm-up, work and cool-down")


def _forwards_that_fit(facts: _Facts, rank: int, stages: Sequence[int]) -> float:
    """The most seconds of these stages' forwards that can run before anything is freed.

    A stage is filled up with the others empty, most seconds per byte first; the last micro-batch
    counts in part, unless there is only one stage.
    """
    m = facts.m
    if facts.memory is None:
        return m * sum(facts.forward[s] for s in stages)
    if len(stages) == 1:
        return facts.slots(rank, stages[0]) * facts.forward[stages[0]]
    left, seconds = facts.memory[rank] * (1 + 1e-9), 0.0
    rate = {s: facts.forward[s] / facts.held[s] if facts.held[s] else math.inf for s in stages}
    for s in sorted(stages, key=rate.__getitem__, reverse=True):
        count = m if not facts.held[s] else min(m, left / facts.held[s])
        seconds += count * facts.forward[s]
        left -= count * facts.held[s]
    return seconds


def _work_left(facts: _Facts, rank: int, stage: int, slots: int) -> float:
    """The most seconds of work that other micro-batches can have left after a stage's last F.

    Of those in memory a have both I and W to do, and b only W, which takes less room.
    """
    back, weight = facts.back[stage], facts.weight[stage]
    held, kept = facts.held[stage], facts.kept[stage]
    assert facts.memory is not None  # or all would fit
    most = 0.0
    for a in range(slots):
        left = facts.memory[rank] * (1 + 1e-9) - (a + 1) * held
        b = facts.m - 1 - a
        if kept > 0:
            b = min(b, max(0, _whole(left / kept)))
        most = max(most, a * (back + weight) + b * weight)
    return most


def _memory_bounds(facts: _Facts, rank: int, start: float, *, tail: bool) -> Iterator[Bound]:
    """What a rank's memory can hold over time; with ``tail`` also what comes after its last I."""
    # All of a micro-batch is in memory until its I ends; until its W ends a part of it may be.
    there = {s: facts.forward[s] + facts.turn[s] + facts.back[s] for s in facts.own[rank]}
    for s, whole in there.items():
        slots, stay = facts.slots(rank, s), whole
        if facts.kept[s] >= facts.held[s] or _alone(facts, rank, s, slots):
            stay += facts.weight[s]
        turns = -(-facts.m // slots)
        why = f"room for {slots} of {facts.m} micro-batches" if turns > 1 else "round trip"
        begin, end = (facts.head[s], facts.last_work[s]) if tail else (start, facts.weight[s])
        yield Bound(begin + (turns - 1) * stay + whole + end, f"rank {rank}: {why}")
    if facts.memory is not None and 0 < facts.memory[rank] < math.inf:
        area = facts.m * sum(
            facts.held[s] * stay + facts.kept[s] * facts.weight[s] for s, stay in there.items()
        )
        yield Bound(start + area / facts.memory[rank], f"rank {rank}: its memory over time")


def _alone(facts: _Facts, rank: int, stage: int, slots: int) -> bool:
    """Whether no micro-batch can begin while another one waits for its W."""
    if slots != 1 or facts.memory is None:
        return False
    return facts.held[stage] + facts.kept[stage] > facts.memory[rank] * (1 + 1e-9)


def _later_stages(facts: _Facts, rank: int) -> Iterator[Bound]:
    """A rank's window also holds all the work of a later stage, and the way there and back."""
    if not facts.own[rank]:
        return
    here = facts.own[rank][0]
    around = facts.head[here] + facts.tail[here] - facts.weight[here]
    for s in range(here + 1, len(facts.forward)):
        work = facts.m * (facts.forward[s] + facts.back[s])
        seconds = facts.head[s] + work + facts.tail[s] - around
        yield Bound(seconds, f"rank {rank}: the way to stage {s} and back, and the work there")


def _forward_bounds(facts: _Facts) -> Iterator[Bound]:
    """Evaluation: a rank's forwards, before them the way to it, after them the way to the end."""
    end = facts.head[-1] + facts.forward[-1]
    yield Bound(end, "one micro-batch's way forward")
    for rank, own in enumerate(facts.own):
        for first in range(len(own)):
            for last in (len(own), first + 1):
                part = own[first:last]
                work = facts.m * sum(facts.forward[s] for s in part)
                after = end - facts.head[part[-1]] - facts.forward[part[-1]]
                seconds = facts.head[part[0]] + work + after
                yield Bound(seconds, f"rank {rank}: warm-up, work and cool-down")


def _seconds(bound: Bound) -> float:
    return bound.seconds
