"""The pictures: widths, contents, honesty."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import pipelane
from pipelane.costs import Costs
from pipelane.timeline import Timeline
from pipelane.views.terminal import TimelineView, render_text

PLAIN_80 = """\
1f1b, planned  p=4 m=8
rank 0                   10                  20                  30    busy peak
     +-------------------+-------------------+-------------------+-----
   0 F0F1F2F3............B0==F4B1==F5B2==F6B3==F7B4==..B5==..B6==..B7==  73%   4
   1 ..F0F1F2........B0==F3B1==F4B2==F5B3==F6B4==F7B5==..B6==..B7==....  73%   3
   2 ....F0F1....B0==F2B1==F3B2==F4B3==F5B4==F6B5==F7B6==..B7==........  73%   2
   3 ......F0B0==F1B1==F2B2==F3B3==F4B4==F5B5==F6B6==F7B7==............  73%   1

F- forward  B= backward  .. bubble  busy = work / makespan
peak = most activations alive, in chunks
makespan 33  bubble fraction 37.5%  (makespan - work) / work of the busiest rank
span     33  bubble rate     27.3%  (span - work) / span of the widest rank"""

GPIPE_120_RANK_1 = (
    "   1 ···F0─F1─F2─F3─F4─F5─F6─F7─··················B0════B1════B2════B3════B4════B5════B6════"
    "B7════······  73%   8"
)


def draw(timeline: Timeline, width: int, *, colour: bool = False, ascii: bool = False) -> list[str]:
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=colour, color_system="truecolor" if colour else None
    )
    console.print(TimelineView(timeline, width, ascii))
    return out.getvalue().splitlines()


def planned(name: str, p: int, m: int) -> Timeline:
    return pipelane.simulate(pipelane.build_schedule(name, p, m))


def rows_of(lines: list[str], ranks: int) -> list[str]:
    return lines[3 : 3 + ranks]


def test_snapshots() -> None:
    assert render_text(planned("1f1b", 4, 8)) == PLAIN_80
    assert draw(planned("gpipe", 4, 8), 120)[4] == GPIPE_120_RANK_1
    wide = draw(planned("naive", 2, 2), 200, ascii=True)
    assert (
        wide[3]
        == "   0 "
        + "".join(f"F{i}" + 13 * "-" + 45 * "." + f"B{i}" + 28 * "=" for i in range(2))
        + "  50%   1"
    )


names = st.sampled_from(["naive", "gpipe", "1f1b"])


@given(name=names, p=st.integers(1, 9), m=st.integers(1, 24), width=st.integers(40, 200),
       unit=st.sampled_from(["", "s"]), ascii=st.booleans())  # fmt: skip
def test_no_line_is_wider_and_every_rank_has_a_row(
    name: str, p: int, m: int, width: int, unit: str, ascii: bool
) -> None:
    timeline = pipelane.simulate(
        pipelane.build_schedule(name, p, m), Costs.unit(p, forward=1.3e-3), unit=unit
    )
    lines = draw(timeline, width, ascii=ascii)
    assert max(map(len, lines)) <= width
    rows = rows_of(lines, p)
    assert [int(row[:4]) for row in rows] == list(range(p))
    assert len({len(row) for row in rows}) == 1
    if ascii:
        "\n".join(lines).encode("ascii")


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("p", "m", "width"),
    [(4, 8, 80), (4, 8, 120), (8, 32, 120), (32, 256, 120), (1, 1, 40), (16, 4, 80)],
)
def test_bubbles_take_their_share_of_each_row(name: str, p: int, m: int, width: int) -> None:
    timeline = planned(name, p, m)
    for rank, row in enumerate(rows_of(draw(timeline, width, ascii=True), p)):
        cells = row[5:-9]
        idle = 1 - timeline.utilisation[rank]
        assert abs(cells.count(".") / len(cells) - idle) < 0.02 + 1.5 / len(cells) * (
            m if name == "naive" else 2
        )


def test_colour_changes_nothing_but_colour() -> None:
    timeline = planned("1f1b", 4, 8)
    coloured = "\n".join(draw(timeline, 80, colour=True))
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == "\n".join(draw(timeline, 80))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_every_micro_batch_is_labelled_at_80_columns(name: str) -> None:
    for row in rows_of(draw(planned(name, 4, 8), 80), 4):
        for number in range(8):
            assert f"F{number}" in row
            assert f"B{number}" in row


def test_split_backwards_and_pairs_are_told_apart() -> None:
    from test_golden import CUSTOM, parsed

    case = next(c for c in CUSTOM if c["schedule"] == "dualpipev" and c["p"] == 4)
    text = "\n".join(draw(pipelane.simulate(parsed(case)), 200))
    for word in ("input gradient", "weight gradient", "overlapped pair", "&", "stages=8"):
        assert word in text


def test_numbers_come_from_the_timeline() -> None:
    timeline = pipelane.simulate(
        pipelane.build_schedule("1f1b", 3, 5), Costs.unit(3, forward=0.011, input_grad=0.02)
    )
    text = "\n".join(draw(timeline, 100))
    assert f"bubble fraction {timeline.bubble_fraction:.1%}" in text
    assert f"bubble rate     {timeline.bubble_rate:.1%}" in text
    assert f"makespan {timeline.makespan:.3g} s" in text


@pytest.mark.parametrize(("scale", "unit"), [(1.0, "s"), (1e-3, "ms"), (1e-6, "us")])
def test_units(scale: float, unit: str) -> None:
    timeline = pipelane.simulate(
        pipelane.build_schedule("gpipe", 2, 2),
        Costs.unit(2, forward=scale, input_grad=scale, weight_grad=scale),
    )
    lines = draw(timeline, 80)
    assert lines[0].endswith(f"time in {unit}")
    assert f"makespan 9 {unit}" in "\n".join(lines)


def test_an_empty_timeline_is_drawn() -> None:
    lines = draw(Timeline("nothing", (0,), 0, ((),)), 80)
    assert lines[3].startswith("   0 ")
