"""Random schedules, an independent judge of validity, and a fake rendezvous transport."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pipelane.actions import Action, Kind
from pipelane.program import Instruction
from pipelane.schedule import Schedule, Shape

Key = tuple[str, int, int]


def random_schedule(rng: random.Random) -> Schedule:
    """Any placement, any topological order, whole and split backwards mixed, some overlapped."""
    shape = Shape(rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 3))
    placement = [rank for rank in range(shape.ranks) for _ in range(shape.chunks)]
    rng.shuffle(placement)
    split = {
        (s, i): rng.random() < 0.4 for s in range(shape.stages) for i in range(shape.microbatches)
    }
    todo: set[Action] = set()
    for (s, i), apart in split.items():
        kinds = (Kind.F, Kind.I, Kind.W) if apart else (Kind.F, Kind.B)
        todo |= {Action(kind, s, i) for kind in kinds}
    done: set[Key] = set()
    orders: list[list[Action]] = [[] for _ in range(shape.ranks)]
    while todo:
        ready = sorted(a for a in todo if all(n in done for n in needs(a, shape.stages)))
        action = rng.choice(ready)
        todo.remove(action)
        done.add(result(action))
        orders[placement[action.stage]].append(action)
    return Schedule("random", shape, tuple(placement), tuple(map(tuple, orders)))


def needs(action: Action, stages: int) -> list[Key]:
    s, i = action.stage, action.microbatch
    if action.kind is Kind.F:
        return [("F", s - 1, i)] if s else []
    if action.kind is Kind.W:
        return [("back", s, i)]
    return [("F", s, i)] + ([("back", s + 1, i)] if s + 1 < stages else [])


def result(action: Action) -> Key:
    kind = action.kind.value
    return ("back" if kind in "BI" else kind, action.stage, action.microbatch)


def is_valid(schedule: Schedule) -> bool:
    """By the definition: complete, each action on its stage's rank, and able to run in order."""
    shape = schedule.shape
    seen: list[tuple[Kind, int, int]] = []
    for rank, order in enumerate(schedule.orders):
        for action in order:
            if not 0 <= action.stage < shape.stages or schedule.placement[action.stage] != rank:
                return False
            seen.append(action[:3])
    if len(seen) != len(set(seen)):
        return False
    for s in range(shape.stages):
        for i in range(shape.microbatches):
            kinds = {k.value for k in Kind if (k, s, i) in set(seen)}
            if kinds not in ({"F", "B"}, {"F", "I", "W"}):
                return False
    if len(seen) != sum(2 + ((Kind.I, a[1], a[2]) in seen) for a in seen if a[0] is Kind.F):
        return False
    at = [0] * shape.ranks
    done: set[Key] = set()
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.orders):
            while at[rank] < len(order) and all(
                n in done for n in needs(order[at[rank]], shape.stages)
            ):
                done.add(result(order[at[rank]]))
                at[rank] += 1
                moved = True
    return all(a == len(o) for a, o in zip(at, schedule.orders, strict=True))


def run_rendezvous(
    streams: Sequence[Sequence[Instruction]], stages: int, rng: random.Random
) -> bool:
    """Execute streams with rendezvous messages and one queue per rank, ranks in random order.

    A send blocks its rank until the receive of the very same message is reached on the peer, and
    the other way round. Computes need their inputs on their own rank.

    Returns:
        Whether every rank came to its end, with every input in place.
    """
    at = [0] * len(streams)
    have: list[set[Key]] = [set() for _ in streams]
    while True:
        order = list(range(len(streams)))
        rng.shuffle(order)
        moved = False
        for rank in order:
            if at[rank] == len(streams[rank]):
                continue
            now = streams[rank][at[rank]]
            if now.kind.is_compute:
                for part in now.flat():
                    if any(n not in have[rank] for n in needs(part, stages)):
                        return False
                    have[rank].add(result(part))
                at[rank] += 1
                moved = True
                continue
            if not now.kind.is_send or at[now.peer] == len(streams[now.peer]):
                continue
            other = streams[now.peer][at[now.peer]]
            forward = now.kind is Kind.SEND_F
            wanted = (
                Kind.RECV_F if forward else Kind.RECV_B,
                now.stage + (1 if forward else -1),
                now.microbatch,
                rank,
            )
            if other[:4] != wanted:
                continue
            key: Key = ("F" if forward else "back", now.stage, now.microbatch)
            if key not in have[rank]:
                return False
            have[now.peer].add(key)
            at[rank] += 1
            at[now.peer] += 1
            moved = True
        if all(a == len(s) for a, s in zip(at, streams, strict=True)):
            return True
        if not moved:
            return False
