"""The simulator by hand-computed cases, and against lower bounds."""

from __future__ import annotations

import json
import math
import random

import pytest
from fake import random_schedule
from hypothesis import given
from hypothesis import strategies as st

import pipelane
from pipelane.actions import Kind, parse_action
from pipelane.bounds import makespan_bound
from pipelane.costs import Costs, Link
from pipelane.errors import CheckError, ConfigError
from pipelane.program import Instruction, Program
from pipelane.timeline import Message, Span, Timeline


def costs(forward: list[float], backward: list[float], **options: object) -> Costs:
    zero = (0.0,) * len(forward)
    return Costs(tuple(forward), tuple(backward), zero, **options)  # type: ignore[arg-type]


def test_latency_and_bandwidth_of_one_message() -> None:
    """F 1 s; 10 bytes at 5 bytes/s and 0.5 s latency: 2.5 s; F and B 3 s; back 2.5 s; B 2 s."""
    timeline = pipelane.simulate(
        pipelane.build_schedule("gpipe", 2, 1),
        costs([1, 1], [2, 2], boundary_bytes=(10,), link=Link(0.5, 5.0)),
    )
    assert timeline.makespan == 1 + 2.5 + 3 + 2.5 + 2
    assert [(m.start, m.end) for m in timeline.messages] == [(1.0, 3.5), (6.5, 9.0)]


def test_messages_on_a_link_follow_each_other() -> None:
    """Three outputs at 1, 2, 3 s, each taking the link 2 s: they arrive at 3, 5, 7 s."""
    timeline = pipelane.simulate(
        pipelane.build_schedule("gpipe", 2, 3),
        costs([1, 0], [0, 0], boundary_bytes=(4,), link=Link(0.0, 2.0)),
    )
    forward = [m for m in timeline.messages if m.kind is Kind.F]
    assert [(m.start, m.end) for m in forward] == [(1, 3), (3, 5), (5, 7)]


def test_two_stages_of_a_rank_share_the_link_to_another_rank() -> None:
    """Outputs of stage 0 and of stage 2 both go from rank 0 to rank 1.

    F takes 1 s, a message 4 s. 0F0 ends at 1, its output is there at 5, 1F0 ends at 6, its output
    is back at 10, 2F0 ends at 11. 0F1 ends at 2; its output leaves at 5 when the link is free, is
    there at 9, 1F1 ends at 10, its output leaves at 10 and is back at 14, 2F1 ends at 15. The
    outputs of stage 2 leave at 11 and at 15 and are there at 15 and at 19.
    """
    shape = pipelane.Shape(2, 2, 2)
    rows = [[pipelane.Action(Kind.F, s, i) for s in (r, r + 2) for i in (0, 1)] for r in (0, 1)]
    timeline = pipelane.simulate(
        pipelane.Schedule.looped("mine", shape, rows),
        costs([1, 1, 1, 1], [0, 0, 0, 0], boundary_bytes=(8, 8, 8), link=Link(0.0, 2.0)),
    )
    sent = {(m.stage, m.microbatch): (m.start, m.end) for m in timeline.messages}
    assert sent == {
        (0, 0): (1, 5), (0, 1): (5, 9), (1, 0): (6, 10), (1, 1): (10, 14),
        (2, 0): (11, 15), (2, 1): (15, 19),
    }  # fmt: skip
    assert timeline.makespan == 20


def test_latency_does_not_take_the_link() -> None:
    """Messages of 1 s follow each other at once, each arrives 10 s after it left the link."""
    timeline = pipelane.simulate(
        pipelane.build_schedule("gpipe", 2, 2),
        costs([1, 0], [0, 0], boundary_bytes=(1,), link=Link(10.0, 1.0)),
    )
    forward = [m for m in timeline.messages if m.kind is Kind.F]
    assert [(m.start, m.end) for m in forward] == [(1, 12), (2, 13)]


def test_boundaries_have_their_own_sizes() -> None:
    timeline = pipelane.simulate(
        pipelane.build_schedule("gpipe", 3, 1),
        costs([0, 0, 0], [0, 0, 0], boundary_bytes=(3, 5), link=Link(0.0, 1.0)),
    )
    assert [(m.stage, m.end - m.start) for m in timeline.messages] == [
        (0, 3), (1, 5), (2, 5), (1, 3)
    ]  # fmt: skip
    assert timeline.makespan == 16


def test_no_message_between_stages_of_one_rank() -> None:
    """A snake turns on the last rank without a message."""
    order = [[pipelane.Action(Kind.F, s, 0) for s in row] for row in ((0, 3), (1, 2))]
    snake = pipelane.Schedule("v", pipelane.Shape(2, 1, 2), (0, 1, 1, 0), tuple(map(tuple, order)))
    timeline = pipelane.simulate(
        snake, costs([1] * 4, [0] * 4, boundary_bytes=(2, 100, 2), link=Link(0.0, 1.0))
    )
    assert timeline.makespan == 4 + 2 + 2
    assert [m.stage for m in timeline.messages] == [0, 2]


