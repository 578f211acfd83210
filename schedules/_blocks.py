"""A building block of a V, repeated; and its head and tail reordered."""

from __future__ import annotations

from itertools import product

from pipelane.actions import Action, Kind

from ._listing import list_schedule

#: A block is repeated every 6 units: F, I and W of two chunks, a unit each.
_PERIOD = 6
#: Ranks times micro-batches up to which several ways to reorder are tried.
_SEARCHED = 5_000


def block(p: int, pace: tuple[int, int, int, int]) -> dict[tuple[Kind, int], int]:
    """Start of F and I of every stage for micro-batch 0.

    ``pace`` is the units from rank to rank: F down, F up, I of the upper chunk (which goes down
    again), I of the lower chunk. Where the direction changes it waits as little as it can, so
    that no two actions of a rank fall on the same unit of the period.
    """
    found: list[tuple[int, dict[tuple[Kind, int], int]]] = []
    for gaps in product(range(1, _PERIOD + 1), repeat=3):
        start: dict[tuple[Kind, int], int] = {}
        at = 0
        for s in range(2 * p):
            start[Kind.F, s] = at
            at += gaps[0] if s == p - 1 else pace[0] if s < p else pace[1]
        at = start[Kind.F, 2 * p - 1] + gaps[1]
        for s in reversed(range(2 * p)):
            start[Kind.I, s] = at
            at += gaps[2] if s == p else pace[2] if s > p else pace[3]
        pairs = [(rank, 2 * p - 1 - rank) for rank in range(p)]
        lives = [sum(start[Kind.I, s] - start[Kind.F, s] for s in pair) for pair in pairs]
        units = [{start[kind, s] % _PERIOD for kind in (Kind.F, Kind.I) for s in x} for x in pairs]
        if all(len(unit) == 4 for unit in units):
            found.append((max(lives), start))
    shortest = min(life for life, _ in found)
    blocks = [start for life, start in found if life < shortest + _PERIOD]
    # Which one needs the least memory depends on where the weight gradients fit in.
    steady = (shortest + 2 * _PERIOD) // _PERIOD + 2
    peaks = [[_peak(repeated(block, rank, p, steady)) for rank in range(p)] for block in blocks]
    return min(zip(peaks, blocks, strict=True), key=lambda pair: (max(pair[0]), sum(pair[0])))[1]


def repeated(pattern: dict[tuple[Kind, int], int], rank: int, p: int, m: int) -> list[Action]:
    """The block, repeated; weight gradients take the units that are free, first come first."""
    taken = {}
    for (kind, s), start in pattern.items():
        if s in (rank, 2 * p - 1 - rank):
            for i in range(m):
                taken[start + _PERIOD * i] = Action(kind, s, i)
    order: list[Action] = []
    waiting: list[Action] = []
    unit = 0
    while taken or waiting:
        action = taken.pop(unit, None)
        if action is None and waiting:
            action = waiting.pop(0)
        unit += 1
        if action is not None:
            order.append(action)
            if action.kind is Kind.I:
                waiting.append(Action(Kind.W, action.stage, action.microbatch))
    return order


def reordered(orders: list[list[Action]], placement: tuple[int, ...], m: int) -> list[list[Action]]:
    """The shortest of some list schedules that need no more memory than the repeated block."""
    limit = [_peak(order) for order in orders]
    plan = {action: at for order in orders for at, action in enumerate(order)}
    made = [(orders, _makespan(orders, placement))]
    most = max(limit)
    # With fewer on their way than fit, the upper chunks find room when it is their turn.
    shares = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0) if len(limit) * m <= _SEARCHED else (0.8,)
    for ahead in sorted({max(1, round(share * most)) for share in shares}):
        made += [
            list_schedule(placement, m, limit=limit, split=True, plan=chosen, ahead=ahead)
            for chosen in (plan, None)
        ]
    return min(made, key=lambda found: found[1])[0]


def _makespan(orders: list[list[Action]], placement: tuple[int, ...]) -> int:
    """With F = I = W = 1."""
    last = len(placement) - 1
    ends: dict[Action, int] = {}
    clock, position = [0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                kind, s, i, _ = order[position[rank]]
                needs = None
                if kind is Kind.F and s:
                    needs = Action(Kind.F, s - 1, i)
                elif kind is Kind.I:
                    needs = Action(Kind.I, s + 1, i) if s < last else Action(Kind.F, s, i)
                if needs is not None and needs not in ends:
                    break
                clock[rank] = max(clock[rank], ends[needs] if needs else 0) + 1
                ends[order[position[rank]]] = clock[rank]
                position[rank] += 1
                moved = True
    return max(clock)


def _peak(order: list[Action]) -> int:
    alive = peak = 0
    for action in order:
        alive += (action.kind is Kind.F) - (action.kind is Kind.W)
        peak = max(peak, alive)
    return peak
