"""Quality and time of partitions, against the rules of other libraries.

    python -m benchmarks.partition [--chains N] [--json FILE]

Random skewed chains (layers of exponential cost, some 20 times heavier, at either end more often)
and public profiles, with communication left out because the other rules do not know it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.neighbours import RULES
from pipelane.formats import read_graph
from pipelane.partition import chain_partition, partition
from pipelane.partition.orders import topological_orders
from pipelane.partition.problem import problem_of

GRAPHS = Path(__file__).parent.parent / "tests" / "data" / "graphs"


def skewed(draw: random.Random, layers: int) -> list[float]:
    costs = [draw.expovariate(1.0) for _ in range(layers)]
    for end in (0, -1):
        if draw.random() < 0.5:
            costs[end] += 20 * draw.random()
    for index in range(layers):
        if draw.random() < 0.02:
            costs[index] *= 20
    return costs


def bottleneck(costs: Sequence[float], cuts: Sequence[tuple[int, int]]) -> float:
    return max(sum(costs[begin:end]) for begin, end in cuts)


def chains(count: int) -> list[dict[str, Any]]:
    rows = []
    for layers, stages in ((12, 4), (26, 4), (50, 8), (100, 16)):
        draw = random.Random(layers)
        ratios: dict[str, list[float]] = {name: [] for name in RULES}
        seconds: dict[str, list[float]] = {name: [] for name in ["pipelane", *RULES]}
        for _ in range(count):
            costs = skewed(draw, layers)
            began = time.perf_counter()
            sizes = chain_partition(costs, stages)
            seconds["pipelane"].append(time.perf_counter() - began)
            best = bottleneck(costs, list(pairwise([0, *accumulate(sizes)])))
            for name, rule in RULES.items():
                began = time.perf_counter()
                cuts = rule(costs, stages)
                seconds[name].append(time.perf_counter() - began)
                ratios[name].append(bottleneck(costs, cuts) / best)
        rows.append(
            {
                "layers": layers,
                "stages": stages,
                "chains": count,
                "rules": {
                    name: {
                        "median": statistics.median(found),
                        "p95": sorted(found)[int(0.95 * len(found))],
                        "worst": max(found),
                        "optimal": sum(ratio < 1 + 1e-9 for ratio in found) / len(found),
                        "ms": 1e3 * statistics.median(seconds[name]),
                    }
                    for name, found in ratios.items()
                },
                "pipelane_ms": 1e3 * statistics.median(seconds["pipelane"]),
            }
        )
    return rows


def graphs() -> list[dict[str, Any]]:
    rows = []
    for file, stages in (
        ("dnn-partitioning/bert24_training.json", 6),
        ("dnn-partitioning/resnet50_training.json", 6),
        ("dnn-partitioning/gnmt_inference.json", 6),
        ("dnn-partitioning/bert_l-3_operators_training.json", 3),
        ("pipedream/vgg16.txt", 4),
        ("pipedream/vgg16.txt", 6),
        ("pipedream/resnet50.txt", 8),
        ("pipedream/gnmt.txt", 8),
        ("piper/bert32a100.json", 4),
    ):
        graph: Any = read_graph(GRAPHS / file)
        made = partition(graph, stages, at_most=True, communication="none")
        # The other rules take a chain: the graph's own topological order.
        problem = problem_of(graph, priced=False)
        order = next(iter(topological_orders(problem, 1)))
        costs = [problem.items[item].seconds for item in order]
        rows.append(
            {
                "graph": Path(file).stem,
                "stages": stages,
                "items": len(costs),
                "bottleneck": made.bottleneck,
                "exact": made.exact,
                "method": made.method,
                "seconds": made.seconds,
                "rules": {
                    name: bottleneck(costs, rule(costs, stages)) / made.bottleneck
                    for name, rule in RULES.items()
                },
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--chains", type=int, default=200, help="random chains per size")
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    arguments = parser.parse_args()
    console = Console()
    found = {"chains": chains(arguments.chains), "graphs": graphs()}

    table = Table(
        title="Slowest stage over the optimum, random skewed chains", title_justify="left"
    )
    for name in ("layers", "stages", "rule", "median", "95 %", "worst", "optimal", "ms"):
        table.add_column(name, justify="left" if name == "rule" else "right")
    for row in found["chains"]:
        size = (str(row["layers"]), str(row["stages"]))
        ones = ("1.000", "1.000", "1.000", "100%")
        table.add_row(*size, "pipelane", *ones, f"{row['pipelane_ms']:.2f}")
        for name, rule in row["rules"].items():
            numbers = (f"{rule[key]:.3f}" for key in ("median", "p95", "worst"))
            table.add_row(*size, name, *numbers, f"{rule['optimal']:.0%}", f"{rule['ms']:.2f}")
        table.add_section()
    console.print(table)

    table = Table(title="Public graphs, computing only", title_justify="left", box=None)
    table.add_column("graph")
    for name in ("stages", "items", "bottleneck", "seconds", *RULES):
        table.add_column(name, justify="right")
    for row in found["graphs"]:
        table.add_row(
            row["graph"], str(row["stages"]), str(row["items"]), f"{row['bottleneck']:.6g}",
            f"{row['seconds']:.2f}", *(f"{ratio:.3f}" for ratio in row["rules"].values()),
        )  # fmt: skip
    console.print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
