"""Breadth-first: every micro-batch through a chunk before the next chunk."""

from __future__ import annotations

from pipelane.actions import Action, Kind
from pipelane.schedule import Schedule, Shape

from ._chunks import default_chunks


@default_chunks(2)
def bfs(shape: Shape) -> Schedule:
    """GPipe over looped chunks: all forwards chunk by chunk, then all backwards, last chunk first.

    Source: breadth-first pipeline parallelism (arXiv 2211.05953, section 3.2). Each chunk's weights
    are needed in one stretch, which suits sharded data parallelism: gathered once, reduced once.

    Makespan max(m v + p - 1, v p + m - 1)(f + b) for equal stages (f, b per chunk); bubble
    fraction (p - 1) / (m v) of the work for m >= p; memory: all m v chunks.
    """
    p, m = shape.ranks, shape.microbatches
    orders = []
    for rank in range(p):
        stages = range(rank, shape.stages, p)
        orders.append(
            [Action(Kind.F, s, i) for s in stages for i in range(m)]
            + [Action(Kind.B, s, i) for s in reversed(stages) for i in range(m)]
        )
    return Schedule.looped("bfs", shape, orders)
