"""List scheduling with equal stages: whoever is free takes the most urgent action that is ready."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from pipelane.actions import Action, Kind

_SECONDS = {Kind.F: 1, Kind.I: 1, Kind.W: 1, Kind.B: 2}


def list_schedule(
    placement: Sequence[int],
    microbatches: int,
    *,
    limit: Sequence[int],
    split: bool,
    plan: Mapping[Action, int] | None = None,
    ahead: int | None = None,
) -> tuple[list[list[Action]], int]:
    """Orders per rank, and their makespan with F = I = W = 1.

    A free rank takes a backward before a forward, of a later stage before an earlier one, and a
    weight gradient if nothing else is ready. A forward that makes more chunks alive than the
    rank's ``limit`` waits; a slot is kept for every later stage of the rank, so that what has
    begun can always be finished. With a ``plan`` (action -> time) the action that comes first
    there is taken instead, of those that are ready. Of stage 0, at most ``ahead`` micro-batches
    are on their way to the end and back.
    """
    stages, ranks = len(placement), max(placement) + 1
    own = [[s for s in range(stages) if placement[s] == rank] for rank in range(ranks)]
    later = [sum(placement[t] == placement[s] for t in range(s + 1, stages)) for s in range(stages)]
    back = Kind.I if split else Kind.B
    ready: list[dict[tuple[Kind, int], int]] = [{} for _ in range(ranks)]  # inputs that are there
    ready[0][Kind.F, 0] = microbatches
    count = {(kind, s): 0 for kind in Kind for s in range(stages)}
    alive, free_at = [0] * ranks, [0] * ranks
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    events: list[tuple[int, int, int, Kind, int]] = []  # end, tie, rank, what has ended
    now = number = 0

    def choose(rank: int) -> tuple[Kind, int] | None:
        here = ready[rank]
        found = [(back, s) for s in reversed(own[rank]) if here.get((back, s), 0) > 0]
        forwards = [(Kind.F, s) for s in reversed(own[rank]) if here.get((Kind.F, s), 0) > 0]
        if ahead is not None and count[Kind.F, 0] - count[back, 0] >= ahead:
            forwards = [f for f in forwards if f[1]]
        fitting = [f for f in forwards if alive[rank] + 1 + later[f[1]] <= limit[rank]]
        found += fitting
        if found and plan is None:
            return found[0]
        if found and plan is not None:
            return min(found, key=lambda f: plan[Action(f[0], f[1], count[f])])
        most = max(own[rank], key=lambda s: here.get((Kind.W, s), 0))
        return (Kind.W, most) if here.get((Kind.W, most), 0) else None

    while True:
        for rank in range(ranks):
            if free_at[rank] <= now and (choice := choose(rank)) is not None:
                kind, s = choice
                ready[rank][kind, s] -= 1
                orders[rank].append(Action(kind, s, count[kind, s]))
                count[kind, s] += 1
                alive[rank] += kind is Kind.F
                free_at[rank] = now + _SECONDS[kind]
                heapq.heappush(events, (free_at[rank], number, rank, kind, s))
                number += 1
        if not events:
            return orders, now
        now = events[0][0]
        while events and events[0][0] == now:
            _, _, rank, kind, s = heapq.heappop(events)
            if kind in (Kind.B, Kind.W):
                alive[rank] -= 1
            if kind is Kind.F:
                target = (Kind.F, s + 1) if s + 1 < stages else (back, s)
                at = placement[target[1]]
                ready[at][target] = ready[at].get(target, 0) + 1
            elif kind is back and s > 0:
                at = placement[s - 1]
                ready[at][back, s - 1] = ready[at].get((back, s - 1), 0) + 1
            if kind is Kind.I:
                ready[rank][Kind.W, s] = ready[rank].get((Kind.W, s), 0) + 1
