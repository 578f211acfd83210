"""The checker against thousands of random valid and broken schedules and programs.

Changes are random, and some leave a schedule valid: what is valid is decided by ``fake.py``, which
shares no code with the checker, and the checker must agree in every case.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
from fake import is_valid, is_valid_program, random_schedule, run_rendezvous

import pipelane
from pipelane.actions import Action, Kind, parse_action
from pipelane.check import peak_activations, verify_program
from pipelane.errors import CheckError
from pipelane.program import Instruction, Program, wait_chain
from pipelane.schedule import Schedule, Shape

pytestmark = pytest.mark.timeout(120)

ROUNDS = 3000
SENDS = (Kind.SEND_F, Kind.SEND_B)
RECEIVES = (Kind.RECV_F, Kind.RECV_B)

# What every reason must name.
RANK = re.compile(r"rank \d+")
ACTION = re.compile(r"-?\d+(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)-?\d+")


def refused(function: Callable[[], object], name: str) -> str | None:
    """The reason why something is refused, which names where, rank and action; None if it is not"""
    try:
        function()
    except CheckError as error:
        reason = str(error)
        assert f"'{name}'" in reason
        assert RANK.search(reason), reason
        assert ACTION.search(reason), reason
        return reason
    return None


def test_random_valid_schedules_pass_and_run() -> None:
    rng = random.Random(1)
    kinds: Counter[Kind] = Counter()
    for _ in range(ROUNDS):
        schedule = random_schedule(rng)
        kinds.update(a.kind for order in schedule.orders for a in order)
        assert is_valid(schedule)
        certificate = pipelane.check(schedule)
        program = pipelane.lower(schedule)
        assert is_valid_program(program, rng)
        computes, messages = verify_program(program)
        assert computes == certificate.computes == sum(map(len, schedule.orders))
        assert messages == certificate.messages
        timeline = pipelane.simulate(program)
        assert [[s.action for s in row] for row in timeline.spans] == list(
            map(list, schedule.orders)
        )
        assert timeline.peak_activations == certificate.peak_activations
        assert len(timeline.messages) == messages
        assert sum(timeline.work) == 3 * schedule.shape.stages * schedule.shape.microbatches
    # All of them were really met with.
    assert set(kinds) == {Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP}


def test_channels_are_fifo() -> None:
    """Between two ranks and per direction, receives come in the order of the sends."""
    rng = random.Random(5)
    several = 0
    for _ in range(300):
        program = pipelane.lower(random_schedule(rng))
        sent, got = defaultdict(list), defaultdict(list)
        for rank, stream in enumerate(program.streams):
            for x in stream:
                if x.kind in SENDS:
                    step = 1 if x.kind is Kind.SEND_F else -1
                    sent[rank, x.peer, step].append((x.stage + step, x.microbatch))
                elif x.kind in RECEIVES:
                    step = 1 if x.kind is Kind.RECV_F else -1
                    got[x.peer, rank, step].append((x.stage, x.microbatch))
        assert sent == got
        several += any(len({stage for stage, _ in row}) > 1 for row in sent.values())
    assert several > 50


def test_random_forward_only_schedules() -> None:
    rng = random.Random(6)
    for _ in range(300):
        schedule = random_schedule(rng).forward_only(rng.randint(1, 6))
        shape = schedule.shape
        certificate = pipelane.check(schedule, forward_only=True)
        assert certificate.computes == shape.stages * shape.microbatches
        program = pipelane.lower(schedule)
        assert program.forward_only
        assert is_valid_program(program, rng)
        assert pipelane.simulate(program).makespan >= shape.chunks * shape.microbatches


# Broken schedules. Each function changes the orders in place.

Orders = list[list[Action]]


def change_drop(rng: random.Random, orders: Orders, rank: int, place: int) -> None:
    del orders[rank][place]


def change_double(rng: random.Random, orders: Orders, rank: int, place: int) -> None:
    orders[rank].insert(rng.randrange(len(orders[rank]) + 1), orders[rank][place])


def change_swap(rng: random.Random, orders: Orders, rank: int, place: int) -> None:
    row, other = orders[rank], rng.randrange(len(orders[rank]))
    row[place], row[other] = row[other], row[place]


def change_reverse(rng: random.Random, orders: Orders, rank: int, place: int) -> None:
    orders[rank].reverse()


def change_rank(rng: random.Random, orders: Orders, rank: int, place: int) -> None:
    action = orders[rank].pop(place)
    target = rng.choice(orders)
    target.insert(rng.randrange(len(target) + 1), action)


def change_kind(rng: random.Random, orders: Orders, rank: int, place: int) -> None:
    kind = rng.choice([Kind.F, Kind.B, Kind.I, Kind.W])
    orders[rank][place] = orders[rank][place]._replace(kind=kind)


def change_number(rng: random.Random, orders: Orders, rank: int, place: int) -> None:
    action = orders[rank][place]
    field = rng.choice(["stage", "microbatch"])
    orders[rank][place] = action._replace(
        **{field: getattr(action, field) + rng.choice([-100, -1, 1, 100])}
    )


def change_pair(rng: random.Random, orders: Orders, rank: int, place: int) -> None:
    """Two neighbours become one overlapped action, or a pair falls apart."""
    row = orders[rank]
    if row[place].parts:
        row[place : place + 1] = row[place].parts
    else:
        row[place : place + 2] = [Action(Kind.OVERLAP, -1, -1, tuple(row[place : place + 2]))]


CHANGES = [value for name, value in list(globals().items()) if name.startswith("change_")]
ALWAYS_INVALID = {change_drop, change_double}


def test_random_broken_schedules_are_refused_with_the_reason() -> None:
    rng = random.Random(2)
    count: Counter[tuple[str, bool]] = Counter()
    for turn in range(2 * ROUNDS):
        schedule = random_schedule(rng)
        orders = [list(order) for order in schedule.orders]
        change = CHANGES[turn % len(CHANGES)]
        rank = rng.randrange(len(orders))
        change(rng, orders, rank, rng.randrange(len(orders[rank])))
        if turn % 5 == 0 and orders[rank]:
            rng.choice(CHANGES)(rng, orders, rank, rng.randrange(len(orders[rank])))
        changed = replace(schedule, orders=tuple(map(tuple, orders)))
        valid = is_valid(changed)
        reason = refused(lambda changed=changed: pipelane.check(changed), "random")  # type: ignore[misc]
        assert (reason is None) == valid, (reason, changed)
        count[change.__name__, valid] += 1
    for change in CHANGES:
        assert count[change.__name__, False] > 100, change.__name__
    assert sum(n for (_, valid), n in count.items() if not valid) > ROUNDS
    # The changes to order and pairs leave some schedules valid: those must be let through.
    for change in (change_swap, change_pair):
        assert count[change.__name__, True] > 20, change.__name__


def test_lower_and_simulate_refuse_or_end() -> None:
    """Also without the check before them: no other exception, and no hang."""
    rng = random.Random(7)
    results: Counter[str] = Counter()
    for turn in range(1000):
        schedule = random_schedule(rng)
        orders = [list(order) for order in schedule.orders]
        rank = rng.randrange(len(orders))
        change = CHANGES[turn % len(CHANGES)]
        change(rng, orders, rank, rng.randrange(len(orders[rank])))
        changed = replace(schedule, orders=tuple(map(tuple, orders)))
        reason = refused(lambda changed=changed: pipelane.simulate(changed), "random")  # type: ignore[misc]
        results["ended" if reason is None else "refused"] += 1
        if is_valid(changed):
            assert reason is None
    assert min(results.values()) > 100


# Broken programs. Each function changes the streams in place and says whether it could.

Streams = list[list[Instruction]]


def places(streams: Streams, kinds: tuple[Kind, ...]) -> list[tuple[int, int]]:
    return [(r, i) for r, row in enumerate(streams) for i, x in enumerate(row) if x.kind in kinds]


def pick(rng: random.Random, streams: Streams, *kinds: Kind) -> tuple[list[Instruction], int]:
    rank, place = rng.choice(places(streams, kinds or tuple(Kind)))
    return streams[rank], place


def program_drop(rng: random.Random, streams: Streams) -> None:
    row, place = pick(rng, streams)
    del row[place]


def program_missing_receive(rng: random.Random, streams: Streams) -> None:
    row, place = pick(rng, streams, *RECEIVES)
    del row[place]


def program_missing_message(rng: random.Random, streams: Streams) -> None:
    """A send and its receive: nothing is left to block on, but the input never comes."""
    row, place = pick(rng, streams, *SENDS)
    send = row.pop(place)
    step = 1 if send.kind is Kind.SEND_F else -1
    streams[send.peer][:] = [
        x for x in streams[send.peer]
        if not (x.kind in RECEIVES and (x.stage, x.microbatch) == (send.stage + step,
                                                                    send.microbatch)
                and (x.kind is Kind.RECV_F) == (step == 1))
    ]  # fmt: skip


def program_double(rng: random.Random, streams: Streams) -> None:
    row, place = pick(rng, streams)
    row.insert(rng.randrange(len(row) + 1), row[place])


def program_double_message(rng: random.Random, streams: Streams) -> None:
    """The same message twice, at both ends."""
    row, place = pick(rng, streams, *SENDS)
    send = row[place]
    step = 1 if send.kind is Kind.SEND_F else -1
    receive = Kind.RECV_F if step == 1 else Kind.RECV_B
    rank = streams.index(row)
    row.append(send)
    streams[send.peer].append(Instruction(receive, send.stage + step, send.microbatch, rank))


def program_swap(rng: random.Random, streams: Streams) -> None:
    row, place = pick(rng, streams)
    other = rng.randrange(len(row))
    row[place], row[other] = row[other], row[place]


def program_reorder_receives(rng: random.Random, streams: Streams) -> None:
    row, place = pick(rng, streams, *RECEIVES)
    other = rng.choice([i for i, x in enumerate(row) if x.kind in RECEIVES])
    row[place], row[other] = row[other], row[place]


def program_peer(rng: random.Random, streams: Streams) -> None:
    row, place = pick(rng, streams, *SENDS, *RECEIVES)
    others = {-1, 99, *range(len(streams))} - {row[place].peer}
    row[place] = row[place]._replace(peer=rng.choice(sorted(others)))


def program_send_before_compute(rng: random.Random, streams: Streams) -> None:
    row, place = pick(rng, streams, *SENDS)
    send = row.pop(place)
    kinds = (Kind.F,) if send.kind is Kind.SEND_F else (Kind.B, Kind.I)
    made = next(
        i for i, x in enumerate(row)
        if any(a.kind in kinds and a[1:3] == send[1:3] for a in x.flat())
    )  # fmt: skip
    row.insert(rng.randint(0, made), send)


def program_other_rank(rng: random.Random, streams: Streams) -> None:
    row, place = pick(rng, streams)
    x = row.pop(place)
    target = rng.choice([other for other in streams if other is not row])
    target.insert(rng.randrange(len(target) + 1), x)


def program_out_of_range(rng: random.Random, streams: Streams) -> None:
    row, place = pick(rng, streams, *(k for k in Kind if k is not Kind.OVERLAP))
    number = rng.choice([-1, -7, 50])
    if rng.random() < 0.5:
        row[place] = row[place]._replace(stage=number)
    else:
        row[place] = row[place]._replace(microbatch=number)


def program_kind(rng: random.Random, streams: Streams) -> None:
    row, place = pick(rng, streams, *(k for k in Kind if k is not Kind.OVERLAP))
    kinds = [k for k in (*SENDS, *RECEIVES, Kind.F, Kind.B, Kind.I, Kind.W) if k != row[place].kind]
    row[place] = row[place]._replace(kind=rng.choice(kinds))


def program_late_receive(rng: random.Random, streams: Streams) -> None:
    """Moved to the end of its rank, after the compute that needs it."""
    row, place = pick(rng, streams, *RECEIVES)
    row.append(row.pop(place))


MUTATIONS = [value for name, value in list(globals().items()) if name.startswith("program_")]
MAY_STAY_VALID = {program_swap, program_reorder_receives}


def test_random_broken_programs_are_refused_with_the_reason() -> None:
    """Changes to the instruction streams themselves."""
    rng = random.Random(3)
    count: Counter[tuple[str, bool]] = Counter()
    turn = 0
    while turn < ROUNDS:
        program = pipelane.lower(random_schedule(rng))
        if len(program.streams) == 1:
            continue
        streams = [list(stream) for stream in program.streams]
        mutation = MUTATIONS[turn % len(MUTATIONS)]
        mutation(rng, streams)
        turn += 1
        changed = replace(program, streams=tuple(map(tuple, streams)))
        valid = is_valid_program(changed, rng)
        reason = refused(lambda changed=changed: verify_program(changed), "random")  # type: ignore[misc]
        assert (reason is None) == valid, (mutation.__name__, reason, changed)
        if mutation not in MAY_STAY_VALID:
            assert not valid
        count[mutation.__name__, valid] += 1
    for mutation in MUTATIONS:
        assert count[mutation.__name__, False] > 30, mutation.__name__
    assert count["program_swap", True] > 10


def test_simulated_broken_programs_end_or_are_refused() -> None:
    """The simulator takes any instruction stream too, if its numbers are in range."""
    rng = random.Random(8)
    refusals = 0
    for turn in range(600):
        schedule = random_schedule(rng)
        if schedule.shape.ranks == 1:
            continue
        program = pipelane.lower(schedule)
        streams = [list(stream) for stream in program.streams]
        [program_drop, program_send_before_compute, program_missing_message, program_swap][
            turn % 4
        ](rng, streams)
        changed = replace(program, streams=tuple(map(tuple, streams)))
        reason = refused(lambda changed=changed: pipelane.simulate(changed), "random")  # type: ignore[misc]
        refusals += reason is not None
    assert refusals > 100


# Reasons, one by one.


def two_ranks(*orders: str) -> Schedule:
    rows = tuple(tuple(map(parse_action, order.split())) for order in orders)
    number = max(a.microbatch for row in rows for x in row for a in x.flat()) + 1
    return Schedule("mine", Shape(2, number), (0, 1), rows)


GOOD = two_ranks("0F0 0B0", "1F0 1B0")


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (two_ranks("0F0 0B0", "1F0"),
         ["rank 1", "stage 1", "micro-batch 0", "has nothing", "expected 1B0, or both 1I0"]),
        (two_ranks("0B0", "1F0 1B0"), ["rank 0", "0F0 is missing"]),
        (two_ranks("0F0 0B0", "1F0 1I0"), ["rank 1", "has 1I0", "1I0 and 1W0"]),
        (two_ranks("0B0 0F0", "1F0 1B0"), ["rank 0: 0B0 waits for", "stage 0", "on rank 0"]),
        (two_ranks("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"),
         ["rank 0: 0B0 waits for the backward of stage 1, micro-batch 0, on rank 1",
          "rank 1: 1F1 waits for the forward of stage 0, micro-batch 1, on rank 0"]),
        (two_ranks("0F0 0F0 0B0", "1F0 1B0"), ["rank 0", "0F0 appears twice"]),
        (two_ranks("0F0 0B0 1F0", "1B0"), ["rank 0", "1F0 belongs to rank 1"]),
        (two_ranks("0F0 0B0 0I0", "1F0 1B0"), ["rank 0", "stage 0", "0B0, 0I0"]),
        (two_ranks("0F0 0B0 2F0", "1F0 1B0"), ["rank 0", "2F0 is out of range", "0 to 1"]),
        (two_ranks("0F0 0B0", "1F0 1B0 1SEND_B0"), ["rank 1", "1SEND_B0 is not a compute"]),
        (two_ranks("0F0 0B0", "(1F0;1B0)OVERLAP_F_B"),
         ["rank 1: (1F0;1B0)OVERLAP_F_B waits for the forward of stage 1"]),
        (replace(GOOD, placement=(0, 2)), ["rank 2", "0 to 1"]),
        (replace(GOOD, placement=(0, -1)), ["rank -1", "0 to 1"]),
        (replace(GOOD, placement=(0,)), ["placement", "1 stages"]),
        (replace(GOOD, placement=(0, 0)), ["rank 0 holds 2"]),
        (replace(GOOD, orders=((),)), ["1 orders for 2 ranks"]),
        (replace(GOOD, orders=(("0F0", "0B0"), ())),  # type: ignore[arg-type]
         ["rank 0", "'0F0' is not a pipelane.Action"]),
        (replace(GOOD, orders=((Action(Kind.F, 0, 0, (Action(Kind.F, 0, 0),)),), ())),
         ["rank 0", "only OVERLAP_F_B has parts"]),
        (replace(GOOD, orders=((Action(Kind.OVERLAP, 0, 0),), ())),
         ["rank 0", "only OVERLAP_F_B has parts"]),
    ],
)  # fmt: skip
def test_reasons(schedule: Schedule, words: list[str]) -> None:
    with pytest.raises(CheckError) as caught:
        pipelane.check(schedule)
    for word in ["'mine'", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("placement", [(0, 2), (0, 99), (0, -1), (0,), (0, 0), (0, 1, 1)])
def test_lowering_without_a_check_refuses_placements_too(placement: tuple[int, ...]) -> None:
    with pytest.raises(CheckError, match="schedule 'mine'"):
        pipelane.lower(replace(GOOD, placement=placement))


def test_the_program_of_1f1b() -> None:
    """Written out: each send right after its compute, each receive where its message arrives."""
    program = pipelane.lower(pipelane.build_schedule("1f1b", 2, 2))
    assert [" ".join(map(str, stream)) for stream in program.streams] == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]
    peers = [[x.peer for x in stream if not x.kind.is_compute] for stream in program.streams]
    assert peers == [[1, 1, 1, 1], [0, 0, 0, 0]]
    assert (program.stages, program.microbatches, program.placement) == (2, 2, (0, 1))


def test_large_schedules_are_quick() -> None:
    """p = 64, m = 512: about a second in all; what grows with the square would take minutes."""
    start = time.process_time()
    schedule = pipelane.build_schedule("1f1b", 64, 512)
    assert pipelane.check(schedule).computes == 65536
    assert pipelane.simulate(schedule).makespan == 3 * (512 + 63)
    assert time.process_time() - start < 20


def test_forward_only() -> None:
    schedule = pipelane.build_schedule("1f1b", 3, 4).forward_only(5)
    assert pipelane.check(schedule, forward_only=True).computes == 15
    with pytest.raises(CheckError, match="nothing as its backward"):
        pipelane.check(schedule)
    with pytest.raises(CheckError, match="forward-only"):
        pipelane.check(pipelane.build_schedule("1f1b", 3, 4), forward_only=True)
    assert not pipelane.lower(pipelane.build_schedule("1f1b", 3, 4)).forward_only


def test_the_cycle_of_a_schedule_leaves_out_who_only_waits_for_it() -> None:
    """Ranks 1 and 2 wait for each other; rank 0 waits for rank 1 and is no part of the cycle."""
    rows = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F1 2B1 2F0 2B0"]
    orders = tuple(tuple(map(parse_action, row.split())) for row in rows)
    with pytest.raises(CheckError) as caught:
        pipelane.check(Schedule("three", Shape(3, 2), (0, 1, 2), orders))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("schedule 'three' cannot run")
    assert lines[1:] == [
        "  rank 1: 1B0 waits for the backward of stage 2, micro-batch 0, on rank 2",
        "  rank 2: 2F1 waits for the forward of stage 1, micro-batch 1, on rank 1",
    ]


def stream(text: str, peer: int) -> tuple[Instruction, ...]:
    """Instructions from their text; messages are all for one peer."""
    actions = map(parse_action, text.split())
    return tuple(
        Instruction(*a[:3], -1 if a.kind.is_compute else peer, a.parts) for a in actions
    )  # fmt: skip


def crossed(first: str, second: str) -> Program:
    """Four stages on two ranks, 0 and 3 on the first, forwards only."""
    return Program(
        "crossed", 4, 1, (0, 1, 1, 0), (stream(first, 1), stream(second, 0)), forward_only=True
    )


def test_a_deadlock_shows_the_cycle_rank_by_rank() -> None:
    """Both ranks receive first."""
    program = crossed("0F0 3RECV_F0 0SEND_F0 3F0", "1RECV_F0 1F0 2F0 2SEND_F0")
    with pytest.raises(CheckError) as caught:
        verify_program(program)
    assert str(caught.value).splitlines() == [
        "program 'crossed' can deadlock:",
        "  rank 0 waits in 3RECV_F0 (#1) for rank 1: 2SEND_F0 (#3)",
        "  rank 1 waits in 1RECV_F0 (#0) for rank 0: 0SEND_F0 (#2)",
    ]
    verify_program(crossed("0F0 0SEND_F0 3RECV_F0 3F0", "1RECV_F0 1F0 2F0 2SEND_F0"))


def test_two_sends_that_need_buffers_are_a_deadlock() -> None:
    """Fine with a buffer of one message, and with small messages over NCCL: the trap."""
    program = Program(
        "buffered", 2, 2, (0, 1),
        (stream("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", 1),
         stream("1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1", 0)),
    )  # fmt: skip
    with pytest.raises(CheckError) as caught:
        verify_program(program)
    assert "rank 0 waits in 0SEND_F1 (#3) for rank 1: 1RECV_F1 (#4)" in str(caught.value)
    assert "rank 1 waits in 1SEND_B0 (#3) for rank 0: 0RECV_B0 (#4)" in str(caught.value)
    assert not run_rendezvous(program.streams, 2, random.Random(0))


def test_a_deadlock_with_a_rank_that_has_ended() -> None:
    with pytest.raises(CheckError) as caught:
        verify_program(crossed("0F0 0SEND_F0 3RECV_F0 3F0", "1RECV_F0 1F0 2F0"))
    assert str(caught.value).splitlines()[1:] == [
        "  rank 0 waits in 3RECV_F0 (#2) for rank 1: 2SEND_F0, which it does not have",
        "  rank 1 has nothing left to do",
    ]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("0SEND_F0 0F0 3RECV_F0 3F0", "1RECV_F0 1F0 2F0 2SEND_F0",
         "rank 0: 0SEND_F0 sends what was not computed"),
        ("0F0 0SEND_F0 3F0 3RECV_F0", "1RECV_F0 1F0 2F0 2SEND_F0",
         "rank 0: 3F0 needs the forward of stage 2, micro-batch 0, which was not received"),
        ("0F0 0SEND_F0 3RECV_F0 3F0", "1RECV_F0 2F0 1F0 2SEND_F0",
         "rank 1: 2F0 needs the forward of stage 1, micro-batch 0, which was not computed"),
        ("0F0 0F0 0SEND_F0 3RECV_F0 3F0", "1RECV_F0 1F0 2F0 2SEND_F0", "rank 0: 0F0 appears twice"),
        ("0F0 0SEND_F0 3RECV_F0", "1RECV_F0 1F0 2F0 2SEND_F0", "rank 0: 3F0 is missing"),
        ("0F0 0SEND_F0 3RECV_F0 3F0 3B0", "1RECV_F0 1F0 2F0 2SEND_F0", "no backward in a forward"),
        ("0F0 0SEND_F0 3RECV_F0 3F0 0SEND_F0", "1RECV_F0 1F0 2F0 2SEND_F0",
         "rank 0: 0SEND_F0 repeats a message"),
        ("0F0 0SEND_F0 3RECV_F0 3F0", "1RECV_F0 1F0 1SEND_F0 2F0 2SEND_F0",
         "rank 1: 1SEND_F0 is not needed, stage 2 is on the same rank"),
        ("0F0 0SEND_F0 3RECV_F0 3F0 3SEND_F0", "1RECV_F0 1F0 2F0 2SEND_F0",
         "rank 0: 3SEND_F0 has no stage at its other end"),
        ("0F0 0SEND_F1 3RECV_F0 3F0", "1RECV_F0 1F0 2F0 2SEND_F0",
         "rank 0: 0SEND_F1 is out of range"),
        ("0F0 0SEND_F0 3RECV_F0 3F0", "1RECV_F0 1F0 2F0 3F0 2SEND_F0",
         "rank 1: 3F0 belongs to rank 0"),
    ],
)  # fmt: skip
def test_reasons_of_programs(first: str, second: str, words: str) -> None:
    with pytest.raises(CheckError) as caught:
        verify_program(crossed(first, second))
    assert words in str(caught.value)


def test_a_message_by_way_of_another_rank_is_refused() -> None:
    """Sent and received, but by a rank that has neither of the stages."""
    program = Program(
        "astray", 3, 1, (0, 1, 2),
        (stream("0F0 0SEND_F0", 2), stream("1F0 1SEND_F0", 2),
         (*stream("1RECV_F0", 0), *stream("2RECV_F0 2F0", 1))),
        forward_only=True,
    )  # fmt: skip
    with pytest.raises(CheckError, match="rank 0: 0SEND_F0 names rank 2 as its peer"):
        verify_program(program)
    peer = replace(program, streams=(program.streams[0], (), ()))
    with pytest.raises(CheckError, match="0SEND_F0 names rank 2 as its peer, but stage 1 is on"):
        verify_program(peer)


def test_a_pair_whose_parts_depend_on_each_other_is_refused_in_a_program() -> None:
    program = Program("pair", 1, 1, (0,), (stream("(0F0;0B0)OVERLAP_F_B", -1),))
    with pytest.raises(CheckError, match="needs the forward of stage 0"):
        verify_program(program)
    with pytest.raises(CheckError, match="rank 0 waits forever"):
        pipelane.simulate(program)


def test_placements_of_programs() -> None:
    for placement in ((0,), (0, 2), (0, -1)):
        with pytest.raises(CheckError, match="does not put 2 stages on ranks 0 to 1"):
            verify_program(Program("odd", 2, 1, placement, ((), ())))


def test_actions_of_whole_stages_do_not_disturb() -> None:
    """UNSHARD and the like are for sharded data parallelism; they need no partner."""
    program = Program("sharded", 1, 1, (0,), (stream("0UNSHARD 0F0 0B0 0REDUCE_GRAD", -1),))
    assert verify_program(program) == (2, 0)


def test_a_long_chain_is_shortened() -> None:
    text = wait_chain(
        0, lambda rank: (f" waits for rank {rank + 1}", rank + 1) if rank < 99 else None
    )
    lines = text.splitlines()
    assert len(lines) == 13
    assert lines[0] == "  rank 0 waits for rank 1"
    assert lines[6] == "  ... and 88 more ranks"
    assert lines[-1] == "  rank 99 has nothing left to do"
    assert len(wait_chain(0, lambda rank: ("", (rank + 1) % 12)).splitlines()) == 12


def test_peak_activations() -> None:
    """A pair frees after it takes: both parts are alive while it runs."""
    text = "0F0 0F1 (0F2;0B0)OVERLAP_F_B 0I1 0I2 0F3 0W1 0B3 0W2"
    assert peak_activations([[*map(parse_action, text.split())], []]) == (3, 0)
