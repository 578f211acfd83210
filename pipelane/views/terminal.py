"""Draw a timeline in the terminal: a row per rank, cells proportional to time.

Everything is told twice: by colour, and by letters and fill, so that a picture without colour, on
paper or in a log, says the same. Numbers beside the picture come from the timeline, never from the
picture.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import textwrap
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style

from pipelane.actions import Action, Kind
from pipelane.errors import ConfigError
from pipelane.timeline import Span, Timeline

__all__ = ["TimelineView", "plain_ascii", "render_text", "require_drawable", "time_scale"]

MIN_WIDTH = 40
GUTTER = 5  # "rank " before each row
LEAST, MOST = 1e-300, 1e300

# Blue, orange, teal and violet keep apart for colour-blind eyes; bright white or black text on them
# is readable on light and dark backgrounds alike, plain "white" is grey on most terminals.
_STYLES = {
    Kind.F: Style(color="bright_white", bgcolor="dodger_blue3"),
    Kind.B: Style(color="black", bgcolor="dark_orange"),
    Kind.I: Style(color="black", bgcolor="dark_cyan"),
    Kind.W: Style(color="bright_white", bgcolor="medium_purple4"),
    Kind.OVERLAP: Style(color="black", bgcolor="gold3"),
}
_NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.OVERLAP: "overlapped pair",
}
_LETTER = {Kind.F: "F", Kind.B: "B", Kind.I: "I", Kind.W: "W", Kind.OVERLAP: "&"}
_BUBBLE_STYLE = Style(dim=True)
_BOLD = Style(bold=True)


@dataclass(frozen=True)
class _Glyphs:
    """Characters of a picture: fills of cells, bubble, and the axis."""

    fill: dict[Kind, str]
    bubble: str
    tick: str
    line: str


_UNICODE = _Glyphs(
    {Kind.F: "─", Kind.B: "═", Kind.I: "╌", Kind.W: "┄", Kind.OVERLAP: "≡"},
    "·", "┬", "─",
)  # fmt: skip
_ASCII = _Glyphs(
    {Kind.F: "-", Kind.B: "=", Kind.I: "~", Kind.W: "+", Kind.OVERLAP: "%"},
    ".", "+", "-",
)  # fmt: skip

Line = list[Segment]


class TimelineView:
    """A rich renderable.

    Args:
        timeline: what to draw.
        width: columns; the console's if not given, at least 40.
        ascii: plain ASCII; decided by the console if not given.
        bound: a lower bound on the makespan and its reason, for the footer.
    """

    def __init__(
        self,
        timeline: Timeline,
        width: int | None = None,
        ascii: bool | None = None,
        bound: tuple[float, str] | None = None,
    ) -> None:
        self.timeline = timeline
        self.width = width
        self.ascii = ascii
        self.bound = bound

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ascii = plain_ascii(console, options) if self.ascii is None else self.ascii
        width = max(MIN_WIDTH, min(self.width or options.max_width, options.max_width))
        glyphs = _ASCII if ascii else _UNICODE
        for line in _picture(self.timeline, width, glyphs, self.bound):
            yield from line
            yield Segment.line()


def plain_ascii(console: Console, options: ConsoleOptions) -> bool:
    """Whether to keep to ASCII: into files and pipes, and where the encoding has no more."""
    return options.ascii_only or not (console.is_terminal or console.is_jupyter)


def render_text(timeline: Timeline, width: int | None = None) -> str:
    """The picture as text, for ``print``: colour and Unicode only where standard output is a
    terminal that can show them (and ``NO_COLOR`` is not set); 80 columns where it is not one."""
    terminal = sys.stdout.isatty()
    unicode = terminal and (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    if width is None:
        width = shutil.get_terminal_size((80, 24)).columns if terminal else 80
    out = io.StringIO()
    console = Console(
        file=out,
        width=max(MIN_WIDTH, width),
        force_terminal=terminal,
        no_color="NO_COLOR" in os.environ or not terminal,
        legacy_windows=False,
    )
    console.print(TimelineView(timeline, width, ascii=not unicode), end="")
    return out.getvalue().rstrip("\n")


def require_drawable(timeline: Timeline) -> None:
    """Raise ConfigError unless the times are numbers that a scale can be made of."""
    makespan = timeline.makespan
    if makespan != 0 and not LEAST <= makespan <= MOST:  # NaN is refused as well
        raise ConfigError(
            f"timeline {timeline.name!r}: its makespan is {makespan}; only finite times from "
            f"{LEAST:g} to {MOST:g} can be drawn, so give the costs in another unit"
        )


def _picture(
    timeline: Timeline, width: int, glyphs: _Glyphs, bound: tuple[float, str] | None
) -> Iterator[Line]:
    require_drawable(timeline)
    peak_width = max(4, 1 + max((len(str(peak)) for peak in timeline.peak_activations), default=0))
    columns = max(1, width - GUTTER - len("busy ") - peak_width)
    scale, unit = time_scale(timeline.makespan, timeline.unit)
    per_second = _columns_per_second(timeline, columns)
    columns = max(1, round(timeline.makespan * per_second)) if per_second else columns
    yield _title(timeline, unit, width, glyphs)
    numbers, marks = _axis(timeline.makespan * scale, columns, glyphs)
    yield [Segment("rank ".rjust(GUTTER) + numbers + "busy " + "peak".rjust(peak_width))]
    yield [Segment(" " * GUTTER + marks, _BUBBLE_STYLE)]
    for rank, row in enumerate(timeline.spans):
        line: Line = [Segment(f"{rank:>{GUTTER - 1}} ")]
        line += _row(row, columns, per_second, glyphs)
        line.append(Segment(_percent(timeline.utilisation[rank]).rjust(5)))
        line.append(Segment(f"{timeline.peak_activations[rank]:>{peak_width}}"))
        yield line
    yield []
    yield from _legend(timeline, width, glyphs)
    yield from _meters(timeline, width, scale, unit, bound)


def _title(timeline: Timeline, unit: str, width: int, glyphs: _Glyphs) -> Line:
    # Names come from files and plug-ins: a line break or an escape code would tear the picture.
    name = "".join(c if c.isprintable() else "?" for c in str(timeline.name))
    if glyphs is _ASCII:
        name = name.encode("ascii", "replace").decode()
    sizes = f"p={timeline.ranks} m={timeline.microbatches}"
    if len(timeline.placement) != timeline.ranks:
        sizes += f" stages={len(timeline.placement)}"
    if unit:
        sizes += f"  time in {unit}"
    kind = f", {'measured' if timeline.measured else 'planned'}"
    room = max(0, width - len(kind) - len("  ") - len(sizes))
    title = _fit(name, room) + kind
    return [Segment(title, _BOLD), Segment(_fit(f"  {sizes}", width - cell_len(title)))]


def _percent(share: float) -> str:
    """Whole percent, but never 100 % of a rank that idles."""
    return ">99%" if 0.995 <= share < 1 - 1e-9 else f"{share:.0%}"


def _columns_per_second(timeline: Timeline, columns: int) -> float:
    """The scale; whole columns for unit costs, so that equal actions look equal."""
    if timeline.makespan <= 0:
        return 0.0
    exact = columns / timeline.makespan
    whole = exact if timeline.unit == "s" or exact < 1 else float(int(exact))
    return whole if whole >= 0.6 * exact else exact


def _fit(text: str, width: int) -> str:
    """Cut to ``width`` columns; some characters take two."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, max(0, width - 3)) + "..."[: max(0, width)]