def test_an_overlapped_pair_takes_as_long_as_both() -> None:
    pair = pipelane.Action(
        Kind.OVERLAP, -1, -1, (pipelane.Action(Kind.F, 0, 1), pipelane.Action(Kind.B, 0, 0))
    )
    order = (pipelane.Action(Kind.F, 0, 0), pair, pipelane.Action(Kind.B, 0, 1))
    schedule = pipelane.Schedule("mine", pipelane.Shape(1, 2), (0,), (order,))
    timeline = pipelane.simulate(schedule, Costs((2,), (3,), (5,)))
    assert [(s.start, s.end) for s in timeline.spans[0]] == [(0, 2), (2, 12), (12, 20)]
    assert timeline.peak_activations == (2,)


def test_split_backwards_take_their_own_time() -> None:
    """The gradient of the input goes on without waiting for that of the weights."""
    rows = [["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]]
    orders = tuple(tuple(map(parse_action, row)) for row in rows)
    schedule = pipelane.Schedule("mine", pipelane.Shape(2, 1), (0, 1), orders)
    timeline = pipelane.simulate(schedule, Costs((1, 2), (3, 4), (5, 60)))
    assert [[(s.start, s.end) for s in row] for row in timeline.spans] == [
        [(0, 1), (7, 10), (10, 15)],
        [(1, 3), (3, 7), (7, 67)],
    ]
    assert timeline.peak_activations == (1, 1)


def test_directions_have_their_own_links() -> None:
    slow_back = {(1, 0): Link(5.0)}
    timeline = pipelane.simulate(
        pipelane.build_schedule("gpipe", 2, 1),
        costs([1, 1], [1, 1], links=slow_back, link=Link(0.25)),
    )
    assert timeline.makespan == 1 + 0.25 + 2 + 5 + 1


def test_communication_overlaps_with_compute() -> None:
    """The second forward runs while the first output travels."""
    timeline = pipelane.simulate(
        pipelane.build_schedule("gpipe", 2, 2), costs([1, 1], [0, 0], link=Link(1.0))
    )
    starts = [s.start for s in timeline.spans[1] if s.action.kind is Kind.F]
    assert starts == [2.0, 3.0]


def test_uneven_stages_wait_for_the_slowest() -> None:
    timeline = pipelane.simulate(
        pipelane.build_schedule("1f1b", 3, 10), costs([1, 3, 1], [1, 3, 1])
    )
    assert (
        timeline.makespan == 10 * 6 + 1 + 1
    )  # the first forward before it, the last backward after
    assert timeline.work == (20, 60, 20)
    assert timeline.utilisation[1] == max(timeline.utilisation)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 5), (5, 1), (4, 2), (2, 9)])
@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
def test_odd_sizes(name: str, p: int, m: int) -> None:
    timeline = pipelane.simulate(pipelane.build_schedule(name, p, m))
    assert timeline.ranks == p
    assert [len(row) for row in timeline.spans] == [2 * m] * p
    assert timeline.unit == ""
    assert timeline.peak_activations == {
        "naive": (1,) * p, "gpipe": (m,) * p, "1f1b": tuple(min(p - r, m) for r in range(p))
    }[name]  # fmt: skip
    assert len(timeline.messages) == 2 * (p - 1) * m


seconds = st.floats(0, 10, allow_nan=False)


@given(
    data=st.data(),
    name=st.sampled_from(["naive", "gpipe", "1f1b"]),
    p=st.integers(1, 5),
    m=st.integers(1, 8),
    latency=seconds,
)
def test_never_below_the_bound(
    data: st.DataObject, name: str, p: int, m: int, latency: float
) -> None:
    lists = st.lists(seconds, min_size=p, max_size=p)
    made = Costs(
        tuple(data.draw(lists)), tuple(data.draw(lists)), tuple(data.draw(lists)),
        boundary_bytes=tuple(data.draw(st.lists(seconds, min_size=p - 1, max_size=p - 1))),
        link=Link(latency, 2.0),
    )  # fmt: skip
    schedule = pipelane.build_schedule(name, p, m)
    bound = makespan_bound(schedule, made)
    assert pipelane.simulate(schedule, made).makespan >= bound.seconds * (1 - 1e-12)


