"""pipelane's schedules against those of torch.distributed.pipelining, step about step.

    python -m benchmarks.catalogue [sleep-20 sleep-5 sleep-5-p8 tiny] [--rounds N] [--json FILE]

Both run the same order of computes with their own communication, in the same processes. ``ideal``
is pipelane's simulated makespan without communication. A stage sleeps the given times per chunk;
half of the backward is for the input and half for the weight.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.nn.functional import mse_loss

import pipelane
from benchmarks.layers import SplitSleepLayer
from benchmarks.turns import clearing, run_cases, take_turns
from pipelane.catalogue import schedule_names
from pipelane.costs import Costs
from pipelane.schedule import Schedule, schedule_from_rows

#: pipelane's name and torch's class.
PAIRS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "bfs": "ScheduleLoopedBFS",
    "interleaved zero bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


@dataclass(frozen=True)
class Case:
    about: str
    ranks: int
    microbatches: int
    stage: Callable[[], nn.Module]
    width: int
    rounds: int
    seconds: tuple[float, float] | None


def sleeping(p: int, f: float, b: float, rounds: int) -> Case:
    about = f"a stage sleeps {f * 1e3:.0f} ms forward, {b * 1e3:.0f} ms backward"
    return Case(about, p, 16, lambda: SplitSleepLayer(16, f, b), 16, rounds, (f, b))


CASES = {
    "sleep-20": sleeping(4, 0.020, 0.040, 3),
    "sleep-5": sleeping(4, 0.005, 0.010, 7),
    "sleep-5-p8": sleeping(8, 0.005, 0.010, 5),
    "tiny": Case("one Linear(8, 8) per stage", 4, 64, lambda: nn.Linear(8, 8), 8, 15, None),
}


def contenders(case: Case) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """One step of each, on this rank; and the ideal seconds of each schedule."""
    rank, p, m = dist.get_rank(), case.ranks, case.microbatches
    x, y = torch.zeros(m, case.width), torch.zeros(m, case.width)
    steps: dict[str, Callable[[], Any]] = {}
    ideal: dict[str, float] = {}
    for name, torch_name in PAIRS.items():
        torch.manual_seed(0)
        kind = getattr(pipelining, torch_name, None)
        if name in schedule_names():
            schedule = pipelane.build_schedule(name, p, m)
        elif kind is None:
            continue
        else:
            schedule = _order_of(kind, p, m, name)
        stages = schedule.shape.stages
        model = nn.Sequential(*[case.stage() for _ in range(stages)])
        if case.seconds is not None:
            f, b = case.seconds
            costs = Costs.unit(stages, forward=f, input_grad=b / 2, weight_grad=b / 2)
            ideal[name] = pipelane.simulate(schedule, costs).makespan
        pipe = pipelane.Pipeline(
            copy.deepcopy(model), schedule=schedule, microbatches=m, loss_fn=mse_loss,
            chunks=schedule.shape.chunks, partition=[1] * stages,
        )  # fmt: skip
        steps[f"pipelane {name}"] = clearing(
            list(pipe.parameters()), lambda pipe=pipe: pipe.step(x, y)
        )
        if kind is None:  # not in this version of torch
            continue
        group = dist.new_group()
        parts = [
            PipelineStage(copy.deepcopy(model[s]), s, stages, torch.device("cpu"), group=group)
            for s in schedule.stages_of(rank)
        ]
        single = schedule.shape.chunks == 1
        theirs: Any = kind(parts[0] if single else parts, m, loss_fn=mse_loss)
        first, last = rank == schedule.placement[0], rank == schedule.placement[-1]

        def torch_step(theirs: Any = theirs, first: bool = first, last: bool = last) -> None:
            theirs.step(*([x] if first else []), **({"target": y} if last else {}))

        parameters = [q for part in parts for q in part.submod.parameters()]
        steps[f"torch {name}"] = clearing(parameters, torch_step)
    return steps, ideal


def _order_of(kind: Any, p: int, m: int, name: str) -> Schedule:
    """Torch's own order, for a schedule that only torch has."""
    parts = [
        PipelineStage(nn.Identity(), s, 2 * p, torch.device("cpu"), group=dist.group.WORLD)
        for s in range(dist.get_rank(), 2 * p, p)
    ]
    theirs = kind(parts, m, loss_fn=mse_loss)
    rows = [
        ["" if action is None else str(action) for action in theirs.pipeline_order[rank]]
        for rank in range(p)
    ]
    return schedule_from_rows(rows, name=name)


def measure(name: str, rounds: int | None) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of every counted step of every contender."""
    case = CASES[name]
    steps, ideal = contenders(case)
    seconds = take_turns(steps, rounds or case.rounds, warm_up=1)
    return seconds, ideal


def report(
    name: str, found: tuple[dict[str, list[float]], dict[str, float]], console: Console
) -> dict[str, Any]:
    case, (seconds, ideal) = CASES[name], found
    table = Table(
        title=f"{name}: {case.about}; p={case.ranks}, m={case.microbatches}",
        box=None, padding=(0, 2, 0, 0), title_justify="left",
    )  # fmt: skip
    table.add_column("schedule")
    for column in ("pipelane ms", "torch ms", "/ torch", "pipelane / ideal", "torch / ideal"):
        table.add_column(column, justify="right", no_wrap=True)
    rows = {}
    for schedule in PAIRS:
        if f"pipelane {schedule}" not in seconds:
            continue
        ours = statistics.median(seconds[f"pipelane {schedule}"])
        measured = seconds.get(f"torch {schedule}")
        theirs = statistics.median(measured) if measured else None
        least = ideal.get(schedule)
        row = {
            "pipelane": ours,
            "torch": theirs,
            "to_torch": ours / theirs if theirs else None,
            "to_ideal": ours / least if least else None,
            "torch_to_ideal": theirs / least if theirs and least else None,
        }
        rows[schedule] = row
        times = (f"{value * 1e3:.1f}" if value else "-" for value in (ours, theirs))
        ratios = (row["to_torch"], row["to_ideal"], row["torch_to_ideal"])
        table.add_row(schedule, *times, *(f"{value:.3f}" if value else "-" for value in ratios))
    console.print(table)
    console.print()
    return {"case": name, "about": case.about, "schedules": rows}


if __name__ == "__main__":
    run_cases(__doc__, CASES, measure, report)