def _wrapped(parts: Sequence[Line], width: int, gap: str = "  ") -> Iterator[Line]:
    """Lay out parts from left to right; a new line where the next part does not fit.

    Only a part that is wider than a line by itself is broken, between words.
    """
    line: Line = []
    used = 0
    for part in parts:
        size = sum(len(segment.text) for segment in part)
        if line and used + len(gap) + size > width:
            yield line
            line, used = [], 0
        if line:
            line.append(Segment(gap))
            used += len(gap)
        if size > width:
            *full, rest = textwrap.wrap("".join(segment.text for segment in part), width)
            yield from ([Segment(text)] for text in full)
            part, size = [Segment(rest)], len(rest)
        line += part
        used += size
    if line:
        yield line


def time_scale(makespan: float, unit: str) -> tuple[float, str]:
    """Factor and unit in which the makespan is a handy number."""
    if unit != "s":
        return 1.0, unit
    if makespan >= 1.0:
        return 1.0, "s"
    return (1e3, "ms") if makespan >= 1e-3 else (1e6, "us")


def _number(value: float) -> str:
    """Three or more significant digits; an exponent only where it is shorter."""
    if value == round(value) and abs(value) < 1e6:
        return str(round(value))
    return f"{value:.0f}" if 999.5 <= value < 999_999.5 else f"{value:.3g}"


