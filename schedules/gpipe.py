"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from pipelane.actions import Action, Kind
from pipelane.schedule import Schedule, Shape

from ._chunks import require_chunks


def gpipe(shape: Shape) -> Schedule:
    """Fill the pipeline with every forward, then drain it with every backward.

    Source: GPipe (arXiv 1811.06965, section 2.3), backwards in the order of the forwards so that
    gradients accumulate as in one process. Makespan (m + p - 1)(f + b) for equal stages; bubble
    fraction (p - 1) / m of the work; memory: all m micro-batches' activations on every rank.
    """
    require_chunks("gpipe", shape, 1)
    orders = [
        [Action(kind, rank, i) for kind in (Kind.F, Kind.B) for i in range(shape.microbatches)]
        for rank in range(shape.ranks)
    ]
    return Schedule.looped("gpipe", shape, orders)
