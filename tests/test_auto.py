"""``auto``: schedules made from costs and memory."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipelane
from pipelane.bounds import makespan_bound, span_bound
from pipelane.catalogue import build_schedule, schedule_names
from pipelane.costs import Costs, Link
from pipelane.errors import ConfigError, ScheduleError
from pipelane.exact import exact
from pipelane.memory import peak_bytes
from pipelane.schedule import Schedule, Shape
from pipelane.synthesis import auto

ROWS = json.loads((Path(__file__).parent / "data" / "schedules.json").read_text())["zb_paper"]


def costs_of(row: dict[str, Any]) -> tuple[Costs, float]:
    """Costs of a row of Zero Bubble's tables, and bytes of a micro-batch, per token and layer."""
    p, hidden = row["p"], row["hidden"]
    held = float(34 * hidden + 5 * row["heads"] * row["seq"])
    costs = Costs(
        (row["TF"],) * p,
        (row["TB_input"],) * p,
        (row["TW"],) * p,
        activation_bytes=(held,) * p,
        weight_grad_bytes=(32.0 * hidden,) * p,
        link=Link(row["Tcomm"]),
    )
    return costs, held


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-m{row['m']}")
def test_as_good_as_the_published_search(row: dict[str, Any], times: int) -> None:
    costs, held = costs_of(row)
    p, limit = row["p"], times * row["p"] * held
    schedule = build_schedule("auto", p, row["m"], costs=costs, memory=limit)
    pipelane.check(schedule)
    assert max(peak_bytes(schedule, costs)) <= limit * (1 + 1e-9)
    timeline = pipelane.simulate(schedule, costs)
    assert timeline.bubble_rate <= row["published"][f"zb_{times}p"] + 0.0005
    work = row["m"] * (row["TF"] + row["TB_input"] + row["TW"])
    assert timeline.span >= work * (1 - 1e-12)


def instance(draw: random.Random, chunks: int = 1) -> tuple[Shape, Costs, list[float]]:
    p = draw.randint(1, 6)
    shape = Shape(p, draw.randint(1, 12), chunks)
    s = range(shape.stages)
    held = tuple(draw.uniform(0.5, 2) for _ in s)
    costs = Costs(
        tuple(draw.choice([0.0, draw.uniform(0.5, 2)]) for _ in s),
        tuple(draw.uniform(0.0, 2) for _ in s),
        tuple(draw.choice([0.0, draw.uniform(0.3, 1.5)]) for _ in s),
        boundary_bytes=tuple(draw.uniform(0, 1) for _ in s)[1:],
        activation_bytes=held,
        weight_grad_bytes=tuple(size * draw.random() for size in held),
        link=draw.choice([Link(), Link(0.1), Link(0.05, 5.0)]),
    )
    return shape, costs, [draw.uniform(2.0, 4.0 * p) * chunks for _ in range(p)]


def fitting(shape: Shape, costs: Costs, limits: list[float]) -> list[Schedule]:
    found = []
    for name in schedule_names():
        if name == "auto":
            continue
        try:
            schedule = build_schedule(
                name, shape.ranks, shape.microbatches, shape.chunks, costs, limits
            )
        except ScheduleError:
            continue
        peaks = peak_bytes(schedule, costs)
        if all(peak <= limit for peak, limit in zip(peaks, limits, strict=True)):
            found.append(schedule)
    return found


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**9), chunks=st.sampled_from([1, 1, 2]))
def test_valid_within_memory_and_never_worse_than_the_catalogue(seed: int, chunks: int) -> None:
    shape, costs, limits = instance(random.Random(seed), chunks)
    schedule = auto(shape, costs, limits, seconds=0.05)
    assert (schedule.name, schedule.shape) == ("auto", shape)
    pipelane.check(schedule)
    for peak, limit in zip(peak_bytes(schedule, costs), limits, strict=True):
        assert peak <= limit * (1 + 1e-9)
    mine = pipelane.simulate(schedule, costs)
    others = [pipelane.simulate(other, costs) for other in fitting(shape, costs, limits)]
    tight = 1 + 1e-9
    for other in others:
        # None is as good in one meter and better in the other.
        assert mine.makespan <= other.makespan * tight or mine.span < other.span * tight
        assert mine.span <= other.span * tight or mine.makespan < other.makespan * tight


