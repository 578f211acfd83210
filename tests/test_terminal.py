"""The pictures: widths, contents, honesty."""

from __future__ import annotations

import io
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

import pipelane
from pipelane.actions import parse_action
from pipelane.cli import app
from pipelane.costs import Costs
from pipelane.errors import ConfigError
from pipelane.timeline import Span, Timeline
from pipelane.views.terminal import TimelineView, render_text

SNAPSHOTS = Path(__file__).parent / "data" / "snapshots"

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


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
def test_show_draws_the_stored_picture(name: str, width: int) -> None:
    """To renew one: pipelane show NAME -p 4 -m 8 --width WIDTH > NAME-WIDTH.txt"""
    arguments = ["show", name, "-p", "4", "-m", "8", "--width", str(width)]
    plain = {"FORCE_COLOR": None, "TTY_COMPATIBLE": None}
    done = CliRunner().invoke(app, arguments, env=plain)
    assert done.exit_code == 0
    assert done.stdout == (SNAPSHOTS / f"{name}-{width}.txt").read_text(encoding="ascii")


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
    assert {len(row) for row in rows} == {len(lines[1])}
    if ascii:
        "\n".join(lines).encode("ascii")


@given(name=names, p=st.integers(1, 8), m=st.integers(1, 20), width=st.integers(40, 200),
       costs=st.tuples(*[st.integers(1, 30)] * 3), unit=st.sampled_from(["", "s"]))  # fmt: skip
def test_bubbles_take_their_share_of_each_row(
    name: str, p: int, m: int, width: int, costs: tuple[int, int, int], unit: str
) -> None:
    # Tenths, because it is round numbers that fall on the columns' grid all in the same way.
    forward, input_grad, weight_grad = (cost / 10 for cost in costs)
    timeline = pipelane.simulate(
        pipelane.build_schedule(name, p, m),
        Costs.unit(p, forward=forward, input_grad=input_grad, weight_grad=weight_grad),
        unit=unit,
    )
    assert_honest(timeline, width)


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m", "width"), [(32, 256, 120), (64, 4, 80), (4, 1000, 80)])
def test_large_schedules_are_compressed_honestly(name: str, p: int, m: int, width: int) -> None:
    timeline = planned(name, p, m)
    assert_honest(timeline, width)
    assert f"makespan {timeline.makespan:.0f}" in "\n".join(draw(timeline, width))


def test_cells_that_round_alike_do_not_hide_work() -> None:
    """Every edge falls alike between columns: with rounded edges 8 of 72 busy columns, or 12 of
    32, were drawn as bubbles. Where there is room for labels they stay."""
    schedule = pipelane.build_schedule("naive", 2, 8)
    even = pipelane.simulate(schedule, Costs.unit(2, weight_grad=0.0))
    assert_honest(even, 158)
    row = rows_of(draw(even, 158), 2)[0]
    assert all(f"F{i}" in row and f"B{i}" in row for i in range(8))
    costs = Costs.unit(5, forward=1.4, input_grad=0.8, weight_grad=1.0)
    schedule = pipelane.build_schedule("naive", 5, 10)
    assert_honest(pipelane.simulate(schedule, costs, unit=""), 185)


def assert_honest(timeline: Timeline, width: int) -> None:
    """Bubble columns in proportion to idle time, to two columns or 2.5 % of the row."""
    lines = draw(timeline, width, ascii=True)
    ruler = lines[2].strip()
    for rank, row in enumerate(rows_of(lines, timeline.ranks)):
        cells = row[5 : 5 + len(ruler)]
        assert len(cells) == len(ruler)
        idle = (1 - timeline.utilisation[rank]) * len(cells)
        assert abs(cells.count(".") - idle) <= max(2, 0.025 * len(cells))


def test_rows_stand_under_each_other() -> None:
    """A stage begins in the column where the one before it ends: edges are rounded, not widths."""
    rows = rows_of(draw(planned("gpipe", 4, 8), 97, ascii=True), 4)
    for above, below in itertools.pairwise(rows):
        assert above.index("F1") == below.index("F0")
        assert below.index("B1") == above.index("B0")


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


def test_a_pair_names_both_its_micro_batches() -> None:
    pair = Span(parse_action("(0F3;0B12)OVERLAP_F_B"), 0.0, 1.0)
    timeline = Timeline("pair", (0,), 13, ((pair,),))
    assert draw(timeline, 60, ascii=True)[3].startswith("   0 F3&B12%%%")


