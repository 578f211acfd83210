"""The table of ``pipelane compare``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from pipelane.views.tables import human_bytes
from pipelane.views.terminal import time_scale

if TYPE_CHECKING:
    from pipelane.compare import Comparison, Entry

__all__ = ["ComparisonTable"]

#: Columns by what they tell, and the width from which on they are shown.
_WIDTHS = {"v": 0, "makespan": 0, "span": 0, "bubble": 0, "fraction": 76, "peak": 0, "gap": 0,
           "sent": 92, "copies": 100}  # fmt: skip


class ComparisonTable:
    """A rich renderable: a row per schedule that fits, the others below with their reasons.

    Args:
        comparison: what to show.
        unit: "s" for seconds, "" for unit costs.
    """

    def __init__(self, comparison: Comparison, unit: str = "s") -> None:
        self.comparison = comparison
        self.unit = unit

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found = self.comparison
        shown = [name for name, width in _WIDTHS.items() if options.max_width >= width]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("schedule", no_wrap=True, style="bold")
        longest = max((entry.makespan for entry in found.entries), default=0.0)
        scale, unit = time_scale(longest, self.unit)
        suffix = f" {unit}" if unit else ""
        titles = {"makespan": f"makespan{suffix}", "span": f"span{suffix}"}
        for name in shown:
            table.add_column(titles.get(name, name), justify="right", no_wrap=True)
        for entry in found.entries:
            cells = _cells(entry, scale)
            table.add_row(Text(entry.name), *(cells[name] for name in shown))
        yield table
        yield Text()
        legend = (
            "bubble: share of the widest rank's span; fraction: idle over work, whole step; peak: "
            "activations of a rank at most, in micro-batches of a whole rank or bytes; gap: "
            "makespan above what no schedule of this placement, kind of backward and memory can "
            "be below"
        )
        if "sent" in shown:
            legend += "; sent: bytes or messages per step"
        yield Text(f"{legend}.", overflow="fold")
        for name, chunks, reason in found.left_out:
            yield Text(f"Left out: {name} (v={chunks}): {reason}", overflow="fold")


def _cells(entry: Entry, scale: float) -> dict[str, str]:
    peak = f"{entry.peak_activations:.3g} mb"
    if entry.peak_bytes:
        peak = human_bytes(entry.peak_bytes)
    return {
        "v": str(entry.chunks),
        "makespan": _number(entry.makespan * scale),
        "span": _number(entry.span * scale),
        "bubble": f"{entry.bubble_rate:.1%}",
        "fraction": f"{entry.bubble_fraction:.1%}",
        "peak": peak,
        "gap": f"{max(0.0, entry.gap):.1%}",
        "sent": human_bytes(entry.sent_bytes) if entry.sent_bytes else str(entry.messages),
        "copies": str(entry.copies),
    }


def _number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:.0f}" if value == round(value) else f"{value:.4g}"
