"""Bounds against the best of all schedules (exhaustive search), random ones, and known optima."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake import random_schedule
from hypothesis import given, settings
from hypothesis import strategies as st

import pipelane
from pipelane.actions import Action, Kind
from pipelane.bounds import makespan_bound, span_bound, span_bounds
from pipelane.costs import Costs, Link
from pipelane.errors import ConfigError
from pipelane.schedule import Schedule, Shape

DATA = json.loads((Path(__file__).parent / "data" / "schedules.json").read_text())

# The exhaustive search. Whole seconds; all micro-batches are alike. A micro-batch is (next task of
# its chain F0 .. F(S-1), I(S-1) .. I0; seconds until that task's input is there; stages whose W is
# still to do). Every rank that is free starts any task that it can, or waits: all schedules.
Batch = tuple[int, int, tuple[int, ...]]


def best(
    placement: Sequence[int], m: int, forward: Sequence[int], back: Sequence[int],
    weight: Sequence[int] | None, latency: int, room: Sequence[int], window: int | None,
) -> int:  # fmt: skip
    """The least makespan, or the least window of one rank, over all schedules.

    ``room``: per rank, how many chunks can be held from F to the end of the backward.
    ``weight`` is None for whole backwards.
    """
    stages, ranks = len(placement), max(placement) + 1
    chain = [*range(stages), *range(stages - 1, -1, -1)]

    def held(batches: Sequence[Batch], busy: Sequence[tuple[int, int]], rank: int) -> int:
        count = 0
        for task, _, left in batches:
            for s in range(stages):
                if placement[s] == rank:
                    started = task > s
                    freed = task > 2 * stages - 1 - s and s not in left
                    count += started and not freed
        # What is freed by a task under way is still held until it ends.
        return count + sum(1 for r, (_, frees) in enumerate(busy) if r == rank and frees)

    start = (((0, 0, ()),) * m, ((0, 0),) * ranks)
    cost_of = {start: 0}
    todo = deque([start])
    while todo:
        state = todo.popleft()
        cost = cost_of[state]
        batches, busy = state
        ended = all(task == 2 * stages and not left for task, _, left in batches)
        if ended and (window is not None or all(b == 0 for b, _ in busy)):
            # A window may have a task under way on its rank: its time counts.
            return cost + (busy[window][0] if window is not None else 0)
        # All sets of tasks that the free ranks can start now.
        choices: list[tuple[tuple[Batch, ...], tuple[tuple[int, int], ...]]] = [state]
        for rank in range(ranks):
            if busy[rank][0]:
                continue
            more = []
            for now, taken in choices:
                for i, (task, wait, left) in enumerate(now):
                    if i and now[i - 1] == now[i]:
                        continue
                    if task < 2 * stages and wait == 0 and placement[chain[task]] == rank:
                        s, is_forward = chain[task], task < stages
                        if is_forward and held(now, taken, rank) >= room[rank]:
                            continue
                        seconds = forward[s] if is_forward else back[s]
                        hop = 0
                        if task + 1 < 2 * stages and placement[chain[task + 1]] != rank:
                            hop = latency
                        owes = left
                        if not is_forward and weight is not None:
                            owes = tuple(sorted((*left, s)))
                        frees = int(not is_forward and weight is None)
                        batch = (task + 1, seconds + hop, owes)
                        run = (*taken[:rank], (seconds, frees), *taken[rank + 1 :])
                        more.append((tuple(sorted((*now[:i], batch, *now[i + 1 :]))), run))
                    for s in left:
                        # The I of this stage has ended, for its rank is free.
                        if weight is not None and placement[s] == rank:
                            batch = (task, wait, tuple(x for x in left if x != s))
                            run = (*taken[:rank], (weight[s], 1), *taken[rank + 1 :])
                            more.append((tuple(sorted((*now[:i], batch, *now[i + 1 :]))), run))
            choices += more
        for now, taken in choices:
            counts = 1
            if window is not None:
                mine = [s for s in range(stages) if placement[s] == window]
                begun = any(task > min(mine) for task, _, _ in now)
                over = taken[window][0] == 0 and all(
                    task > 2 * stages - 1 - min(mine) and not set(left) & set(mine)
                    for task, _, left in now
                )
                counts = int(begun and not over)
            after = (
                tuple(sorted((t, max(0, w - 1), left) for t, w, left in now)),
                tuple((max(0, b - 1), f if b > 1 else 0) for b, f in taken),
            )
            if after == state and counts == 0:
                continue
            if cost + counts < cost_of.get(after, 10**9):
                cost_of[after] = cost + counts
                (todo.append if counts else todo.appendleft)(after)
    raise AssertionError("no schedule")


def example(placement: Sequence[int], m: int, split: bool) -> Schedule:
    """Any valid schedule: bounds take the placement, m and the kind of backward from it."""
    ranks = max(placement) + 1
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    for i in range(m):
        for s, rank in enumerate(placement):
            orders[rank].append(Action(Kind.F, s, i))
        for s in range(len(placement) - 1, -1, -1):
            for kind in (Kind.I, Kind.W) if split else (Kind.B,):
                orders[placement[s]].append(Action(kind, s, i))
    shape = Shape(ranks, m, len(placement) // ranks)
    return Schedule("example", shape, tuple(placement), tuple(map(tuple, orders)))


# placement, m, forward, back, weight, latency, room
TINY: list[tuple[Any, ...]] = [
    ((0,), 3, [2], [1], [1], 0, [1]),
    ((0, 1), 3, [1, 1], [2, 2], None, 0, [2, 1]),
    ((0, 1), 4, [1, 1], [2, 2], None, 0, [1, 1]),
    ((0, 1), 3, [1, 1], [1, 1], None, 1, [2, 2]),
    ((0, 1), 4, [1, 2], [2, 1], None, 0, [2, 2]),
    ((1, 0), 3, [2, 1], [1, 2], None, 1, [2, 1]),
    ((0, 1), 3, [1, 1], [1, 1], [1, 1], 0, [2, 2]),
    ((0, 1), 3, [1, 1], [1, 1], [1, 1], 0, [3, 3]),
    ((0, 1), 3, [1, 1], [1, 1], [1, 1], 1, [1, 2]),
    ((0, 1), 3, [1, 2], [2, 1], [1, 2], 0, [2, 1]),
    ((0, 1), 2, [1, 1], [1, 1], [3, 1], 1, [2, 2]),
    ((0, 1, 2), 2, [1, 1, 1], [1, 1, 1], None, 0, [2, 2, 1]),
    ((0, 1, 2), 3, [1, 1, 1], [2, 2, 2], None, 0, [3, 2, 1]),
    ((0, 1, 2), 3, [1, 1, 1], [1, 1, 1], None, 0, [2, 2, 1]),
    ((0, 1, 2), 4, [1, 1, 1], [1, 1, 1], None, 0, [3, 2, 1]),
    ((0, 1, 2), 3, [1, 2, 1], [1, 1, 2], None, 0, [2, 1, 1]),
    ((0, 1, 2), 2, [1, 1, 1], [1, 1, 1], [1, 1, 1], 0, [1, 2, 1]),
    ((0, 1, 0, 1), 2, [1, 1, 1, 1], [1, 1, 1, 1], None, 0, [4, 4]),
    ((0, 1, 0, 1), 2, [1, 1, 1, 1], [2, 2, 2, 2], None, 0, [3, 2]),
    ((0, 1, 1, 0), 2, [1, 1, 1, 1], [1, 1, 1, 1], None, 1, [4, 3]),
]


@pytest.mark.parametrize(("placement", "m", "f", "b", "w", "c", "room"), TINY)
def test_no_schedule_of_tiny_sizes_beats_the_bounds(
    placement: Any, m: int, f: Any, b: Any, w: Any, c: int, room: Any
) -> None:
    stages = len(placement)
    costs = Costs(
        tuple(f), tuple(b), tuple(w or [0] * stages), activation_bytes=(1.0,) * stages,
        link=Link(float(c)),
    )  # fmt: skip
    schedule = example(placement, m, w is not None)
    least = best(placement, m, f, b, w, c, room, None)
    bound = makespan_bound(schedule, costs, room)
    assert bound.seconds <= least + 1e-9, bound
    # Not far below either: on these sizes the bounds are good.
    assert bound.seconds >= 0.7 * least, (bound, least)
    for rank, found in enumerate(span_bounds(schedule, costs, room)):
        least = best(placement, m, f, b, w, c, room, rank)
        assert found.seconds <= least + 1e-9, (rank, found)


def test_the_search_finds_known_optima() -> None:
    """GPipe and 1F1B are optimal for equal stages; one slot means one micro-batch at a time."""
    for p, m in ((2, 3), (3, 2), (3, 4)):
        stages = [1] * p
        assert best(range(p), m, stages, stages, None, 0, [m] * p, None) == 2 * (m + p - 1)
        assert best(range(p), m, stages, stages, None, 0, [1] * p, None) == 2 * m * p
    # ZB-H2's span with p = 2: no idle time at all.
    assert best((0, 1), 3, [1, 1], [1, 1], [1, 1], 0, [3, 3], 0) == 9


def peak_bytes(schedule: Schedule, held: Sequence[float]) -> list[float]:
    peaks = []
    for order in schedule.orders:
        alive = peak = 0.0
        for action in order:
            for part in action.flat():
                if part.kind is Kind.F:
                    alive += held[part.stage]
                    peak = max(peak, alive)
                elif part.kind in (Kind.B, Kind.W):
                    alive -= held[part.stage]
        peaks.append(peak)
    return peaks


@settings(max_examples=400)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_schedules_stay_above_the_bounds(seed: int) -> None:
    """Any placement and order, uneven stages, links with latency and bytes, tight memory."""
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    s = schedule.shape.stages

    def numbers(count: int, zero: float = 0.1) -> tuple[float, ...]:
        return tuple(0.0 if rng.random() < zero else rng.uniform(0.1, 3) for _ in range(count))

    costs = Costs(
        numbers(s), numbers(s), numbers(s), boundary_bytes=numbers(s - 1),
        activation_bytes=numbers(s), link=Link(rng.choice([0.0, 0.3]), rng.choice([1.0, 50.0])),
    )  # fmt: skip
    timeline = pipelane.simulate(schedule, costs)
    memory = peak_bytes(schedule, costs.activation_bytes)
    for limit in (None, memory):
        assert makespan_bound(schedule, costs, limit).seconds <= timeline.makespan + 1e-6
        for bound, window in zip(
            span_bounds(schedule, costs, limit), timeline.windows, strict=True
        ):
            assert bound.seconds <= window + 1e-6, bound
        assert span_bound(schedule, costs, limit).seconds <= timeline.span + 1e-6
    evaluation = schedule.forward_only()
    timeline = pipelane.simulate(evaluation, costs)
    assert makespan_bound(evaluation, costs).seconds <= timeline.makespan + 1e-6
    assert span_bound(evaluation, costs).seconds <= timeline.span + 1e-6


def golden(name: str) -> list[dict[str, Any]]:
    return [c for c in DATA["unit_cases"] if c["schedule"].split()[0] == name and "order" in c]


def parsed(case: dict[str, Any]) -> Schedule:
    rows = []
    for row in case["order"]:
        cells = [token[1:].split(".") for token in row.split()]
        kinds = [token[0] for token in row.split()]
        rows.append(
            [Action(Kind(k), int(s), int(i)) for k, (_, s, i) in zip(kinds, cells, strict=True)]
        )
    return Schedule.looped(case["schedule"], Shape(case["p"], case["m"], case["v"]), rows)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
def test_zero_bubble_schedules_meet_their_span_bound(name: str) -> None:
    cases = golden(name)
    met = 0
    for case in cases:
        p, m = case["p"], case["m"]
        if case["comm"] or m < (p if name == "zb-h1" else 2 * p - 1):
            continue
        schedule = parsed(case)
        costs = Costs(
            (case["F"],) * p, (case["I"],) * p, (case["W"],) * p, activation_bytes=(1.0,) * p
        )
        timeline = pipelane.simulate(schedule, costs)
        assert span_bound(schedule, costs, case["peak_chunks"]).seconds == timeline.span
        met += 1
    assert met >= 1


@given(p=st.integers(1, 6), m=st.integers(1, 12), f=st.integers(1, 4), b=st.integers(1, 4))
def test_1f1b_meets_its_bounds_with_its_own_memory(p: int, m: int, f: int, b: int) -> None:
    schedule = pipelane.build_schedule("1f1b", p, m)
    costs = Costs((f,) * p, (b,) * p, (0.0,) * p, activation_bytes=(10.0,) * p)
    memory = [10.0 * min(p - r, m) for r in range(p)]
    timeline = pipelane.simulate(schedule, costs)
    bounds = span_bounds(schedule, costs, memory)
    assert [bound.seconds for bound in bounds] == list(timeline.windows)
    assert makespan_bound(schedule, costs, memory).seconds == timeline.makespan


@given(
    p=st.integers(1, 5), m=st.integers(1, 8), v=st.integers(1, 3),
    f=st.integers(1, 4), b=st.integers(1, 4),
)  # fmt: skip
def test_looped_equal_stages(p: int, m: int, v: int, f: int, b: int) -> None:
    schedule = example([s % p for s in range(p * v)], m, False)
    costs = Costs((f,) * (p * v), (b,) * (p * v), (0.0,) * (p * v))
    formula = max(m * v + p - 1, v * p + m - 1) * (f + b)
    assert makespan_bound(schedule, costs).seconds >= formula


def test_reasons_say_what_limits() -> None:
    schedule = pipelane.build_schedule("1f1b", 3, 6)
    costs = Costs((1, 1, 1), (2, 2, 2), (0, 0, 0), activation_bytes=(4, 4, 4))
    assert makespan_bound(schedule, costs).reason == "rank 2: warm-up, work and cool-down"
    tight = makespan_bound(schedule, costs, [4, 100, 100])
    assert tight == (54, "rank 0: room for 1 of 6 micro-batches")
    middle = Costs((1, 1, 1), (2, 9, 2), (0, 0, 0))
    assert span_bound(schedule, middle) == (
        63, "rank 0: the way to stage 1 and back, and the work there",
    )  # fmt: skip
    assert span_bound(schedule, costs, [12, 100, 100]) == (
        24, "rank 0: its memory, warm-up and work",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (3, "rank 0 has 3 bytes for activations, but one micro-batch needs 4"),
        ([4, 4], "2 entries for 3 ranks"),
        ([4, -1, 4], "rank 1 must be at least 0"),
        (float("nan"), "rank 0 must be at least 0"),
    ],
)
def test_impossible_memory(memory: Any, words: str) -> None:
    schedule = pipelane.build_schedule("1f1b", 3, 6)
    costs = Costs((1, 1, 1), (2, 2, 2), (0, 0, 0), activation_bytes=(4, 4, 4))
    for bound in (makespan_bound, span_bound):
        with pytest.raises(ConfigError, match=words):
            bound(schedule, costs, memory)
    with pytest.raises(ConfigError, match="costs are for 2 stages"):
        makespan_bound(schedule, Costs.unit(2))
