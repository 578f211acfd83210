"""The simulator by hand-computed cases, and against lower bounds."""

from __future__ import annotations

import math
import random

import pytest
from fake import random_schedule
from hypothesis import given
from hypothesis import strategies as st

import pipelane
from pipelane.actions import Kind
from pipelane.bounds import makespan_bound
from pipelane.costs import Costs, Link
from pipelane.errors import CheckError, ConfigError
from pipelane.program import Instruction, Program
from pipelane.timeline import Timeline


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
        made = Costs(*[tuple(rng.random() for _ in range(s)) for _ in range(3)], link=Link(0.1))
        least = makespan_bound(schedule, made).seconds
        assert pipelane.simulate(schedule, made).makespan >= least * (1 - 1e-12)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(p=st.integers(1, 8), m=st.integers(1, 20), f=st.integers(1, 5), b=st.integers(1, 5))
def test_the_bound_is_tight_for_equal_stages(name: str, p: int, m: int, f: int, b: int) -> None:
    schedule = pipelane.build_schedule(name, p, m)
    made = Costs.unit(p, forward=f, input_grad=b, weight_grad=0)
    assert pipelane.simulate(schedule, made).makespan == makespan_bound(schedule, made).seconds
    assert makespan_bound(schedule, made).seconds == (m + p - 1) * (f + b)


def test_json_round_trip() -> None:
    timeline = pipelane.simulate(pipelane.build_schedule("1f1b", 3, 4), costs([1, 2, 1], [2, 1, 2]))
    assert Timeline.from_json(timeline.to_json()) == timeline
    for text in ("{}", "[1]", "x", timeline.to_json().replace('"schema": 1', '"schema": 99')):
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
    stuck = Program("stuck", 2, 1, (0, 1), ((), (Instruction(Kind.F, 1, 0),)), forward_only=True)
    with pytest.raises(CheckError, match="rank 1 waits forever in 1F0"):
        pipelane.simulate(stuck)
