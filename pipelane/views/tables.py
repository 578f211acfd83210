"""Tables in the terminal."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from pipelane.views.terminal import plain_ascii

if TYPE_CHECKING:
    from pipelane.partition import Partition, StageLoad
    from pipelane.profile import LayerProfile, Profile

__all__ = ["PartitionTable", "ProfileTable", "human_bytes", "partition_table", "partition_text"]

_BAR = 8
_GAP = 2
#: Columns give way to the names of the layers until those have this many characters.
_NAMES = 24


def human_bytes(size: float) -> str:
    """Bytes with a binary unit: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


class PartitionTable:
    """A rich renderable: a row per stage and a line that says what limits the plan.

    Columns that do not fit are left out, the least telling first. Without a profile there are
    only stages, layers and, if known, seconds.

    Args:
        partition: what to show.
        profile: seconds and bytes of its layers.
        ascii: keep to ASCII; where the console has no more, it is kept to anyway.
    """

    def __init__(
        self, partition: Partition, profile: Profile | None = None, *, ascii: bool = False
    ) -> None:
        self.partition = partition
        self.profile = profile
        self.ascii = ascii

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ascii = self.ascii or plain_ascii(console, options)
        columns = _columns(self.partition, self.profile, ascii)
        _fit(columns, self.partition, options.max_width)
        yield _table(self.partition, columns, options.max_width, ascii)
        yield Text()
        lines = _legend(columns) + _summary(self.partition)
        if ascii:
            lines = [_to_ascii(line) for line in lines]
        for line in lines:
            yield Text(line, overflow="fold")


def partition_table(
    partition: Partition, profile: Profile | None = None, *, ascii: bool = False
) -> PartitionTable:
    """Stages, their layers, times and bytes; bytes need the profile."""
    return PartitionTable(partition, profile, ascii=ascii)


def partition_text(
    partition: Partition,
    profile: Profile | None = None,
    width: int | None = None,
    *,
    ascii: bool = True,
) -> str:
    """The table as text without colour, no line longer than ``width`` (80 if not given)."""
    out = io.StringIO()
    # A text buffer says that it is no terminal; whether Unicode is fine, the caller decides.
    console = Console(
        file=out, width=width or 80, no_color=True, color_system=None, force_terminal=not ascii,
        highlight=False, legacy_windows=False,
    )  # fmt: skip
    console.print(PartitionTable(partition, profile, ascii=ascii))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip("\n")