def _axis(end: float, columns: int, glyphs: _Glyphs) -> tuple[str, str]:
    """Numbers, and the ticks below them; ticks at round numbers, at least ten columns apart."""
    step = _tick_step(end, max(1, columns // 10))
    numbers = [" "] * columns
    marks = [glyphs.line] * columns
    index = 0
    while end > 0 and index * step <= end * (1 + 1e-9):
        at = round(index * step / end * columns)
        text = _number(index * step)
        if at < columns:
            marks[at] = glyphs.tick
            start = min(at, columns - 1 - len(text))
            if start >= 0 and all(c == " " for c in numbers[max(0, start - 1) : start + len(text)]):
                numbers[start : start + len(text)] = text
        index += 1
    return "".join(numbers), "".join(marks)


def _tick_step(end: float, ticks: int) -> float:
    if end <= 0:
        return 1.0
    rough = end / ticks
    power = 10.0
    while power > rough:
        power /= 10
    while power * 10 <= rough:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))


def _row(row: Sequence[Span], columns: int, per_second: float, glyphs: _Glyphs) -> Line:
    """One rank: cells where they are wide enough to tell apart, else shares per column."""
    if not row or per_second <= 0:
        return [Segment(glyphs.bubble * columns, _BUBBLE_STYLE)]
    widths: dict[Kind, list[float]] = {}
    for span in row:
        widths.setdefault(span.action.kind, []).append((span.end - span.start) * per_second)
    # Narrower cells melt into each other and rounding drops some, which would lie about bubbles.
    if min(sum(found) / len(found) for found in widths.values()) >= 1.0:
        busy = sum(map(sum, widths.values()))
        # Cells whose edges all fall alike between columns are all rounded the same way, and a
        # rank looks busier or idler than it is: then what rounding takes from one, the next gets.
        for carry in (False, True):
            line, drawn = _cells(row, columns, per_second, glyphs, carry)
            if abs(drawn - busy) <= max(1.5, 0.02 * columns):
                return line
    return _shares(row, columns, per_second, glyphs)


def _cells(
    row: Sequence[Span], columns: int, per_second: float, glyphs: _Glyphs, carry: bool
) -> tuple[Line, int]:
    """A cell per action, and how many columns they take.

    Edges are rounded, not widths, so that what happens at one time stands in one column in all
    rows; with ``carry`` the right edges give way by a column to keep the sum of the widths.
    """
    line: Line = []
    at = drawn = 0
    busy = 0.0
    for span in row:
        busy += (span.end - span.start) * per_second
        begin = max(at, round(span.start * per_second))
        right = begin + round(busy) - drawn if carry else round(span.end * per_second)
        end = max(begin, min(columns, right))
        if begin > at:
            line.append(Segment(glyphs.bubble * (begin - at), _BUBBLE_STYLE))
        if end > begin:
            line.append(_cell(span.action, end - begin, glyphs))
            drawn += end - begin
        at = max(at, end)
    if at < columns:
        line.append(Segment(glyphs.bubble * (columns - at), _BUBBLE_STYLE))
    return line, drawn


