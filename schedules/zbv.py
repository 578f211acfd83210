"""ZB-V: zero bubble at 1F1B's memory, with two chunks per rank in a V."""

from __future__ import annotations

from pipelane.actions import Action, Kind
from pipelane.schedule import Schedule, Shape, snake_placement

from ._chunks import cut, default_chunks, require_chunks


@default_chunks(2)
def zbv(shape: Shape) -> Schedule:
    """The last stage lies on rank 0 beside the first: backwards can begin at once.

    Source: controllable memory (arXiv 2405.15362, section 3.3; called ZB-V in 2401.10241, section
    6). Rank r has stages r (down) and 2p - 1 - r (up); warm-up, steady state with one of each
    kind per chunk, and a cool-down that fills bubbles with weight gradients. For m < 2p - 1 it is
    made for 2p - 1 micro-batches and cut to m.

    Makespan 6 m + p - 1 and span 6 m for m >= 2p - 1 and F = I = W = 1 per chunk: no bubble.
    Memory: at most 2p chunks on every rank, as much as p micro-batches of 1F1B's undivided stage.
    """
    require_chunks("zbv", shape, 2)
    p, m = shape.ranks, shape.microbatches
    orders = [cut(_order(rank, p, max(m, 2 * p - 1)), m) for rank in range(p)]
    return Schedule("zbv", shape, snake_placement(shape), tuple(map(tuple, orders)))


def _order(rank: int, p: int, m: int) -> list[Action]:
    down, up = rank, 2 * p - 1 - rank
    done = dict.fromkeys((kind, s) for kind in (Kind.F, Kind.I, Kind.W) for s in (down, up))
    order: list[Action] = []

    def count(kind: Kind, stage: int) -> int:
        return done[kind, stage] or 0

    def add(*actions: tuple[Kind, int]) -> None:
        for kind, stage in actions:
            order.append(Action(kind, stage, count(kind, stage)))
            done[kind, stage] = count(kind, stage) + 1

    add(*[(Kind.F, down)] * (2 * (p - rank) - 1))
    add(*[(Kind.F, up), (Kind.F, down)] * rank)
    add(*[(Kind.F, up), (Kind.I, up), (Kind.W, up)] * (p - rank))
    while count(Kind.F, up) < m:
        if count(Kind.F, down) < m:
            add((Kind.F, down))
        add((Kind.I, down), (Kind.W, down), (Kind.F, up), (Kind.I, up), (Kind.W, up))
    add(*[(Kind.I, down), (Kind.I, up)] * rank)
    add(*[(Kind.I, down), (Kind.W, down)] * (p - rank))
    for stage in (up, down):
        add(*[(Kind.W, stage)] * (m - count(Kind.W, stage)))
    return order
