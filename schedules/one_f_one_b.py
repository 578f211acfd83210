"""1F1B: one forward, one backward, in turn."""

from __future__ import annotations

from pipelane.actions import Action, Kind
from pipelane.schedule import Schedule, Shape

from ._chunks import require_chunks


def one_f_one_b(shape: Shape) -> Schedule:
    """Start backwards as early as possible and free activations as soon as possible.

    Source: PipeDream-Flush (arXiv 2006.09503, section 3.2) and DAPPLE (arXiv 2007.01045, section
    3). Rank r runs min(p - 1 - r, m) forwards ahead (warm-up), then one forward and one backward
    in turn (steady state), then the backwards that are left (cool-down).

    Makespan (m + p - 1)(f + b) for equal stages, as GPipe; bubble fraction (p - 1) / m of the
    work; memory: only min(p - r, m) micro-batches' activations on rank r.
    """
    require_chunks("1f1b", shape, 1)
    p, m = shape.ranks, shape.microbatches
    orders = []
    for rank in range(p):
        ahead = min(p - 1 - rank, m)
        order = [Action(Kind.F, rank, i) for i in range(ahead)]
        for i in range(ahead, m):
            order += [Action(Kind.F, rank, i), Action(Kind.B, rank, i - ahead)]
        order += [Action(Kind.B, rank, i) for i in range(m - ahead, m)]
        orders.append(order)
    return Schedule.looped("1f1b", shape, orders)
