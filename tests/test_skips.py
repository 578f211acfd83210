"""Skips between stages in lowering, checker, semantics and simulator.

``plays`` below is an independent judge: it executes streams with rendezvous messages and knows of
skips only that their values must be there before they are used.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
from fake import random_schedule

import pipelane
from pipelane.actions import Kind
from pipelane.check import deadlocks, verify_program
from pipelane.costs import Costs, Link
from pipelane.errors import CheckError, ConfigError
from pipelane.program import Instruction, Program, lower
from pipelane.simulate import simulate

Edge = tuple[int, int]
COMPUTES = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP)


def some_skips(rng: random.Random, stages: int) -> list[Edge]:
    pairs = [(a, b) for a, b in combinations(range(stages), 2) if b > a + 1]
    return rng.sample(pairs, rng.randint(0, min(3, len(pairs))))


def edges_of(program: Program) -> list[Edge]:
    return [(s, s + 1) for s in range(program.stages - 1)] + list(program.skips)


def wanted(program: Program) -> Counter[tuple[int, Kind, Edge, int, int]]:
    """Every message between ranks, at both of its ends."""
    found: Counter[tuple[int, Kind, Edge, int, int]] = Counter()
    for a, b in edges_of(program):
        here, there = program.placement[a], program.placement[b]
        for i in range(program.microbatches if here != there else 0):
            found[here, Kind.SEND_F, (a, b), i, there] += 1
            found[there, Kind.RECV_F, (a, b), i, here] += 1
            if not program.forward_only:
                found[there, Kind.SEND_B, (a, b), i, here] += 1
                found[here, Kind.RECV_B, (a, b), i, there] += 1
    return found


def sent(program: Program) -> Counter[tuple[int, Kind, Edge, int, int]]:
    return Counter(
        (rank, x.kind, x.edge[0], x.microbatch, x.peer)
        for rank, stream in enumerate(program.streams)
        for x in stream
        if x.kind not in COMPUTES
    )


def plays(program: Program, rng: random.Random) -> bool:
    """Whether rendezvous ranks, moved in random order, all come to their ends."""
    at = [0] * len(program.streams)
    made: set[tuple[bool, int, int]] = set()  # (forward, stage, micro-batch)
    arrived: set[tuple[bool, Edge, int]] = set()

    def there(forward: bool, edge: Edge, i: int) -> bool:
        if program.placement[edge[0]] == program.placement[edge[1]]:
            return (forward, edge[0] if forward else edge[1], i) in made
        return (forward, edge, i) in arrived

    def can_run(part: object, own: set[tuple[bool, int, int]]) -> bool:
        kind, s, i = part.kind, part.stage, part.microbatch  # type: ignore[attr-defined]
        if kind is Kind.W:
            return (False, s, i) in made
        if kind is Kind.F:
            return all(there(True, e, i) for e in edges_of(program) if e[1] == s)
        mine = (True, s, i) in made
        return mine and all(there(False, e, i) for e in edges_of(program) if e[0] == s)

    while True:
        moved = False
        ranks = list(range(len(at)))
        rng.shuffle(ranks)
        for rank in ranks:
            stream = program.streams[rank]
            if at[rank] == len(stream):
                continue
            now = stream[at[rank]]
            if now.kind in COMPUTES:
                parts = list(now.flat())
                if not all(can_run(part, made) for part in parts):
                    return False  # what it needs comes later on its own rank, or never
                made |= {
                    (part.kind is Kind.F, part.stage, part.microbatch)
                    for part in parts
                    if part.kind is not Kind.W
                }
                at[rank] += 1
                moved = True
                continue
            if not now.kind.is_send or at[now.peer] == len(program.streams[now.peer]):
                continue
            other = program.streams[now.peer][at[now.peer]]
            same = other.kind.is_receive and other.edge == now.edge
            if not (same and other.microbatch == now.microbatch and other.peer == rank):
                continue
            edge, forward = now.edge
            if (forward, now.stage, now.microbatch) not in made:
                return False
            arrived.add((forward, edge, now.microbatch))
            at[rank] += 1
            at[now.peer] += 1
            moved = True
        if all(a == len(s) for a, s in zip(at, program.streams, strict=True)):
            return True
        if not moved:
            return False


@pytest.mark.timeout(120)
def test_random_skips_are_lowered_and_certified() -> None:
    rng = random.Random(3)
    used = 0
    for _ in range(1200):
        schedule = random_schedule(rng)
        skips = some_skips(rng, schedule.shape.stages)
        used += bool(skips)
        program = lower(schedule, skips)
        assert program.skips == tuple(sorted(skips))
        assert sent(program) == wanted(program)
        assert plays(program, rng)
        verify_program(program)
        assert deadlocks(program)[0].safe
    assert used > 300


@pytest.mark.timeout(120)
def test_the_checker_agrees_about_broken_skip_messages() -> None:
    """Messages dropped, doubled, moved and misdirected: refused if and only if they do not play."""
    rng = random.Random(4)
    verdicts: Counter[bool] = Counter()
    while sum(verdicts.values()) < 1200:
        schedule = random_schedule(rng)
        program = lower(schedule, some_skips(rng, schedule.shape.stages))
        places = [
            (rank, index)
            for rank, stream in enumerate(program.streams)
            for index, x in enumerate(stream)
            if x.to >= 0
        ]
        if not places:
            continue
        rank, index = rng.choice(places)
        stream = list(program.streams[rank])
        message = stream.pop(index)
        change = rng.choice(["drop", "double", "move", "direct"])
        if change == "double":
            stream[index:index] = [message, message]
        elif change == "move":
            stream.insert(rng.randint(max(0, index - 4), min(len(stream), index + 4)), message)
        elif change == "direct":
            wrong = rng.choice([s for s in range(program.stages) if s != message.to])
            stream.insert(index, message._replace(to=wrong))
        streams = [*program.streams]
        streams[rank] = tuple(stream)
        broken = replace(program, streams=tuple(streams))
        good = sent(broken) == wanted(broken) and plays(broken, rng)
        verdicts[good] += 1
        if good:
            verify_program(broken)
        else:
            with pytest.raises(CheckError, match="rank"):
                verify_program(broken)
    assert min(verdicts[True], verdicts[False]) > 100


@pytest.mark.parametrize("edge", [(0, 1), (2, 0), (-1, 2), (0, 4), (1, 1)])
def test_a_skip_must_go_to_a_later_stage_that_is_not_the_next(edge: Edge) -> None:
    schedule = pipelane.build_schedule("1f1b", ranks=4, microbatches=2)
    with pytest.raises(CheckError, match=f"from stage {edge[0]} to stage {edge[1]}"):
        lower(schedule, [edge])


def test_a_skip_takes_its_time_on_its_own_link() -> None:
    """p=3, m=1, by hand: F takes 1 s; 4 bytes skip stage 1 at 1 byte/s, so they come at 1 + 4."""
    schedule = pipelane.build_schedule("gpipe", ranks=3, microbatches=1)
    ones = (1.0, 1.0, 1.0)
    link = Link(latency=0.5, bandwidth=1.0)
    costs = Costs(ones, ones, ones, links={(0, 2): link, (2, 0): link}, skip_bytes=(((0, 2), 4.0),))
    program = lower(schedule, [(0, 2)])
    timeline = simulate(program, costs)
    starts = {str(span.action): span.start for row in timeline.spans for span in row}
    assert starts["1F0"] == 1.0
    assert starts["2F0"] == 1.0 + 4.0 + 0.5
    assert starts["2B0"] == 6.5
    assert starts["1B0"] == 8.5
    assert starts["0B0"] == 8.5 + 4.0 + 0.5  # later than through stage 1, which would be 10.5
    without = simulate(schedule, replace(costs, skip_bytes=()))
    assert {str(s.action): s.start for row in without.spans for s in row}["0B0"] == 7.0


def test_costs_of_skips_are_checked_and_survive_json() -> None:
    ones = (1.0, 1.0, 1.0)
    costs = Costs(ones, ones, ones, skip_bytes=(((0, 2), 7.0),))
    assert Costs.from_json(costs.to_json()) == costs
    with pytest.raises(ConfigError, match="-1"):
        Costs(ones, ones, ones, skip_bytes=(((0, 2), -1.0),))


def test_instructions_name_the_far_stage() -> None:
    program = lower(pipelane.build_schedule("gpipe", ranks=3, microbatches=1), [(0, 2)])
    texts = [str(x) for stream in program.streams for x in stream if x.to >= 0]
    assert texts == ["0SEND_F0>2", "0RECV_B0<2", "2RECV_F0<0", "2SEND_B0>0"]
    assert Instruction(Kind.SEND_F, 0, 0, 1).edge == ((0, 1), True)