def _cell(action: Action, width: int, glyphs: _Glyphs) -> Segment:
    """The longest label that fits, filled up with the kind's own character."""
    kind = action.kind
    label = "&".join(f"{_LETTER[part.kind]}{part.microbatch}" for part in action.flat())
    if len(label) > width:
        label = _LETTER[kind]
    return Segment(label + glyphs.fill[kind] * (width - len(label)), _STYLES[kind])


def _shares(row: Sequence[Span], columns: int, per_second: float, glyphs: _Glyphs) -> Line:
    """Each column shows what filled most of its time.

    What rounding keeps from one column is carried on to the next, so that over any stretch the
    columns of each kind, and of bubble, are in proportion to their time. A column only shows what
    is in it.
    """
    starts = [span.start for span in row]
    owed: dict[Kind | None, float] = {}
    line: Line = []
    for column in range(columns):
        begin, end = column / per_second, (column + 1) / per_second
        index = max(0, bisect_left(starts, begin) - 1)
        idle = end - begin
        present: set[Kind | None] = set()
        while index < len(row) and row[index].start < end:
            inside = min(row[index].end, end) - max(row[index].start, begin)
            if inside > 0:
                kind = row[index].action.kind
                owed[kind] = owed.get(kind, 0.0) + inside * per_second
                present.add(kind)
                idle -= inside
            index += 1
        if idle * per_second > 1e-6 or not present:
            owed[None] = owed.get(None, 0.0) + idle * per_second
            present.add(None)
        shown = max(sorted(present, key=str), key=lambda kind: owed[kind])
        owed[shown] -= 1.0
        if shown is None:
            line.append(Segment(glyphs.bubble, _BUBBLE_STYLE))
        else:
            line.append(Segment(_LETTER[shown], _STYLES[shown]))
    return line


def _legend(timeline: Timeline, width: int, glyphs: _Glyphs) -> Iterator[Line]:
    used = {span.action.kind for row in timeline.spans for span in row}
    parts: list[Line] = [
        [Segment(f"{_LETTER[k]}{glyphs.fill[k]}", _STYLES[k]), Segment(f" {_NAMES[k]}")]
        for k in _NAMES
        if k in used
    ]
    parts.append([Segment(glyphs.bubble * 2, _BUBBLE_STYLE), Segment(" bubble")])
    parts.append([Segment("busy = work / makespan")])
    parts.append([Segment("peak = most activations alive, in chunks")])
    yield from _wrapped(parts, width)


def _meters(
    timeline: Timeline, width: int, scale: float, unit: str, bound: tuple[float, str] | None
) -> Iterator[Line]:
    def seconds(value: float) -> str:
        return f"{_number(value * scale)} {unit}".strip()

    yield from _wrapped(
        [
            [Segment("makespan ", _BOLD), Segment(seconds(timeline.makespan))],
            [Segment("bubble fraction ", _BOLD), Segment(f"{timeline.bubble_fraction:.1%}")],
            [Segment("(makespan - work) / work of the busiest rank")],
        ],
        width,
    )
    yield from _wrapped(
        [
            [Segment("span     ", _BOLD), Segment(seconds(timeline.span))],
            [Segment("bubble rate     ", _BOLD), Segment(f"{timeline.bubble_rate:.1%}")],
            [Segment("(span - work) / span of the widest rank")],
        ],
        width,
    )
    if bound is not None:
        least, reason = bound
        gap = timeline.makespan / least - 1 if least else 0.0
        yield from _wrapped(
            [
                [Segment("bound    ", _BOLD), Segment(seconds(least))],
                [Segment("gap ", _BOLD), Segment(f"{max(gap, 0.0):.1%}")],
                [Segment(f"({reason})")],
            ],
            width,
        )
