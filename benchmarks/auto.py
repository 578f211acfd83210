"""How near ``auto`` comes to the certified bounds, to the catalogue, and to proven optima.

    python -m benchmarks.auto [--instances N] [--seconds S] [--json FILE]

Random instances: 2 to 8 ranks, 1 to 32 micro-batches, uneven F, I and W, links, and memory of 1 to
2p micro-batches per rank. Where ortools is installed, instances with p <= 3 and m <= 6 are solved
to the optimum as well.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import pipelane
from pipelane.bounds import makespan_bound, span_bound
from pipelane.catalogue import build_schedule, schedule_names
from pipelane.costs import Costs, Link
from pipelane.errors import ScheduleError
from pipelane.exact import exact
from pipelane.memory import peak_bytes
from pipelane.schedule import Shape
from pipelane.synthesis import auto


def instance(
    draw: random.Random, ranks: int, microbatches: int
) -> tuple[Shape, Costs, list[float]]:
    p = draw.randint(2, ranks)
    shape = Shape(p, draw.randint(1, microbatches))
    costs = Costs(
        tuple(draw.uniform(0.5, 2) for _ in range(p)),
        tuple(draw.uniform(0.5, 2) for _ in range(p)),
        tuple(draw.uniform(0.3, 1.5) for _ in range(p)),
        activation_bytes=(1.0,) * p,
        weight_grad_bytes=(draw.uniform(0.3, 1.0),) * p,
        link=Link(draw.choice([0.0, 0.1, 0.3])),
    )
    return shape, costs, [draw.uniform(1, 2 * p) for _ in range(p)]


def against_bounds(count: int, seconds: float) -> dict[str, Any]:
    found: dict[str, list[float]] = {"makespan": [], "span": [], "seconds": [], "margin": []}
    behind = 0
    for seed in range(count):
        shape, costs, memory = instance(random.Random(seed), 8, 32)
        began = time.perf_counter()
        made = auto(shape, costs, memory, seconds=seconds)
        found["seconds"].append(time.perf_counter() - began)
        timeline = pipelane.simulate(made, costs)
        found["makespan"].append(
            timeline.makespan / makespan_bound(made, costs, memory).seconds - 1
        )
        found["span"].append(timeline.span / span_bound(made, costs, memory).seconds - 1)
        best = _best_of_catalogue(shape, costs, memory)
        if best is not None:
            found["margin"].append(timeline.makespan / best - 1)
            behind += timeline.makespan > best * (1 + 1e-9)
    return {
        "instances": count,
        "behind_catalogue": behind,
        **{
            name: {"median": statistics.median(values), "mean": statistics.mean(values),
                   "worst": max(values)}
            for name, values in found.items()
        },
    }  # fmt: skip


def _best_of_catalogue(shape: Shape, costs: Costs, memory: list[float]) -> float | None:
    """The least makespan of the other schedules that fit."""
    best = None
    for name in schedule_names():
        try:
            if name == "auto":
                continue
            made = build_schedule(name, shape.ranks, shape.microbatches, 1, costs, memory)
        except ScheduleError:
            continue
        held = peak_bytes(made, costs)
        if all(need <= limit for need, limit in zip(held, memory, strict=True)):
            makespan = pipelane.simulate(made, costs).makespan
            best = makespan if best is None else min(best, makespan)
    return best


def against_optima(count: int, seconds: float) -> dict[str, Any] | None:
    if find_spec("ortools") is None:
        return None
    gaps: dict[str, list[float]] = {"makespan": [], "span": []}
    for seed in range(count):
        shape, costs, memory = instance(random.Random(10_000 + seed), 3, 6)
        timeline = pipelane.simulate(auto(shape, costs, memory, seconds=seconds), costs)
        for meter in ("makespan", "span"):
            proven = exact(shape, costs, memory, meter=meter, seconds=20)  # type: ignore[arg-type]
            if proven.optimal:
                best = getattr(pipelane.simulate(proven.schedule, costs), meter)
                gaps[meter].append(getattr(timeline, meter) / best - 1)
    return {
        meter: {"proven": len(values), "median": statistics.median(values),
                "mean": statistics.mean(values), "worst": max(values)}
        for meter, values in gaps.items()
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=1.0, help="budget of each search")
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    options = parser.parse_args()
    console = Console()
    bounds = against_bounds(options.instances, options.seconds)
    table = Table(title=f"auto on {options.instances} random instances", box=None)
    for column in ("", "median", "mean", "worst"):
        table.add_column(column, justify="left" if not column else "right")
    for name, label in (("makespan", "makespan above its bound"), ("span", "span above its bound"),
                        ("margin", "makespan against the catalogue's best")):  # fmt: skip
        table.add_row(label, *(f"{bounds[name][key]:+.2%}" for key in ("median", "mean", "worst")))
    table.add_row(
        "seconds", *(f"{bounds['seconds'][key]:.2f}" for key in ("median", "mean", "worst"))
    )
    optima = against_optima(options.instances // 5, options.seconds)
    for meter, row in (optima or {}).items():
        label = f"{meter} above the optimum ({row['proven']} proven)"
        table.add_row(label, *(f"{row[key]:+.2%}" for key in ("median", "mean", "worst")))
    console.print(table)
    console.print(f"behind the catalogue's best makespan in {bounds['behind_catalogue']} instances")
    if options.json is not None:
        options.json.write_text(json.dumps({"bounds": bounds, "optima": optima}, indent=1) + "\n")


if __name__ == "__main__":
    main()
