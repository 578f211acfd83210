"""Every schedule of the catalogue, for every size: valid, and what its docstring claims."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelane_schedules.controllable import v_half, v_min
from pipelane_schedules.interleaved import interleaved

import pipelane
from pipelane.actions import Kind
from pipelane.catalogue import build_schedule, load_generator, schedule_names
from pipelane.errors import ScheduleError
from pipelane.schedule import Schedule

#: v that a schedule allows; the others take any.
ONLY = {
    "naive": 1, "gpipe": 1, "1f1b": 1, "zb-h1": 1, "zb-h2": 1,
    "zbv": 2, "v-half": 2, "v-min": 2, "dualpipev": 2,
}  # fmt: skip
NAMES = [name for name in schedule_names() if name != "auto"]


def group(p: int, m: int) -> int:
    """The largest of max(1, m // p) groups of nearly equal size."""
    return -(-m // max(1, m // p))


#: Chunks alive at most on rank r, as the docstrings say, where they give a formula.
PEAK: dict[str, Callable[[int, int, int, int], int]] = {
    "naive": lambda p, m, v, r: 1,
    "gpipe": lambda p, m, v, r: m,
    "1f1b": lambda p, m, v, r: min(p - r, m),
    "interleaved": lambda p, m, v, r: min(m * v, group(p, m) * (v - 1) + 2 * (p - 1 - r) + 1),
    "bfs": lambda p, m, v, r: m * v,
    "zb-h1": lambda p, m, v, r: min(p, m),
    "zb-h2": lambda p, m, v, r: min(2 * p - 1, m),
}
#: Chunks alive at most on any rank.
MOST: dict[str, Callable[[int, int, int], int]] = {
    "zbv": lambda p, m, v: min(2 * p, 2 * m),
    "dualpipev": lambda p, m, v: min(2 * p + 1, 2 * m),
    "v-half": lambda p, m, v: p + 3,
    "v-min": lambda p, m, v: -(-2 * p // 3) + 3,
    "wave": lambda p, m, v: min(m * v, 2 * p * v),
}
#: Makespan with F = I = W = 1 per chunk, where the docstrings give it.
MAKESPAN: dict[str, Callable[[int, int, int], int | None]] = {
    "naive": lambda p, m, v: 3 * m * p,
    "gpipe": lambda p, m, v: 3 * (m + p - 1),
    "1f1b": lambda p, m, v: 3 * (m + p - 1),
    "interleaved": lambda p, m, v: 3 * max(m * v + p - 1, v * p + m - 1),
    "bfs": lambda p, m, v: 3 * max(m * v + p - 1, v * p + m - 1),
    "zb-h1": lambda p, m, v: 3 * m + p - 1 if m >= p else None,
    "zb-h2": lambda p, m, v: 3 * m + p - 1 if m >= 2 * p - 1 else None,
    "zbv": lambda p, m, v: 6 * m + p - 1 if m >= 2 * p - 1 else None,
    "dualpipev": lambda p, m, v: 6 * m + 2 * (p - 1) if m >= 2 * p else None,
}
SPAN: dict[str, Callable[[int, int, int], int | None]] = {
    "zb-h2": lambda p, m, v: 3 * m if m >= 2 * p - 1 else None,
    "zbv": lambda p, m, v: 6 * m if m >= 2 * p - 1 else None,
}


def assert_as_claimed(name: str, p: int, m: int, v: int) -> None:
    schedule = build_schedule(name, p, m, v)
    certificate = pipelane.check(schedule)  # complete, acyclic, certified
    assert certificate.computes >= 2 * p * v * m - m * p * v  # pairs count once
    assert all(verdict.safe for verdict in certificate.verdicts if verdict.semantics != "fifo")
    timeline = pipelane.simulate(schedule)
    peaks = list(timeline.peak_activations)
    assert peaks == list(certificate.peak_activations)
    if name in PEAK:
        assert peaks == [PEAK[name](p, m, v, r) for r in range(p)], (name, p, m, v)
    else:
        assert max(peaks) <= MOST[name](p, m, v), (name, p, m, v)
    for meter, formulas in ((timeline.makespan, MAKESPAN), (timeline.span, SPAN)):
        claimed = formulas[name](p, m, v) if name in formulas else None
        assert claimed is None or meter == claimed, (name, p, m, v)
    assert timeline.makespan >= 3 * m * v


@pytest.mark.parametrize("name", NAMES)
def test_every_size_up_to_8_ranks_33_micro_batches_4_chunks(name: str) -> None:
    for p in range(1, 9):
        for m in range(1, 34):
            for v in [ONLY[name]] if name in ONLY else (1, 2, 3, 4):
                assert_as_claimed(name, p, m, v)


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(NAMES), p=st.integers(1, 24), m=st.integers(1, 60), v=st.integers(1, 6))
def test_any_size(name: str, p: int, m: int, v: int) -> None:
    assert_as_claimed(name, p, m, ONLY.get(name, v))


@pytest.mark.parametrize("name", sorted(ONLY))
def test_impossible_chunks_name_what_works(name: str) -> None:
    for v in range(1, 4):
        if v != ONLY[name]:
            with pytest.raises(ScheduleError, match=f"use chunks={ONLY[name]}"):
                build_schedule(name, 3, 4, v)


def test_chunks_by_default() -> None:
    for name in NAMES:
        wanted = ONLY.get(name, 2)
        assert build_schedule(name, 3, 4).shape.chunks == wanted
        assert getattr(load_generator(name), "default_chunks", 1) == wanted


@pytest.mark.parametrize("generator", [v_half, v_min])
def test_reordering_is_never_worse_and_needs_no_more_memory(
    generator: Callable[..., Schedule],
) -> None:
    for p in range(1, 9):
        for m in (1, 2, p, 2 * p, 3 * p + 1):
            plain, best = (
                pipelane.simulate(build_schedule(made, p, m, 2))
                for made in (partial(generator, plain=True), generator)
            )
            assert best.makespan <= plain.makespan
            assert max(best.peak_activations) <= max(plain.peak_activations)


@pytest.mark.parametrize(("p", "half", "third"), [(4, 12, 16), (8, 24, 32), (16, 48, 64)])
def test_bubbles_of_the_controllable_memory_paper(p: int, half: int, third: int) -> None:
    """3 d and 4 d units for d ranks; memory (d + 2) / 2 and (d + 4) / 3 of the undivided stage."""
    for name, bubble, memory in (("v-half", half, p + 2), ("v-min", third, -(-2 * (p + 4) // 3))):
        timeline = pipelane.simulate(build_schedule(name, p, 3 * p))
        assert timeline.makespan - 6 * 3 * p <= bubble
        assert max(timeline.peak_activations) <= memory


def test_groups_of_interleaved() -> None:
    schedule = build_schedule(partial(interleaved, group=2), 2, 5, 2)
    forwards = [(a.stage, a.microbatch) for a in schedule.orders[0] if a.kind is Kind.F]
    assert forwards[:6] == [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3)]
    pipelane.check(schedule)
    with pytest.raises(ScheduleError, match="group must be from 1 to m = 5"):
        build_schedule(partial(interleaved, group=6), 2, 5, 2)


def test_pairs_of_dualpipev() -> None:
    """In a pair one part is a forward and the other a backward, of different chunks."""
    schedule = build_schedule("dualpipev", 4, 8)
    pairs = [a for order in schedule.orders for a in order if a.kind is Kind.OVERLAP]
    assert pairs
    for pair in pairs:
        ahead, back = pair.parts
        assert (ahead.kind, back.kind) == (Kind.F, Kind.B)
        assert ahead.stage + back.stage == 7
    assert pipelane.simulate(schedule).makespan == 54
