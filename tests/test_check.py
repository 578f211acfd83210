"""The checker against thousands of random valid and broken schedules and programs."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import chain

import pytest
from fake import is_valid, random_schedule, run_rendezvous

import pipelane
from pipelane.actions import Kind
from pipelane.check import verify_program
from pipelane.errors import CheckError
from pipelane.program import Instruction, Program
from pipelane.schedule import Schedule, Shape

ROUNDS = 1500


def test_random_valid_schedules_pass_and_run() -> None:
    rng = random.Random(1)
    for _ in range(ROUNDS):
        schedule = random_schedule(rng)
        assert is_valid(schedule)
        certificate = pipelane.check(schedule)
        program = pipelane.lower(schedule)
        assert run_rendezvous(program.streams, program.stages, rng)
        timeline = pipelane.simulate(program)
        assert timeline.peak_activations == certificate.peak_activations
        assert sum(timeline.work) == sum(
            2 * (a.kind is Kind.B) + (a.kind is not Kind.B) for o in schedule.orders for a in o
        )
        # FIFO per channel: receives come in the order of the sends.
        for sender, stream in enumerate(program.streams):
            for receiver, other in enumerate(program.streams):
                for send, receive, step in (
                    (Kind.SEND_F, Kind.RECV_F, 1),
                    (Kind.SEND_B, Kind.RECV_B, -1),
                ):
                    sent = [
                        (x.stage + step, x.microbatch)
                        for x in stream
                        if x.kind is send and x.peer == receiver
                    ]
                    got = [
                        (x.stage, x.microbatch)
                        for x in other
                        if x.kind is receive and x.peer == sender
                    ]
                    assert sent == got


def broken(schedule: Schedule, rng: random.Random) -> Schedule:
    """One random change to the orders; it may happen to stay valid."""
    orders = [list(order) for order in schedule.orders]
    rank = rng.randrange(len(orders))
    order = orders[rank]
    change = rng.choice(["drop", "double", "swap", "move", "kind", "stage", "number", "reverse"])
    if not order:
        return schedule
    place = rng.randrange(len(order))
    action = order[place]
    if change == "drop":
        del order[place]
    elif change == "double":
        order.insert(rng.randrange(len(order) + 1), action)
    elif change == "swap":
        other = rng.randrange(len(order))
        order[place], order[other] = order[other], order[place]
    elif change == "move":
        del order[place]
        target = rng.choice(orders)
        target.insert(rng.randrange(len(target) + 1), action)
    elif change == "kind":
        order[place] = action._replace(kind=rng.choice([Kind.F, Kind.B, Kind.I, Kind.W]))
    elif change == "stage":
        order[place] = action._replace(stage=action.stage + rng.choice([-1, 1, 100]))
    elif change == "number":
        order[place] = action._replace(microbatch=action.microbatch + rng.choice([-1, 1, 100]))
    else:
        order.reverse()
    return replace(schedule, orders=tuple(map(tuple, orders)))


def test_random_broken_schedules_are_refused_with_the_reason() -> None:
    rng = random.Random(2)
    refused = 0
    for _ in range(2 * ROUNDS):
        schedule = random_schedule(rng)
        for _ in range(rng.randint(1, 3)):
            schedule = broken(schedule, rng)
        if is_valid(schedule):
            pipelane.check(schedule)
            continue
        refused += 1
        with pytest.raises(CheckError) as caught:
            pipelane.check(schedule)
        message = str(caught.value)
        assert "'random'" in message
        assert "rank" in message
        assert any(c.isdigit() for c in message)
    assert refused > ROUNDS


def test_random_broken_programs_are_refused() -> None:
    """Changes to the instruction stream itself: judged by running it."""
    rng = random.Random(3)
    refused = accepted = 0
    for _ in range(ROUNDS):
        program = pipelane.lower(random_schedule(rng))
        streams = [list(stream) for stream in program.streams]
        rank = rng.randrange(len(streams))
        stream = streams[rank]
        place, other = rng.randrange(len(stream)), rng.randrange(len(stream))
        change = rng.choice(["drop", "swap", "peer", "double"])
        if change == "drop":
            del stream[place]
        elif change == "swap":
            stream[place], stream[other] = stream[other], stream[place]
        elif change == "double":
            stream.insert(other, stream[place])
        elif stream[place].peer >= 0:
            stream[place] = stream[place]._replace(peer=rng.randrange(len(streams)))
        changed = replace(program, streams=tuple(map(tuple, streams)))
        runs = run_rendezvous(changed.streams, program.stages, random.Random(0))
        try:
            verify_program(changed)
        except CheckError:
            refused += 1
            # The checker also refuses what runs but does not do exactly the work, once.
            assert not runs or Counter(chain(*streams)) != Counter(chain(*program.streams))
        else:
            accepted += 1
            assert runs
    assert refused > ROUNDS / 4
    assert accepted > 10


def two_ranks(*orders: str) -> Schedule:
    from pipelane.actions import parse_action

    rows = tuple(tuple(map(parse_action, order.split())) for order in orders)
    number = max(a.microbatch for row in rows for a in row) + 1
    return Schedule("mine", Shape(2, number), (0, 1), rows)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (two_ranks("0F0 0B0", "1F0"), ["rank 1", "stage 1", "micro-batch 0", "1B0"]),
        (two_ranks("0B0 0F0", "1F0 1B0"), ["rank 0", "0B0", "waits for"]),
        (two_ranks("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"),
         ["rank 0: 0B0 waits for", "rank 1: 1F1 waits for the forward of stage 0"]),
        (two_ranks("0F0 0F0 0B0", "1F0 1B0"), ["rank 0", "0F0 appears twice"]),
        (two_ranks("0F0 0B0 1F0", "1B0"), ["rank 0", "1F0 belongs to rank 1"]),
        (two_ranks("0F0 0B0 0I0", "1F0 1B0"), ["stage 0", "0B0, 0I0"]),
        (replace(two_ranks("0F0 0B0", "1F0 1B0"), placement=(0, 2)), ["rank 2", "0 to 1"]),
        (replace(two_ranks("0F0 0B0", "1F0 1B0"), placement=(0,)), ["placement", "1 stages"]),
        (replace(two_ranks("0F0 0B0", "1F0 1B0"), placement=(0, 0)), ["rank 0 holds 2"]),
        (replace(two_ranks("0F0 0B0", "1F0 1B0"), orders=((),)), ["1 orders for 2 ranks"]),
        (two_ranks("0F0 0B0", "1F0 1B0 1SEND_B0"), ["rank 1", "1SEND_B0 is not a compute"]),
    ],
)  # fmt: skip
def test_reasons(schedule: Schedule, words: list[str]) -> None:
    with pytest.raises(CheckError) as caught:
        pipelane.check(schedule)
    for word in words:
        assert word in str(caught.value)


def test_a_deadlock_shows_the_cycle_rank_by_rank() -> None:
    """Both ranks send first: fine with buffers, a deadlock with rendezvous."""
    f, send, receive = Kind.F, Kind.SEND_F, Kind.RECV_F
    program = Program(
        "crossed", 4, 1, (0, 1, 1, 0),
        (
            (Instruction(f, 0, 0), Instruction(receive, 3, 0, 1), Instruction(send, 0, 0, 1),
             Instruction(f, 3, 0)),
            (Instruction(receive, 1, 0, 0), Instruction(f, 1, 0), Instruction(f, 2, 0),
             Instruction(send, 2, 0, 0)),
        ),
        forward_only=True,
    )  # fmt: skip
    with pytest.raises(CheckError) as caught:
        verify_program(program)
    message = str(caught.value)
    assert "can deadlock" in message
    assert "rank 0 waits in 3RECV_F0 for rank 1" in message
    assert "rank 1 waits in 1RECV_F0 for rank 0" in message


def test_forward_only() -> None:
    schedule = pipelane.build_schedule("1f1b", 3, 4).forward_only(5)
    assert pipelane.check(schedule, forward_only=True).computes == 15
    with pytest.raises(CheckError, match="nothing as its backward"):
        pipelane.check(schedule)
    with pytest.raises(CheckError, match="forward-only"):
        pipelane.check(pipelane.build_schedule("1f1b", 3, 4), forward_only=True)
