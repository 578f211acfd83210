"""Seconds to lower, check and simulate schedules of several sizes, on one core.

    python -m benchmarks.planning [--rounds N] [--json FILE]

A looped GPipe order: v chunks per rank, all forwards, then all backwards. Medians are reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

import pipelane
from pipelane.actions import Action, Kind
from pipelane.schedule import Schedule, Shape
from pipelane.semantics import SEMANTICS, play, trace_messages

SIZES = [(8, 64, 1), (64, 512, 1), (64, 512, 4), (64, 1953, 4)]


def looped(p: int, m: int, v: int) -> Schedule:
    orders = [
        [Action(Kind.F, c * p + r, i) for c in range(v) for i in range(m)]
        + [Action(Kind.B, c * p + r, i) for c in reversed(range(v)) for i in range(m)]
        for r in range(p)
    ]
    return Schedule.looped("looped", Shape(p, m, v), orders)


def measure(schedule: Schedule, rounds: int) -> dict[str, float]:
    """Median seconds of each step."""
    program = pipelane.lower(schedule)
    messages = trace_messages(program)

    def meters() -> None:
        timeline = pipelane.simulate(program)
        began = time.perf_counter()
        _ = (timeline.makespan, timeline.span, timeline.idle, timeline.peak_activations)
        seconds["meters"].append(time.perf_counter() - began)

    steps: dict[str, Callable[[], Any]] = {
        "lower": lambda: pipelane.lower(schedule),
        "check": lambda: pipelane.check(schedule),
        "simulate": lambda: pipelane.simulate(program),
        **{name: lambda name=name: play(messages, name) for name in SEMANTICS},
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*steps, "meters")}
    for _ in range(rounds):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
        meters()
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write the figures there ('-': stdout)")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    reports: list[dict[str, Any]] = []
    for p, m, v in SIZES:
        found = measure(looped(p, m, v), options.rounds)
        reports.append({"p": p, "m": m, "v": v, "computes": 2 * p * m * v, "seconds": found})
    table = Table("seconds (median)", *(f"p={p} m={m} v={v}" for p, m, v in SIZES), box=None)
    for name in reports[0]["seconds"]:
        table.add_row(name, *(f"{r['seconds'][name]:.3f}" for r in reports))
    Console(stderr=options.json == "-").print(table)
    text = json.dumps(reports, indent=1) + "\n"
    if options.json == "-":
        sys.stdout.write(text)
    elif options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main()
