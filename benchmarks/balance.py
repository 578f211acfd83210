"""What balancing by profile gains: measured steps against an equal number of layers per stage.

    python -m benchmarks.balance [sleep language-model] [--rounds N] [--json FILE]

Both pipelines live in the same processes and take turns, step about step. The prediction is what
the profile and the simulator say of each partition.
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
from torch.nn.functional import cross_entropy, mse_loss

import pipelane
from benchmarks.layers import Block, SleepLayer
from benchmarks.neighbours import equal_layers
from benchmarks.turns import clearing, run_cases, take_turns
from pipelane.plan import stage_costs

VOCABULARY, WIDTH, TOKENS = 16_000, 256, 64
#: Milliseconds of forward per layer; the backward takes twice as long.
SLEEPS = (2, 9, 3, 3, 12, 4, 2, 6, 5, 1, 8, 15)


def sleeping() -> nn.Module:
    return nn.Sequential(*(SleepLayer(16, ms * 1e-3, 2 * ms * 1e-3) for ms in SLEEPS))


def language_model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        *(Block(WIDTH, 4) for _ in range(8)),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, VOCABULARY, bias=False),
    )


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Case:
    about: str
    ranks: int
    microbatches: int
    rows: int
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    loss: Callable[[Any, Any], torch.Tensor]
    rounds: int


CASES = {
    "sleep": Case(
        f"{len(SLEEPS)} sleep layers of {min(SLEEPS)} to {max(SLEEPS)} ms forward", 4, 16, 16,
        sleeping, lambda rows: (torch.zeros(rows, 16), torch.zeros(rows, 16)), mse_loss, 7,
    ),
    "language-model": Case(
        f"8 blocks of width {WIDTH}, vocabulary {VOCABULARY}, {TOKENS} tokens", 2, 8, 16,
        language_model,
        lambda rows: (
            torch.randint(VOCABULARY, (rows, TOKENS)), torch.randint(VOCABULARY, (rows, TOKENS))
        ),
        token_loss, 9,
    ),
}  # fmt: skip


def measure(name: str, rounds: int | None) -> dict[str, Any]:
    """Both partitions, what is predicted of them, and the seconds of their steps."""
    case = CASES[name]
    p, m = case.ranks, case.microbatches
    torch.manual_seed(0)
    model = case.build()
    x, y = case.batch(case.rows)
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        profile = pipelane.profile(model, x[: case.rows // m])
        balanced = pipelane.partition(profile, p)
        equal = [end - begin for begin, end in equal_layers([1.0] * len(profile.layers), p)]
        sizes = {"equal layers": equal, "by profile": list(balanced.sizes)}
        schedule = pipelane.build_schedule("1f1b", p, m)
        predicted = {
            label: pipelane.simulate(schedule, stage_costs(profile, split)).makespan
            for label, split in sizes.items()
        }
        found = [(sizes, predicted, balanced.gap)]
    dist.broadcast_object_list(found)
    sizes, predicted, gap = found[0]
    pipes = {
        label: pipelane.Pipeline(
            copy.deepcopy(model),
            schedule="1f1b",
            microbatches=m,
            loss_fn=case.loss,
            partition=split,
        )
        for label, split in sizes.items()
    }

    def stepping(pipe: pipelane.Pipeline) -> Callable[[], Any]:
        return clearing(list(pipe.parameters()), lambda: pipe.step(x, y))

    steps = {label: stepping(pipe) for label, pipe in pipes.items()}
    seconds = take_turns(steps, rounds or case.rounds)
    return {"sizes": sizes, "predicted": predicted, "gap": gap, "seconds": seconds}


def report(name: str, found: dict[str, Any], console: Console) -> dict[str, Any]:
    case = CASES[name]
    medians = {label: statistics.median(values) for label, values in found["seconds"].items()}
    table = Table(
        title=f"{name}: {case.about}; p={case.ranks}, m={case.microbatches}",
        box=None, padding=(0, 2, 0, 0), title_justify="left",
    )  # fmt: skip
    table.add_column("partition", no_wrap=True, min_width=12)
    for column in ("layers per stage", "predicted ms", "measured ms", "predicted x", "measured x"):
        table.add_column(column, justify="right", no_wrap=True)
    base = "by profile"
    rows = {}
    for label in medians:
        ratios = {
            "predicted_ratio": found["predicted"][label] / found["predicted"][base],
            "measured_ratio": medians[label] / medians[base],
        }
        table.add_row(
            label, " ".join(map(str, found["sizes"][label])),
            f"{found['predicted'][label] * 1e3:.1f}", f"{medians[label] * 1e3:.1f}",
            *(f"{ratio:.3f}" for ratio in ratios.values()),
        )  # fmt: skip
        rows[label] = {
            "sizes": found["sizes"][label], "predicted_seconds": found["predicted"][label],
            "median_seconds": medians[label], **ratios,
        }  # fmt: skip
    console.print(table)
    console.print()
    return {"case": name, "about": case.about, "partitions": rows}


if __name__ == "__main__":
    run_cases(__doc__, CASES, measure, report)
