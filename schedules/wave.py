"""Wave: stages go down the ranks and up again, backwards first."""

from __future__ import annotations

from pipelane.schedule import Schedule, Shape, snake_placement

from ._chunks import default_chunks
from ._listing import list_schedule


@default_chunks(2)
def wave(shape: Shape) -> Schedule:
    """List scheduling on the snake placement: a free rank takes a backward before a forward.

    Source: the wave-like pipelines of Hanayo (SC 2023, arXiv 2308.15762, section 3). Neighbouring
    chunks on the first and the last rank need no message between them, and a micro-batch comes
    back to rank 0 sooner than in loops.

    Makespan as it comes out (p = 4, m = 8, v = 2, F = I = W = 1 per chunk: see the catalogue in
    the docs); memory: at most min(m v, 2 p v) chunks on a rank.
    """
    placement = snake_placement(shape)
    most = 2 * shape.ranks * shape.chunks
    limit = [max(most, shape.chunks)] * shape.ranks
    orders, _ = list_schedule(placement, shape.microbatches, limit=limit, split=False)
    return Schedule("wave", shape, placement, tuple(map(tuple, orders)))