@given(name=names, p=st.integers(1, 8), m=st.integers(1, 20), width=st.integers(80, 200))
def test_numbers_come_from_the_timeline(name: str, p: int, m: int, width: int) -> None:
    timeline = pipelane.simulate(
        pipelane.build_schedule(name, p, m), Costs.unit(p, forward=0.011, input_grad=0.02)
    )
    lines = draw(timeline, width, ascii=True)
    text = "\n".join(lines)
    assert f"bubble fraction {timeline.bubble_fraction:.1%}" in text
    assert f"bubble rate     {timeline.bubble_rate:.1%}" in text
    assert f"makespan {timeline.makespan:.3g} s" in text
    assert f"span     {timeline.span:.3g} s" in text
    for rank, row in enumerate(rows_of(lines, p)):
        busy, peak = row.split()[-2:]
        assert int(peak) == timeline.peak_activations[rank]
        assert busy.removeprefix(">") == f"{timeline.utilisation[rank]:.0%}"


def test_a_rank_that_idles_a_little_is_not_called_wholly_busy() -> None:
    lines = draw(planned("gpipe", 2, 1000), 80)
    rows = rows_of(lines, 2)
    assert {len(row) for row in rows} == {len(lines[1])}
    assert [row.split()[-2:] for row in rows] == [[">99%", "1000"]] * 2
    assert "100%" in draw(planned("gpipe", 1, 3), 80)[3]


def test_nothing_is_cut_at_40_columns() -> None:
    text = " ".join(draw(planned("1f1b", 4, 8), 40, ascii=True))
    assert "(makespan - work) / work of the busiest rank" in text
    assert "..." not in text.partition("F- forward")[2]


@pytest.mark.parametrize(("scale", "unit"), [(1.0, "s"), (1e-3, "ms"), (1e-6, "us")])
def test_units(scale: float, unit: str) -> None:
    timeline = pipelane.simulate(
        pipelane.build_schedule("gpipe", 2, 2),
        Costs.unit(2, forward=scale, input_grad=scale, weight_grad=scale),
    )
    lines = draw(timeline, 80)
    assert lines[0].endswith(f"time in {unit}")
    assert f"makespan 9 {unit}" in "\n".join(lines)


@pytest.mark.parametrize(
    ("cost", "shown"), [(333.2, "3998"), (83.3, "1000"), (1e9, "1.2e+10"), (1e-6, "1.2e-05")]
)
def test_numbers_stay_short(cost: float, shown: str) -> None:
    costs = Costs.unit(2, forward=cost, input_grad=cost, weight_grad=cost)
    timeline = pipelane.simulate(pipelane.build_schedule("1f1b", 2, 3), costs, unit="")
    assert f"makespan {shown}  " in "\n".join(draw(timeline, 80))


@pytest.mark.parametrize("end", [float("inf"), float("nan"), 1e-320])
def test_times_without_a_scale_are_refused(end: float) -> None:
    timeline = Timeline("odd", (0,), 1, ((Span(parse_action("0F0"), 0.0, end),),))
    with pytest.raises(ConfigError, match="only finite times"):
        str(timeline)


@example(name="模型" * 30, width=80, ascii=False)
@example(name="line\nbreak \x1b[2J", width=80, ascii=False)
@given(name=st.text(max_size=120), width=st.integers(40, 90), ascii=st.booleans())
def test_no_name_tears_the_picture(name: str, width: int, ascii: bool) -> None:
    lines = draw(Timeline(name, (0,), 0, ((),), measured=True, unit=""), width, ascii=ascii)
    assert max(map(cell_len, lines)) <= width
    assert ", measured  p=1 m=0" in lines[0]
    assert lines[3].startswith("   0 ")
    if ascii:
        "\n".join(lines).encode("ascii")


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
@pytest.mark.parametrize(
    ("env", "colour", "unicode"),
    [
        ({"PYTHONIOENCODING": "utf-8"}, True, True),
        ({"PYTHONIOENCODING": "utf-8", "NO_COLOR": "1"}, False, True),
        ({"PYTHONIOENCODING": "ascii"}, True, False),
    ],
)
def test_print_on_a_terminal(env: dict[str, str], colour: bool, unicode: bool) -> None:
    """On a terminal of 100 columns: its width, colour and Unicode where they are wanted."""
    code = (
        "import pipelane as p; print(p.simulate(p.build_schedule('1f1b', 2, 40), p.Costs.unit(2)))"
    )
    text = on_a_terminal([sys.executable, "-c", code], columns=100, env=env)
    assert ("\x1b[30;" in text) is colour
    assert ("·" in text) is unicode
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    assert max(map(len, lines)) == 100


def on_a_terminal(command: list[str], columns: int, env: dict[str, str]) -> str:
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    clean = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs,
        env={**clean, "TERM": "xterm-256color", **env},
    ) as process:  # fmt: skip
        os.close(theirs)
        chunks = []
        try:
            while chunk := os.read(ours, 4096):
                chunks.append(chunk)
        except OSError:  # how Linux says that the other end is closed
            pass
        os.close(ours)
    assert process.returncode == 0
    return b"".join(chunks).decode()


def test_an_empty_timeline_is_drawn() -> None:
    lines = draw(Timeline("nothing", (0,), 0, ((),)), 80)
    assert lines[3].startswith("   0 ")
