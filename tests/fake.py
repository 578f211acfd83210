"""Random schedules, an independent judge of validity, and a fake rendezvous transport.

Written without pipelane.check and pipelane.program, and as plainly as possible: it is what they
are compared with.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from pipelane.actions import Action, Kind
from pipelane.program import Instruction, Program
from pipelane.schedule import Schedule, Shape

Key = tuple[str, int, int]
Step = Action | Instruction


def random_schedule(rng: random.Random) -> Schedule:
    """Any placement, any topological order, whole and split backwards mixed, some overlapped."""
    shape = Shape(rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 3))
    placement = [rank for rank in range(shape.ranks) for _ in range(shape.chunks)]
    rng.shuffle(placement)
    apart, together = rng.choice([0, 0.4, 1]), rng.choice([0, 0.5])
    todo: set[Action] = set()
    for s in range(shape.stages):
        for i in range(shape.microbatches):
            split = rng.random() < apart
            kinds = (Kind.F, Kind.I, Kind.W) if split else (Kind.F, Kind.B)
            todo |= {Action(kind, s, i) for kind in kinds}
    done: set[Key] = set()
    orders: list[list[Action]] = [[] for _ in range(shape.ranks)]
    while todo:
        ready = sorted(a for a in todo if all(n in done for n in needs(a, shape.stages)))
        action = rng.choice(ready)
        rank = placement[action.stage]
        backwards = [a for a in ready if a.kind in (Kind.B, Kind.I) and placement[a.stage] == rank]
        if action.kind is Kind.F and backwards and rng.random() < together:
            action = Action(Kind.OVERLAP, -1, -1, (action, rng.choice(backwards)))
        for part in action.parts or (action,):
            todo.remove(part)
            done.add(result(part))
        orders[rank].append(action)
    return Schedule("random", shape, tuple(placement), tuple(map(tuple, orders)))


def needs(action: Step, stages: int) -> list[Key]:
    s, i = action.stage, action.microbatch
    if action.kind is Kind.F:
        return [("F", s - 1, i)] if s else []
    if action.kind is Kind.W:
        return [("back", s, i)]
    return [("F", s, i)] + ([("back", s + 1, i)] if s + 1 < stages else [])


def result(action: Step) -> Key:
    kind = action.kind.value
    return ("back" if kind in "BI" else kind, action.stage, action.microbatch)


def is_complete(
    rows: Sequence[Sequence[Step]], placement: Sequence[int], microbatches: int, trains: bool
) -> bool:
    """Each stage's work for each micro-batch is on the stage's rank, once, and nothing else."""
    seen: Counter[tuple[int, str, int, int]] = Counter()
    for rank, row in enumerate(rows):
        for action in row:
            if action.parts:
                kinds = "".join(part.kind.value for part in action.parts)
                if action.kind is not Kind.OVERLAP or kinds not in ("FB", "FI"):
                    return False
            for part in action.parts or (action,):
                seen[rank, part.kind.value, part.stage, part.microbatch] += 1
    choices = ("FB", "FIW") if trains else ("F",)
    count = 0
    for s, rank in enumerate(placement):
        for i in range(microbatches):
            kinds = "".join(k for k in "FBIW" if (rank, k, s, i) in seen)
            if kinds not in choices:
                return False
            count += len(kinds)
    return sum(seen.values()) == count


def is_valid(schedule: Schedule) -> bool:
    """By the definition: complete, each action on its stage's rank, and able to run in order."""
    shape = schedule.shape
    if not is_complete(schedule.orders, schedule.placement, shape.microbatches, trains=True):
        return False
    at = [0] * shape.ranks
    done: set[Key] = set()
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.orders):
            if at[rank] == len(order):
                continue
            parts = order[at[rank]].parts or (order[at[rank]],)
            if all(n in done for part in parts for n in needs(part, shape.stages)):
                done |= {result(part) for part in parts}
                at[rank] += 1
                moved = True
    return all(a == len(o) for a, o in zip(at, schedule.orders, strict=True))


def is_valid_program(program: Program, rng: random.Random) -> bool:
    """Does exactly the work, sends exactly the messages needed for it, and comes to its end."""
    computes: list[list[Instruction]] = [[] for _ in program.streams]
    messages: Counter[tuple[int, Kind, int, int, int]] = Counter()
    for rank, stream in enumerate(program.streams):
        for x in stream:
            if x.kind.value in ("F", "B", "I", "W", "OVERLAP_F_B"):
                computes[rank].append(x)
            else:
                messages[rank, x.kind, x.stage, x.microbatch, x.peer] += 1
    trains = not program.forward_only
    if not is_complete(computes, program.placement, program.microbatches, trains):
        return False
    wanted: Counter[tuple[int, Kind, int, int, int]] = Counter()
    for s in range(program.stages - 1):
        here, there = program.placement[s], program.placement[s + 1]
        if here == there:
            continue
        for i in range(program.microbatches):
            wanted[here, Kind.SEND_F, s, i, there] += 1
            wanted[there, Kind.RECV_F, s + 1, i, here] += 1
            if trains:
                wanted[there, Kind.SEND_B, s + 1, i, here] += 1
                wanted[here, Kind.RECV_B, s, i, there] += 1
    return messages == wanted and run_rendezvous(program.streams, program.stages, rng)


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
            if now.kind.value in ("F", "B", "I", "W", "OVERLAP_F_B"):
                parts = now.parts or (now,)
                if any(n not in have[rank] for part in parts for n in needs(part, stages)):
                    return False
                have[rank] |= {result(part) for part in parts}
                at[rank] += 1
                moved = True
                continue
            if now.kind not in (Kind.SEND_F, Kind.SEND_B) or not 0 <= now.peer < len(streams):
                continue
            if at[now.peer] == len(streams[now.peer]):
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