def test_the_same_seed_gives_the_same_schedule() -> None:
    shape, costs, limits = instance(random.Random(5))
    one = auto(shape, costs, limits, seconds=0.05, seed=3)
    assert one == auto(shape, costs, limits, seconds=0.05, seed=3)


def test_more_time_is_never_worse() -> None:
    for seed in range(5):
        shape, costs, limits = instance(random.Random(seed))
        short, long = (
            pipelane.simulate(auto(shape, costs, limits, seconds=s), costs) for s in (0.0, 0.3)
        )
        least = min(short.makespan, long.makespan), min(short.span, long.span)
        assert long.makespan / least[0] + long.span / least[1] <= (
            short.makespan / least[0] + short.span / least[1] + 1e-9
        )


def test_no_memory_for_one_micro_batch() -> None:
    costs = Costs((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), activation_bytes=(10.0, 30.0))
    with pytest.raises(ScheduleError, match=r"rank 1 hold 30 bytes .* 10 more than .* 20"):
        auto(Shape(2, 4), costs, 20.0)
    with pytest.raises(ScheduleError, match="memory must be"):
        auto(Shape(2, 4), costs, [20.0])
    with pytest.raises(ScheduleError, match="costs are for 2 stages"):
        auto(Shape(3, 4), costs)


def test_unit_costs_without_bubbles() -> None:
    """With enough memory and m >= 2p - 1 all ranks are busy from first to last action."""
    for p in (1, 2, 4, 8):
        timeline = pipelane.simulate(auto(Shape(p, 4 * p)))
        assert timeline.bubble_rate == 0.0
        assert timeline.makespan == 3 * 4 * p + p - 1


# -- against an exact solver ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(16))
def test_near_the_proven_optimum(seed: int) -> None:
    pytest.importorskip("ortools")
    draw = random.Random(seed)
    p, m = draw.randint(2, 3), draw.randint(1, 6)
    f, i, w = (tuple(draw.uniform(low, 2.0) for _ in range(p)) for low in (0.5, 0.5, 0.3))
    costs = Costs(
        f, i, w, activation_bytes=(10.0,) * p,
        weight_grad_bytes=(draw.uniform(3, 10),) * p, link=Link(draw.choice([0.0, 0.1, 0.3])),
    )  # fmt: skip
    caps = [draw.uniform(10, 20 * p) for _ in range(p)]
    shape = Shape(p, m)
    timeline = pipelane.simulate(auto(shape, costs, caps), costs)
    for meter in ("makespan", "span"):
        proven = exact(shape, costs, caps, meter=meter, seconds=30)  # type: ignore[arg-type]
        assert proven.optimal
        pipelane.check(proven.schedule)
        best = getattr(pipelane.simulate(proven.schedule, costs), meter)
        assert proven.lower_bound <= best * (1 + 1e-9)
        assert best <= proven.lower_bound * 1.004  # times are rounded down
        assert proven.lower_bound * (1 - 1e-9) <= getattr(timeline, meter) <= 1.07 * best
        bound = makespan_bound if meter == "makespan" else span_bound
        assert bound(proven.schedule, costs, caps).seconds <= best * (1 + 1e-9)


def test_exact_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = Costs((1.0,), (1.0,), (1.0,), activation_bytes=(10.0,))
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ConfigError, match=r"torch-pipelane\[exact\]"):
        exact(Shape(1, 1), costs)
    monkeypatch.undo()
    pytest.importorskip("ortools")
    with pytest.raises(ScheduleError, match="fits into the memory"):
        exact(Shape(1, 1), costs, 5.0)
