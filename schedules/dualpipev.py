"""DualPipeV: forwards and backwards of a V run as overlapped pairs."""

from __future__ import annotations

from collections import deque

from pipelane.actions import Action, Kind
from pipelane.schedule import Schedule, Shape, snake_placement

from ._chunks import cut, default_chunks, require_chunks


@default_chunks(2)
def dualpipev(shape: Shape) -> Schedule:
    """In the steady state each action is a forward of one chunk beside a backward of the other.

    Source: DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1), cut in half: one copy of the
    weights, two chunks per rank in a V. A pair F & B hides the communication inside one part
    behind the computing of the other; without such communication it takes as long as both. For
    m < 2p it is made for 2p micro-batches and cut to m.

    Makespan 6 m + 2 (p - 1) for m >= 2p, F = I = W = 1 per chunk, and pairs as long as their
    parts; memory: at most 2p + 1 chunks on every rank.
    """
    require_chunks("dualpipev", shape, 2)
    p, m = shape.ranks, shape.microbatches
    orders = [cut(_order(rank, p, max(m, 2 * p)), m) for rank in range(p)]
    return Schedule("dualpipev", shape, snake_placement(shape), tuple(map(tuple, orders)))


def _order(rank: int, p: int, m: int) -> list[Action]:
    down, up = rank, 2 * p - 1 - rank
    forwards, backwards = {down: 0, up: 0}, {down: 0, up: 0}
    waiting: deque[Action] = deque()  # weight gradients
    order: list[Action] = []

    def forward(stage: int) -> Action:
        forwards[stage] += 1
        return Action(Kind.F, stage, forwards[stage] - 1)

    def backward(stage: int, *, split: bool = False) -> Action:
        number = backwards[stage]
        backwards[stage] += 1
        if split:
            waiting.append(Action(Kind.W, stage, number))
        return Action(Kind.I if split else Kind.B, stage, number)

    def pair(ahead: int, back: int) -> Action:
        return Action(Kind.OVERLAP, -1, -1, (forward(ahead), backward(back)))

    order += [forward(down) for _ in range(2 * (p - 1 - rank))]
    for _ in range(rank + 1):
        order += [forward(down), forward(up)]
    for _ in range(p - 1 - rank):
        order += [backward(up, split=True), waiting.popleft(), forward(up)]
    for turn in range(m - 2 * p + rank + 1):
        if turn == 0 and rank == p - 1:  # here the pair's two parts follow from each other
            order += [forward(down), backward(up)]
        else:
            order.append(pair(down, up))
        order.append(pair(up, down))
    for _ in range(p - 1 - rank):
        order += [backward(up), pair(up, down)]
    # Half of the last backwards are split; odd ranks begin with the upper chunk.
    half, odd = (rank + 1) // 2, rank % 2 == 1
    for turn in range(rank + 1):
        order.append(backward(up, split=turn > half or (turn == half and odd)))
        order.append(backward(down, split=turn >= half))
    for _ in range(p - 1 - rank):
        order += [waiting.popleft(), backward(down, split=True)]
    return order + list(waiting)
