"""Contenders in the same processes, step about step; and the command line of such benchmarks."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

import pipelane

__all__ = ["clearing", "run_cases", "take_turns"]


def clearing(parameters: list[nn.Parameter], step: Callable[[], Any]) -> Callable[[], Any]:
    """A step that begins without gradients."""

    def run() -> None:
        for parameter in parameters:
            parameter.grad = None
        step()

    return run


def take_turns(
    steps: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Seconds of every counted step of every contender; the same on all ranks.

    A step's time is from the first rank's start to the last rank's end, after a barrier.
    """
    seconds: dict[str, list[float]] = {label: [] for label in steps}
    for number in range(warm_up + rounds):
        for label, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            ended = time.perf_counter()
            window = torch.tensor([-began, ended], dtype=torch.float64)
            dist.all_reduce(window, op=dist.ReduceOp.MAX)
            if number >= warm_up:
                seconds[label].append((window[0] + window[1]).item())
    return seconds


def run_cases(
    about: str | None,
    cases: Mapping[str, Any],
    measure: Callable[[str, int | None], Any],
    report: Callable[[str, Any, Console], dict[str, Any]],
) -> None:
    """Measure the cases that the command line names, over as many ranks as each has.

    Args:
        about: the help text.
        cases: by name; each has ``ranks``.
        measure: runs on every rank, with the case's name and the rounds that were asked for.
        report: prints what rank 0 measured, and returns it for the file.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(cases)}")
    parser.add_argument("--rounds", type=int, help="counted steps per contender")
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    options = parser.parse_args()
    unknown = sorted(set(options.cases) - set(cases))
    if unknown:
        parser.error(f"unknown case {unknown[0]!r}; choose from {', '.join(cases)}")
    console = Console()
    reports = []
    for name in options.cases or cases:
        found = pipelane.launch(measure, cases[name].ranks, name, options.rounds)[0]
        reports.append(report(name, found, console))
    if options.json is not None:
        options.json.write_text(json.dumps({"reports": reports}, indent=1) + "\n")
