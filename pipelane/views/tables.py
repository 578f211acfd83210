"""Tables in the terminal."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from pipelane.views.terminal import plain_ascii

if TYPE_CHECKING:
    from pipelane.partition import Partition
    from pipelane.profile import LayerProfile, Profile

__all__ = ["PartitionTable", "human_bytes", "partition_table", "partition_text"]

_BAR = 8


def human_bytes(size: float) -> str:
    """Bytes with a binary unit: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


class PartitionTable:
    """A rich renderable: a row per stage and a line that says what limits the plan."""

    def __init__(self, partition: Partition, profile: Profile | None = None) -> None:
        self.partition = partition
        self.profile = profile

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ascii = plain_ascii(console, options)
        yield _table(self.partition, self.profile, ascii, wide=options.max_width >= 76)
        yield Text()
        yield Text(_summary(self.partition, self.profile is not None))


def partition_table(partition: Partition, profile: Profile | None = None) -> PartitionTable:
    """Stages, their layers, times and bytes; times and bytes need the profile."""
    return PartitionTable(partition, profile)


def partition_text(partition: Partition, profile: Profile | None = None, width: int = 80) -> str:
    """The table as plain ASCII text."""
    out = io.StringIO()
    Console(file=out, width=width, no_color=True, force_terminal=False).print(
        PartitionTable(partition, profile)
    )
    return out.getvalue().rstrip("\n")


def _table(partition: Partition, profile: Profile | None, ascii: bool, wide: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("stage", justify="right")
    table.add_column("layers", overflow="ellipsis", no_wrap=True)
    if profile is not None:
        for title in ("F ms", "B ms"):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("of slowest", no_wrap=True)
        table.add_column("params", justify="right", no_wrap=True)
        if wide:
            table.add_column("saved", justify="right", no_wrap=True)
            table.add_column("sends", justify="right", no_wrap=True)
    begin = 0
    for stage, names in enumerate(partition.stages):
        shown = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        cells = [str(stage), f"{shown} ({len(names)})"]
        if profile is not None:
            part = profile.layers[begin : begin + len(names)]
            last = stage == len(partition.stages) - 1
            cells += _costs(partition, stage, part, ascii, wide, last)
        table.add_row(*cells)
        begin += len(names)
    return table


def _costs(
    partition: Partition,
    stage: int,
    part: tuple[LayerProfile, ...],
    ascii: bool,
    wide: bool,
    last: bool,
) -> list[str]:
    share = 0.0
    if partition.stage_seconds and partition.bottleneck:
        share = partition.stage_seconds[stage] / partition.bottleneck
    filled = round(share * _BAR)
    bar = ("#" if ascii else "█") * filled + ("." if ascii else "░") * (_BAR - filled)
    cells = [
        f"{sum(layer.forward_seconds for layer in part) * 1e3:.2f}",
        f"{sum(layer.backward_seconds for layer in part) * 1e3:.2f}",
        f"{bar} {share:4.0%}",
        human_bytes(sum(layer.parameter_bytes for layer in part)),
    ]
    if wide:
        cells.append(human_bytes(sum(layer.activation_bytes for layer in part)))
        cells.append("-" if last else human_bytes(part[-1].output_bytes))
    return cells


def _summary(partition: Partition, costs: bool) -> str:
    if math.isnan(partition.bottleneck):
        return "Chosen by hand, without costs."
    proven = (
        "proven optimal"
        if partition.exact
        else (
            f"within {partition.bottleneck / partition.lower_bound - 1:.1%} of the optimum"
            if partition.lower_bound
            else "not proven"
        )
    )
    saved = (
        "Per micro-batch; saved: what autograd keeps until the backward; sends: what goes on to "
        "the next stage.\n"
    )
    return (saved if costs else "") + (
        f"Slowest stage {partition.bottleneck * 1e3:.2f} ms per micro-batch, {proven} "
        f"({partition.method}). Limit: {partition.limit}."
    )
