"""pipelane against torch.distributed.pipelining, a hand-written loop and, if installed, DeepSpeed.

    python -m benchmarks.run [sleep-20 sleep-5 tiny mlp transformer large]
                             [--rounds N] [--json FILE]

All contenders live in the same processes and take turns, step about step. A step's time is from
the first rank's start to the last rank's end, after a barrier. Medians are reported.
DeepSpeed: ``DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed``.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import mse_loss

import pipelane
from benchmarks.by_hand import HandWritten1F1B
from benchmarks.deepspeed_engine import deepspeed_step, installed
from benchmarks.layers import Block, SleepLayer
from benchmarks.turns import clearing, take_turns


@dataclass(frozen=True)
class Case:
    """A benchmark: one stage per rank, equal stages.

    ``ideal`` is (m + p - 1)(f + b) seconds where f and b are known, else None.
    """

    name: str
    about: str
    ranks: int
    microbatches: int
    stage: Callable[[], nn.Module]
    row: tuple[int, ...]
    rows: int
    rounds: int
    ideal: float | None = None


def sleeping(ranks: int, m: int, f: float, b: float, rounds: int) -> Case:
    return Case(
        f"sleep-{f * 1e3:.0f}",
        f"sleep layers, {f * 1e3:.0f} ms forward, {b * 1e3:.0f} ms backward",
        ranks, m, lambda: SleepLayer(16, f, b), (16,), m, rounds, (m + ranks - 1) * (f + b),
    )  # fmt: skip


CASES = {
    case.name: case
    for case in [
        sleeping(4, 16, 0.020, 0.040, 7),
        sleeping(4, 16, 0.005, 0.010, 15),
        Case("tiny", "tiny layers: one Linear(8, 8) per stage", 4, 64,
             lambda: nn.Linear(8, 8), (8,), 64, 31),
        Case("mlp", "4 x (Linear(256, 256), ReLU) per stage", 4, 16,
             lambda: nn.Sequential(*[part for _ in range(4)
                                     for part in (nn.Linear(256, 256), nn.ReLU())]),
             (256,), 256, 21),
        # 1024 x 1024 floats per micro-batch.
        Case("large", "sleep layers, 5 ms forward, 10 ms backward, 4 MiB per boundary", 4, 16,
             lambda: SleepLayer(1024, 0.005, 0.010), (1024,), 16 * 1024, 7, 19 * 0.015),
        Case("transformer", "2 transformer blocks of width 128 per stage, 64 tokens", 2, 8,
             lambda: nn.Sequential(Block(128, 4), Block(128, 4)), (64, 128), 16, 15),
    ]
}  # fmt: skip


def contenders(case: Case) -> dict[str, Callable[[], Any]]:
    """One step of each, on this rank."""
    rank, p, m = dist.get_rank(), case.ranks, case.microbatches
    torch.manual_seed(0)
    model = nn.Sequential(*[case.stage() for _ in range(p)])
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(case.rows, *case.row, generator=generator)
    y = torch.randn(case.rows, *case.row, generator=generator)
    steps: dict[str, Callable[[], Any]] = {}

    for name in ("1f1b", "gpipe"):
        pipe = pipelane.Pipeline(
            copy.deepcopy(model), schedule=name, microbatches=m, loss_fn=mse_loss, partition=[1] * p
        )
        steps[f"pipelane {name}"] = clearing(
            list(pipe.parameters()), lambda pipe=pipe: pipe.step(x, y)
        )
    for name, kind in (("1f1b", Schedule1F1B), ("gpipe", ScheduleGPipe)):
        part = copy.deepcopy(model[rank])
        stage = PipelineStage(part, rank, p, torch.device("cpu"), group=dist.new_group())
        schedule: Any = kind(stage, m, loss_fn=mse_loss)

        def torch_step(schedule: Any = schedule) -> None:
            if rank == 0:
                schedule.step(x)
            elif rank == p - 1:
                schedule.step(target=y)
            else:
                schedule.step()

        steps[f"torch {name}"] = clearing(list(part.parameters()), torch_step)
    part = copy.deepcopy(model[rank])
    shape = (case.rows // m, *case.row)
    by_hand = HandWritten1F1B(part, m, mse_loss, shape, dist.new_group())
    steps["by hand 1f1b"] = clearing(list(part.parameters()), lambda: by_hand.step(x, y))
    if installed():
        # Its engine clears the gradients itself.
        steps["deepspeed 1f1b"] = deepspeed_step(copy.deepcopy(model), m, mse_loss, x, y)
    return steps


def measure(name: str, rounds: int | None) -> dict[str, list[float]]:
    """Seconds of every counted step of every contender; the same on all ranks."""
    case = CASES[name]
    steps = contenders(case)
    return take_turns(steps, rounds or case.rounds)


def report(case: Case, seconds: dict[str, list[float]], console: Console) -> dict[str, Any]:
    medians = {label: statistics.median(values) for label, values in seconds.items()}
    actions = 2 * case.microbatches  # per rank: a forward and a backward per micro-batch
    table = Table(
        title=f"{case.name}: {case.about}; p={case.ranks}, m={case.microbatches}",
        box=None,
        padding=(0, 2, 0, 0),
        title_justify="left",
    )
    table.add_column("median of steps", no_wrap=True)
    columns = ["ms", "us/action", "/ torch", "/ by hand", "/ ideal"]
    rival = "deepspeed 1f1b" in medians
    for column in [*columns, "/ deepspeed"] if rival else columns:
        table.add_column(column, justify="right", no_wrap=True)
    rows: dict[str, Any] = {}
    for label, median in medians.items():
        kind = label.split()[-1]
        ratios = {
            "to_torch": median / medians[f"torch {kind}"],
            "to_by_hand": median / medians["by hand 1f1b"],
            "to_ideal": median / case.ideal if case.ideal else None,
        }
        if rival:
            ratios["to_deepspeed"] = median / medians["deepspeed 1f1b"]
        table.add_row(
            label,
            f"{median * 1e3:.2f}",
            f"{median / actions * 1e6:.0f}",
            *(f"{ratio:.3f}" if ratio else "-" for ratio in ratios.values()),
        )
        rows[label] = {"median_seconds": median, "steps": seconds[label], **ratios}
    console.print(table)
    if not rival:
        console.print("DeepSpeed is not installed, so it was not measured.")
    console.print()
    return {
        "case": case.name, "about": case.about, "ranks": case.ranks,
        "microbatches": case.microbatches, "ideal_seconds": case.ideal, "contenders": rows,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}; all if none"
    )
    parser.add_argument("--rounds", type=int, help="counted steps per contender")
    parser.add_argument("--json", metavar="FILE", help="write the figures there ('-': stdout)")
    options = parser.parse_args()
    unknown = sorted(set(options.cases) - set(CASES))
    if unknown:
        parser.error(f"unknown case {unknown[0]!r}; choose from {', '.join(CASES)}")
    console = Console(stderr=options.json == "-")
    reports = []
    for name in options.cases or CASES:
        seconds = pipelane.launch(measure, CASES[name].ranks, name, options.rounds)[0]
        reports.append(report(CASES[name], seconds, console))
    machine = {
        "cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(),
        "torch": torch.__version__, "pipelane": pipelane.__version__,
    }  # fmt: skip
    text = json.dumps({"machine": machine, "reports": reports}, indent=1)
    if options.json == "-":
        sys.stdout.write(text + "\n")
    elif options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
