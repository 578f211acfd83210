"""Zero Bubble with one chunk per rank: weight gradients wait, and fill the bubbles."""

from __future__ import annotations

from pipelane.actions import Action, Kind
from pipelane.schedule import Schedule, Shape

from ._chunks import require_chunks


def zb_h1(shape: Shape) -> Schedule:
    """1F1B with the weight gradients late enough to shorten the way back, at 1F1B's memory.

    Source: Zero Bubble (arXiv 2401.10241, section 2.3, figure 3). F and I in 1F1B's order; rank r
    does W r micro-batches behind I.

    Makespan 3 m + p - 1 for m >= p and equal F = I = W = 1, a third of 1F1B's bubble; memory:
    min(p, m) micro-batches on every rank, counted until W: as rank 0 has in 1F1B.
    """
    return _zero_bubble("zb-h1", shape, 1)


def zb_h2(shape: Shape) -> Schedule:
    """No bubble between first and last action of a rank, for twice the memory.

    Source: Zero Bubble (arXiv 2401.10241, section 2.3, figure 3). Rank r runs 2 (p - 1 - r)
    forwards ahead, and does W 2 r micro-batches behind I.

    Makespan 3 m + p - 1 and span 3 m for m >= 2 p - 1 and equal F = I = W = 1: no bubble but for
    the shift from rank to rank, which the next step fills. Memory: min(2 p - 1, m) micro-batches
    on every rank, counted until W.
    """
    return _zero_bubble("zb-h2", shape, 2)


def _zero_bubble(name: str, shape: Shape, times: int) -> Schedule:
    """``times`` 1F1B's forwards ahead, and as many weight gradients behind."""
    require_chunks(name, shape, 1)
    p, m = shape.ranks, shape.microbatches
    orders = []
    for rank in range(p):
        ahead, behind = min(times * (p - 1 - rank), m), times * rank
        order = [Action(Kind.F, rank, i) for i in range(ahead)]
        for i in range(m):
            if ahead + i < m:
                order.append(Action(Kind.F, rank, ahead + i))
            order.append(Action(Kind.I, rank, i))
            if i >= behind:
                order.append(Action(Kind.W, rank, i - behind))
        order += [Action(Kind.W, rank, i) for i in range(max(0, m - behind), m)]
        orders.append(order)
    return Schedule.looped(name, shape, orders)