def test_never_below_the_bound_for_any_valid_schedule() -> None:
    """Random placements, several chunks, whole and split backwards mixed."""
    rng = random.Random(4)
    for _ in range(600):
        schedule = random_schedule(rng)
        s = schedule.shape.stages
        forward, back, weight = (tuple(rng.random() for _ in range(s)) for _ in range(3))
        made = Costs(forward, back, weight, link=Link(0.1))
        least = makespan_bound(schedule, made).seconds
        assert pipelane.simulate(schedule, made).makespan >= least * (1 - 1e-12)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(p=st.integers(1, 8), m=st.integers(1, 20), f=st.integers(1, 5), b=st.integers(1, 5))
def test_the_bound_is_tight_for_equal_stages(name: str, p: int, m: int, f: int, b: int) -> None:
    schedule = pipelane.build_schedule(name, p, m)
    made = Costs.unit(p, forward=f, input_grad=b, weight_grad=0)
    assert pipelane.simulate(schedule, made).makespan == makespan_bound(schedule, made).seconds
    assert makespan_bound(schedule, made).seconds == (m + p - 1) * (f + b)


def test_the_bound_names_what_it_comes_from() -> None:
    """A slow middle stage: 10 x 6 s there, 1 s before it and 1 s after it."""
    schedule = pipelane.build_schedule("gpipe", 3, 10)
    bound = makespan_bound(schedule, costs([1, 3, 1], [1, 3, 1]))
    assert bound == (62, "rank 1: warm-up, work and cool-down")
    one = makespan_bound(pipelane.build_schedule("gpipe", 3, 1), costs([1, 3, 1], [1, 3, 1]))
    assert one == (10, "one micro-batch's way forward and back")


def test_the_bound_counts_the_wait_for_the_first_backward() -> None:
    """Rank 0 works 2 x 4 s and then waits: its first backward can start at 8 s, not at 4 s."""
    made = costs([2, 1, 1, 1], [2, 1, 1, 1])
    schedule = pipelane.build_schedule("1f1b", 4, 2)
    assert makespan_bound(schedule, made) == (12, "rank 0: warm-up, work and cool-down")
    assert pipelane.simulate(schedule, made).makespan == 12


def test_the_bound_counts_the_way_of_messages() -> None:
    """2 bytes at 1 byte/s and 0.5 s latency over each of two boundaries, forward and back."""
    made = costs([1, 1, 1], [1, 1, 1], boundary_bytes=(2, 2), link=Link(0.5, 1.0))
    schedule = pipelane.build_schedule("1f1b", 3, 1)
    assert makespan_bound(schedule, made).seconds == 6 + 4 * 2.5
    assert pipelane.simulate(schedule, made).makespan == 16
    # The last rank starts 3 s late, works 10 s, and its last gradient takes 3 s to the first.
    made = costs([1, 1, 1], [1, 1, 1], link=Link(0.5))
    schedule = pipelane.build_schedule("gpipe", 3, 5)
    assert makespan_bound(schedule, made) == (16, "rank 2: warm-up, work and cool-down")
    assert pipelane.simulate(schedule, made).makespan == 16


def test_the_bound_of_split_backwards_is_met() -> None:
    """ZB-H1 with p = 2: rank 1 starts 1 s late and works 3 s for each micro-batch."""
    rows = ["0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"]
    orders = tuple(tuple(map(parse_action, row.split())) for row in rows)
    schedule = pipelane.Schedule("zb", pipelane.Shape(2, 3), (0, 1), orders)
    bound = makespan_bound(schedule, Costs.unit(2))
    assert bound.seconds == 10
    assert pipelane.simulate(schedule).makespan == bound.seconds


# Timelines


def hand_made() -> Timeline:
    """Rank 0: 0..2 and 5..9, rank 1: 3..4 and 4..5; nothing on rank 2."""
    f, b = Kind.F, Kind.B
    return Timeline(
        "by hand", (0, 1, 2), 1,
        (
            (Span(pipelane.Action(f, 0, 0), 0.0, 2.0), Span(pipelane.Action(b, 0, 0), 5.0, 9.0)),
            (Span(pipelane.Action(f, 1, 0), 3.0, 4.0), Span(pipelane.Action(b, 1, 0), 4.0, 5.0)),
            (),
        ),
        (Message(f, 0, 0, 0, 1, 2.0, 2.5),), measured=True,
    )  # fmt: skip


def test_meters() -> None:
    timeline = hand_made()
    assert timeline.ranks == 3
    assert timeline.makespan == 9
    assert timeline.windows == (9, 2, 0)
    assert timeline.span == 9
    assert timeline.work == (6, 2, 0)
    assert timeline.idle == (3, 0, 0)
    assert timeline.utilisation == (6 / 9, 2 / 9, 0)
    assert timeline.bubble_rate == (9 - 6) / 9
    assert timeline.bubble_fraction == (9 - 6) / 6
    assert timeline.peak_activations == (1, 1, 0)
    assert timeline.spans[0][1].seconds == 4


