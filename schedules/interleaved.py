"""Interleaved 1F1B, depth-first: several chunks per rank, so that warm-up is shorter."""

from __future__ import annotations

from pipelane.actions import Action, Kind
from pipelane.errors import ScheduleError
from pipelane.schedule import Schedule, Shape

from ._chunks import default_chunks


@default_chunks(2)
def interleaved(shape: Shape, *, group: int | None = None) -> Schedule:
    """1F1B over chunks: groups of micro-batches run through one chunk before the next.

    Source: Megatron-LM (arXiv 2104.04473, section 2.2); groups of nearly equal size instead of
    exactly p, so that every m works. Rank r runs G (v - 1) + 2 (p - 1 - r) forwards ahead, where
    G is the largest group.

    Makespan max(m v + p - 1, v p + m - 1)(f + b) for equal stages (f, b per chunk), the least
    for looped chunks with whole backwards; bubble fraction (p - 1) / (m v) of the work for
    m >= p; memory: min(m v, G (v - 1) + 2 (p - 1 - r) + 1) chunks on rank r.

    Args:
        shape: any p, m and v.
        group: micro-batches per group; m is cut into max(1, m // p) groups if not given.
    """
    p, m, v = shape.ranks, shape.microbatches, shape.chunks
    if group is not None and not 1 <= group <= m:
        raise ScheduleError(f"interleaved: group must be from 1 to m = {m}, got {group}")
    count = max(1, m // p) if group is None else -(-m // group)
    if group is None:
        size, more = divmod(m, count)
        ends = [size * (i + 1) + min(i + 1, more) for i in range(count)]
    else:
        ends = [min(m, group * (i + 1)) for i in range(count)]
    groups = [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    largest = max(map(len, groups))
    orders = []
    for rank in range(p):
        stages = range(rank, shape.stages, p)
        forwards = [Action(Kind.F, s, i) for g in groups for s in stages for i in g]
        backwards = [Action(Kind.B, s, i) for g in groups for s in reversed(stages) for i in g]
        ahead = min(m * v, largest * (v - 1) + 2 * (p - 1 - rank))
        order = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            order += [forward, backward]
        orders.append(order + backwards[m * v - ahead :])
    return Schedule.looped("interleaved", shape, orders)
