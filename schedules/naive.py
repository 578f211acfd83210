"""Naive pipeline: one micro-batch at a time, only one rank busy."""

from __future__ import annotations

from pipelane.actions import Action, Kind
from pipelane.schedule import Schedule, Shape

from ._chunks import require_chunks


def naive(shape: Shape) -> Schedule:
    """Each micro-batch goes all the way forward and back before the next one starts.

    This is plain model parallelism with gradient accumulation, the baseline of GPipe
    (arXiv 1811.06965, section 2.3). Makespan m * p * (f + b); bubble fraction p - 1 of the work;
    memory: one micro-batch's activations per rank.
    """
    require_chunks("naive", shape, 1)
    orders = [
        [Action(kind, rank, i) for i in range(shape.microbatches) for kind in (Kind.F, Kind.B)]
        for rank in range(shape.ranks)
    ]
    return Schedule.looped("naive", shape, orders)