def test_span_and_makespan_differ_when_all_start_late() -> None:
    late = Timeline("late", (0,), 1, ((Span(pipelane.Action(Kind.F, 0, 0), 3.0, 5.0),),))
    assert (late.makespan, late.span) == (5, 2)
    assert late.bubble_rate == 0
    assert late.bubble_fraction == (5 - 2) / 2


def test_empty_timelines() -> None:
    for spans in ((), ((),), ((), ())):
        timeline = Timeline("empty", (), 0, spans)
        meters = (timeline.makespan, timeline.span, timeline.bubble_rate, timeline.bubble_fraction)
        assert meters == (0, 0, 0, 0)
        assert timeline.work == timeline.utilisation == timeline.idle == (0,) * len(spans)
        assert Timeline.from_json(timeline.to_json()) == timeline
    instant = pipelane.simulate(pipelane.build_schedule("1f1b", 2, 2), costs([0, 0], [0, 0]))
    assert (instant.makespan, instant.bubble_rate, instant.utilisation) == (0, 0, (0, 0))


def test_json_round_trip() -> None:
    simulated = pipelane.simulate(
        pipelane.build_schedule("1f1b", 3, 4), costs([1, 2, 1], [2, 1, 2], link=Link(0.25))
    )
    assert simulated.messages
    for timeline in (simulated, hand_made(), pipelane.simulate(pair_schedule())):
        again = Timeline.from_json(timeline.to_json())
        assert again == timeline
        assert again.peak_activations == timeline.peak_activations


def pair_schedule() -> pipelane.Schedule:
    order = map(parse_action, ["0F0", "(0F1;0I0)OVERLAP_F_B", "0W0", "0B1"])
    return pipelane.Schedule("pair", pipelane.Shape(1, 2), (0,), (tuple(order),))


def test_bad_json() -> None:
    good = json.loads(hand_made().to_json())
    changes: list[dict[str, object]] = [
        {"schema": 99}, {"kind": "something"}, {"spans": [[[5, 0, 1]]]}, {"spans": [["0F0"]]},
        {"spans": [[["0Q0", 0, 1]]]}, {"spans": [[["0F0", "x", 1]]]}, {"spans": None},
        {"messages": [["F", 0]]}, {"messages": [["Q", 0, 0, 0, 1, 2, 3]]}, {"placement": 3},
    ]  # fmt: skip
    texts = ["{}", "[1]", "x", "", "9" * 5000, "[" * 100_000]
    for text in texts + [json.dumps({**good, **change}) for change in changes]:
        with pytest.raises(ConfigError):
            Timeline.from_json(text)


@pytest.mark.parametrize(
    "bad",
    [
        {"forward": ()},
        {"forward": (1.0, math.nan)},
        {"forward": (1.0, -1.0)},
        {"input_grad": (1.0,)},
        {"boundary_bytes": (1.0, 1.0)},
    ],
)
def test_bad_costs(bad: dict[str, tuple[float, ...]]) -> None:
    good = {"forward": (1.0, 1.0), "input_grad": (1.0, 1.0), "weight_grad": (1.0, 1.0)}
    with pytest.raises(ConfigError):
        Costs(**{**good, **bad})  # type: ignore[arg-type]
    for link in ({"latency": -1.0}, {"latency": math.inf}, {"bandwidth": 0.0}):
        with pytest.raises(ConfigError):
            Link(**link)


def test_costs_for_another_number_of_stages() -> None:
    with pytest.raises(ConfigError, match="3 stages"):
        pipelane.simulate(pipelane.build_schedule("1f1b", 2, 2), Costs.unit(3))


def test_a_program_that_cannot_run_is_an_error() -> None:
    early = Program(
        "early", 2, 1, (0, 1), ((Instruction(Kind.SEND_F, 0, 0, 1),), ()), forward_only=True
    )
    with pytest.raises(CheckError, match="rank 0: 0SEND_F0 sends what was not computed"):
        pipelane.simulate(early)
    stuck = Program("stuck", 2, 1, (0, 1), ((), (Instruction(Kind.F, 1, 0),)), forward_only=True)
    with pytest.raises(CheckError, match="rank 1 waits forever in 1F0"):
        pipelane.simulate(stuck)


def test_costs_of_kinds() -> None:
    made = Costs((1, 2), (3, 4), (5, 6))
    assert [made.seconds(kind, 1) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)] == [2, 10, 4, 6]
    with pytest.raises(ConfigError, match="not SEND_F"):
        made.seconds(Kind.SEND_F, 0)
    with pytest.raises(ConfigError, match="stages must be at least 1"):
        Costs.unit(0)