class ProfileTable:
    """A rich renderable: a row per layer, and the sums.

    Args:
        profile: what to show.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        layers, width = self.profile.layers, options.max_width
        ascii = plain_ascii(console, options)
        seconds = sum(layer.seconds for layer in layers)

        def times(key: str) -> list[str]:
            found = [getattr(layer, key) for layer in layers]
            return [_time(1e3 * value) for value in (*found, sum(found))]

        def sizes(key: str, total: bool = True) -> list[str]:
            found = [getattr(layer, key) for layer in layers]
            return [*map(human_bytes, found), human_bytes(sum(found)) if total else ""]

        shares = [layer.seconds / seconds if seconds else 0.0 for layer in layers]
        columns = [
            _Column("F ms", times("forward_seconds"), rank=0),
            _Column("I ms", times("input_grad_seconds"), rank=0),
            _Column("W ms", times("weight_grad_seconds"), rank=0),
            _Column("share", [*(f"{share:.0%}" for share in shares), ""], rank=1),
            _Column("params", sizes("parameter_bytes"), rank=2),
            _Column("saved", sizes("activation_bytes"), rank=3),
            _Column("until W", sizes("weight_grad_bytes"), rank=6),
            _Column("output", sizes("output_bytes", False), rank=4),
            _Column("spread", [*(f"{layer.forward_spread:.0%}" for layer in layers), ""], rank=5),
        ]
        while columns and _taken(columns) + 16 > width:
            last = max(column.rank for column in columns)
            columns = [column for column in columns if column.rank < last]
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
        table.add_column("layer", no_wrap=True)
        for column in columns:
            table.add_column(column.title, justify="right", no_wrap=True)
        room = max(8, width - _taken(columns) - _GAP)
        dots = ".." if ascii else "…"
        for row, layer in enumerate(layers):
            name = f"{layer.name} {layer.kind}"
            name = _shorten(_to_ascii(name) if ascii else name, room, dots)
            table.add_row(Text(name), *(Text(column.cells[row]) for column in columns))
        table.add_row(Text("all"), *(Text(column.cells[-1]) for column in columns), style="bold")
        yield table
        yield Text()
        found = self.profile
        yield Text(
            f"{found.method.capitalize()} on {found.device}: micro-batches of {found.batch} rows, "
            f"{found.dtype}; static bytes with {found.optimizer}: "
            f"{human_bytes(sum(layer.static_bytes for layer in layers))}. saved: what autograd "
            "keeps until the backward; until W: what a split backward keeps of it.",
            overflow="fold",
        )
        for shared in found.shared:
            names = ", ".join(layers[index].name for index in shared.layers)
            yield Text(f"Shared by {names}: {shared.name}, {human_bytes(shared.bytes)}.")


class _Column(NamedTuple):
    """A column behind those of stage and layers."""

    title: str
    cells: list[str]
    legend: str = ""
    right: bool = True
    #: Columns with the highest number are left out first, together.
    rank: int = 0

    @property
    def width(self) -> int:
        return max(map(len, (self.title, *self.cells)))


def _columns(partition: Partition, profile: Profile | None, ascii: bool) -> list[_Column]:
    columns: list[_Column] = []
    loads = partition.loads
    scale, unit = _unit(partition)

    def times(values: Iterable[float]) -> list[str]:
        return [_time(value * scale) for value in values]

    if loads:
        columns += _time_columns(partition, times, unit)
    elif partition.stage_seconds:
        columns.append(_Column(unit, times(partition.stage_seconds)))
    if partition.stage_seconds:
        bars = [_bar(partition, stage, ascii) for stage in range(len(partition.stages))]
        columns.append(_Column("of slowest", bars, right=False, rank=1))
    if any(load.transfer for load in loads):
        columns.append(
            _Column(
                f"comm {unit}",
                times(load.transfer for load in loads),
                f"comm {unit}: sends and receives, activation and gradient",
                rank=3,
            )
        )
    if any(load.recompute for load in loads):
        columns.append(
            _Column(
                "again",
                ["yes" if load.recompute else "-" for load in loads],
                "again: runs its forward a second time to save memory",
                rank=1,
            )
        )
    if loads and any(load.static_bytes or load.activation_bytes for load in loads):
        columns += _byte_columns(loads)
    elif not loads and profile is not None:
        columns += _profile_columns(_parts(partition, profile))
    return columns


def _time_columns(
    partition: Partition, times: Callable[[Iterable[float]], list[str]], unit: str
) -> list[_Column]:
    """F and B, or F, I and W; one column where the graph knows but a sum."""
    loads = partition.loads
    forward = times(load.forward for load in loads)
    if not any(load.input_grad or load.weight_grad for load in loads):
        return [_Column(unit, forward, rank=2)]
    if not any(load.weight_grad for load in loads):
        backward = times(load.input_grad for load in loads)
        legend = f"F {unit}, B {unit}: forward and backward"
        return [
            _Column(f"F {unit}", forward, legend, rank=2),
            _Column(f"B {unit}", backward, rank=2),
        ]
    legend = f"F, I, W {unit}: forward, gradients of inputs and of weights"
    return [
        _Column(f"F {unit}", forward, legend, rank=2),
        _Column(f"I {unit}", times(load.input_grad for load in loads), rank=2),
        _Column(f"W {unit}", times(load.weight_grad for load in loads), rank=2),
    ]


def _byte_columns(loads: Sequence[StageLoad]) -> list[_Column]:
    columns = [_Column("params", [human_bytes(load.parameter_bytes) for load in loads], rank=4)]
    if any(load.in_flight > 1 for load in loads):
        held = [f"{human_bytes(load.activation_bytes)} x{load.in_flight}" for load in loads]
        legend = "saved: what autograd keeps until the backward x micro-batches in flight"
    else:
        held = [human_bytes(load.activation_bytes) for load in loads]
        legend = "saved: what autograd keeps until the backward"
    columns.append(_Column("saved", held, legend, rank=5))
    if any(load.memory < math.inf for load in loads):
        peaks = [
            f"{human_bytes(load.memory_bytes)} {load.memory_bytes / load.memory:4.0%}"
            for load in loads
        ]
        columns.append(_Column("at peak", peaks, "at peak: of the rank's memory", rank=3))
    sends = [human_bytes(load.sent_bytes) if load.sent_bytes else "-" for load in loads]
    if any(load.sent_bytes for load in loads):
        columns.append(_Column("sends", sends, "sends: what goes on to later stages", rank=6))
    return columns


def _profile_columns(parts: Sequence[Sequence[LayerProfile]]) -> list[_Column]:
    """For stages chosen by hand, whose costs only the profile knows."""
    forward = [_time(1e3 * sum(layer.forward_seconds for layer in part)) for part in parts]
    backward = [_time(1e3 * sum(layer.backward_seconds for layer in part)) for part in parts]
    parameters = [human_bytes(sum(layer.parameter_bytes for layer in part)) for part in parts]
    return [
        _Column("F ms", forward, "F ms, B ms: forward and backward", rank=2),
        _Column("B ms", backward, rank=2),
        _Column("params", parameters, rank=3),
    ]


def _unit(partition: Partition) -> tuple[float, str]:
    """Seconds are shown as ms; other units as they are."""
    return (1e3, "ms") if partition.unit == "s" else (1.0, partition.unit)


def _fit(columns: list[_Column], partition: Partition, width: int) -> None:
    """Leave out columns until there is room for the names of the layers."""
    names = min(_NAMES, max(len(_span(stage, width, True)) for stage in partition.stages))
    while columns and len("stage") + _GAP + names + _taken(columns) > width:
        last = max(column.rank for column in columns)
        columns[:] = [column for column in columns if column.rank < last]


def _taken(columns: list[_Column]) -> int:
    return sum(_GAP + column.width for column in columns)


def _table(partition: Partition, columns: list[_Column], width: int, ascii: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    table.add_column("stage", justify="right", no_wrap=True)
    table.add_column("layers", no_wrap=True)
    for column in columns:
        justify = "right" if column.right else "left"
        table.add_column(column.title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    room = max(1, width - len("stage") - _GAP - _taken(columns))
    for stage, names in enumerate(partition.stages):
        cells = [str(stage), _span(names, room, ascii), *(c.cells[stage] for c in columns)]
        # Text, because square brackets in names would be read as markup.
        table.add_row(*map(Text, cells))
    return table


def _span(names: tuple[str, ...], room: int, ascii: bool) -> str:
    """First to last name and their number; names are shortened to fit into ``room``."""
    ends = [names[0]] if len(names) == 1 else [names[0], names[-1]]
    count = f" ({len(names)})"
    between = " to "
    room -= len(count) + (len(ends) - 1) * len(between)
    if ascii:
        ends = [_to_ascii(end) for end in ends]
    if room < 4 * len(ends):
        return count.strip()
    # A short name leaves what it does not need to the other.
    share = max(room // len(ends), room - min(map(len, ends)) if len(ends) > 1 else room)
    if sum(map(len, ends)) > room:
        ends = [_shorten(end, share, ".." if ascii else "…") for end in ends]
    return between.join(ends) + count


def _shorten(name: str, room: int, dots: str) -> str:
    """Without its middle: names differ at either end."""
    if len(name) <= room:
        return name
    head = (room - len(dots)) // 2
    tail = room - len(dots) - head
    return f"{name[:head]}{dots}{name[len(name) - tail :]}"


def _bar(partition: Partition, stage: int, ascii: bool) -> str:
    slowest = max(partition.stage_seconds)
    share = partition.stage_seconds[stage] / slowest if slowest else 0.0
    filled = round(share * _BAR)
    full, empty = ("#", ".") if ascii else ("█", "░")
    return f"{full * filled}{empty * (_BAR - filled)} {share:4.0%}"


def _parts(partition: Partition, profile: Profile) -> list[tuple[LayerProfile, ...]]:
    parts = []
    begin = 0
    for names in partition.stages:
        parts.append(profile.layers[begin : begin + len(names)])
        begin += len(names)
    return parts


def _time(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


def _legend(columns: list[_Column]) -> list[str]:
    told = [column.legend for column in columns if column.legend]
    return [f"Per micro-batch. {'; '.join(told)}."] if told else []


def _summary(partition: Partition) -> list[str]:
    """What limits the plan, how far it can be from the optimum, and what was decided."""
    if math.isnan(partition.bottleneck):
        return ["Chosen by hand, without costs."]
    if partition.exact:
        proven = "proven optimal (gap 0 %)"
    elif math.isnan(partition.gap):
        proven = "not proven optimal"
    else:
        proven = f"at most {partition.gap:.1%} above the optimum"
    scale, unit = _unit(partition)
    ranked = len(set(partition.placement)) < len(partition.placement)
    what = "Slowest rank (all its stages)" if ranked else "Slowest stage"
    return [
        f"{what}: {_time(partition.bottleneck * scale)} {unit}, {proven} by {partition.method}. "
        f"Limit: {partition.bound_reason}.",
        *(f"{note[:1].upper()}{note[1:]}." for note in partition.notes),
    ]


def _to_ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode()
