"""Lower bounds on the makespan that hold for every schedule of the given stages."""

from __future__ import annotations

from typing import NamedTuple

from pipelane.costs import Costs
from pipelane.schedule import Schedule

__all__ = ["Bound", "makespan_bound"]


class Bound(NamedTuple):
    """A certified lower bound in seconds, and what it comes from."""

    seconds: float
    reason: str


def makespan_bound(schedule: Schedule, costs: Costs) -> Bound:
    """A lower bound on the makespan of any schedule with this placement, m and kind of backward.

    For each rank: nothing can start there before the first micro-batch has come through the
    stages before it (head); it must do all its work; with one stage per rank it idles at least
    ``R + F - m F`` before its first backward, where R is the way to the last stage and back; and
    after its last input gradient the stages before it still have theirs to do (tail). With
    weight gradients apart, the last of stage 0 comes after that. Also: one micro-batch must go
    all the way forward and back. Memory is taken as unlimited. See design notes in
    ``docs/how-it-works.md``, section "Bounds".
    """
    split = schedule.splits_backward
    stages, m = costs.stages, schedule.shape.microbatches
    placement = schedule.placement
    back = [costs.input_grad[s] if split else costs.backward(s) for s in range(stages)]

    def latency(a: int, b: int) -> float:
        if placement[a] == placement[b]:
            return 0.0
        link = costs.link_between(placement[a], placement[b])
        size = costs.boundary_bytes[min(a, b)] if costs.boundary_bytes else 0.0
        return link.latency + size / link.bandwidth

    head, tail = [0.0] * stages, [0.0] * stages
    for s in range(1, stages):
        head[s] = head[s - 1] + costs.forward[s - 1] + latency(s - 1, s)
        tail[s] = tail[s - 1] + back[s - 1] + latency(s, s - 1)
    round_trip = [0.0] * stages
    for s in range(stages - 2, -1, -1):
        round_trip[s] = (
            round_trip[s + 1]
            + costs.forward[s + 1]
            + back[s + 1]
            + latency(s, s + 1)
            + latency(s + 1, s)
        )
    best = Bound(
        head[-1] + costs.forward[-1] + back[-1] + tail[-1],
        "one micro-batch's way forward and back",
    )
    for rank in range(schedule.shape.ranks):
        own = schedule.stages_of(rank)
        work = m * sum(costs.forward[s] + back[s] for s in own)
        start = min(head[s] for s in own)
        wait = 0.0
        if len(own) == 1:
            s = own[0]
            wait = max(0.0, round_trip[s] + costs.forward[s] - m * costs.forward[s])
        after = min(tail[s] for s in own)
        if split:
            after += costs.weight_grad[0] if 0 not in own else 0.0
            whole = start + work + wait + m * sum(costs.weight_grad[s] for s in own)
            best = max(best, Bound(whole, f"rank {rank}: warm-up and work"), key=_seconds)
        found = Bound(start + work + wait + after, f"rank {rank}: warm-up, work and cool-down")
        best = max(best, found, key=_seconds)
    return best


def _seconds(bound: Bound) -> float:
    return bound.seconds
