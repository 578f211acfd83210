"""Pipeline against one process: features x schedules x p, and 500 steps of one training.

    python -m benchmarks.correctness [--steps N] [--write docs/correctness.md]

Every rank also runs the whole model in its own process (`pipelane.reference`), with the same
optimizer, and compares loss, gradients, parameters and buffers after every step.
"""

from __future__ import annotations

import argparse
import copy
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import pipelane
from benchmarks.neighbours import equal_layers
from benchmarks.zoo import ZOO

MICROBATCHES, ROWS = 6, 14
#: Schedule, chunks.
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zbv", 2)]
#: More ways to run one model: name -> (model, options of Pipeline).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ZOO},
    "gpt2, recompute full": ("dropout", {"recompute": "full"}),
    "unet, recompute layer": ("unet", {"recompute": "layer"}),
    "resnet, recompute full": ("resnet", {"recompute": "full"}),
    "gpt2, bf16 autocast": ("gpt2", {"autocast": torch.bfloat16}),
    "resnet, BatchNorm of the whole batch": ("resnet", {"batch_norm": "whole batch"}),
}


class Difference(NamedTuple):
    """The largest absolute differences of a training from one process.

    Attributes:
        loss, gradient, weight: the last also of buffers.
        losses: of every step, in the pipeline and in one process.
    """

    loss: float
    gradient: float
    weight: float
    losses: list[tuple[float, float]]

    @property
    def largest(self) -> float:
        return max(self.loss, self.gradient, self.weight)


def train(variant: str, schedules: Sequence[tuple[str, int]], steps: int) -> dict[str, Difference]:
    """Train on this rank's parts of a pipeline per schedule, and once whole in this process."""
    name, options = VARIANTS[variant]
    model = ZOO[name]
    torch.manual_seed(0)
    alone = model.build()
    common = {
        "loss_fn": model.loss_fn, "microbatches": MICROBATCHES, "seed": 7, **model.options
    }  # fmt: skip
    runs = []
    for schedule, chunks in schedules:
        stages = torch.distributed.get_world_size() * chunks
        pipe = pipelane.Pipeline(
            copy.deepcopy(alone),
            schedule=schedule,
            chunks=chunks,
            partition=[b - a for a, b in equal_layers([1.0] * len(alone), stages)],
            **common,
            **options,
        )
        runs.append((schedule, pipe, torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9)))
    shared = {key: options[key] for key in ("autocast", "batch_norm") if key in options}
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    # The pipeline's names are the model's own. Tied weights appear there under every name.
    expected: dict[str, nn.Parameter] = dict(alone.named_parameters(remove_duplicate=False))
    found = {schedule: Difference(0.0, 0.0, 0.0, []) for schedule, _ in schedules}
    for step in range(steps):
        # Rows differ from step to step, and do not divide evenly.
        x, y = model.batch(ROWS + step % 3, generator)
        optimizer.zero_grad()
        wanted = float(pipelane.reference(alone, x, y, step=step, **common, **shared))
        for schedule, pipe, ours in runs:
            ours.zero_grad()
            loss = float(pipe.step(x, target=y))
            before = found[schedule]
            gradient = before.gradient
            for key, parameter in pipe.named_parameters():
                other = expected[key]
                if (parameter.grad is None) != (other.grad is None):
                    raise AssertionError(f"{variant}, {schedule}: gradient of {key} is missing")
                gradient = max(gradient, _apart(parameter.grad, other.grad))
            found[schedule] = before._replace(
                loss=max(before.loss, abs(loss - wanted)),
                gradient=gradient,
                losses=[*before.losses, (loss, wanted)],
            )
            ours.step()
        optimizer.step()
    state = alone.state_dict()
    for schedule, pipe, _ in runs:
        weight = max(
            (_apart(value, state[key]) for key, value in pipe.state_dict().items()), default=0.0
        )
        found[schedule] = found[schedule]._replace(weight=weight)
        pipe.close()
    return found


def _apart(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    if a is None or b is None or not a.numel():
        return 0.0
    return float((a.double() - b.double()).abs().max())


def worst(found: list[Difference]) -> Difference:
    """Over all ranks."""
    return Difference(
        *(max(getattr(one, field) for one in found) for field in ("loss", "gradient", "weight")),
        found[0].losses,
    )


def every(variants: Sequence[str], steps: int) -> dict[tuple[str, str], Difference]:
    """All of them, on the ranks this runs on; one launch for all."""
    return {
        (variant, schedule): difference
        for variant in variants
        for schedule, difference in train(variant, SCHEDULES, steps).items()
    }


def cell(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}"


def table(steps: int, ranks: tuple[int, ...]) -> str:
    names = list(VARIANTS)
    columns = [(schedule, p) for schedule, _ in SCHEDULES for p in ranks]
    by_ranks = {p: pipelane.launch(every, p, names, steps) for p in ranks}
    lines = [
        "| | " + " | ".join(f"{schedule} p={p}" for schedule, p in columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for name in names:
        cells = [
            cell(worst([one[name, schedule] for one in by_ranks[p]]).largest)
            for schedule, p in columns
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def curve(variant: str, schedule: str, chunks: int, p: int, steps: int) -> str:
    ranks = pipelane.launch(train, p, variant, [(schedule, chunks)], steps)
    found = worst([one[schedule] for one in ranks])
    lines = [f"| step | {schedule}, p={p} | one process |", "|---:|---:|---:|"]
    marks = sorted({0, 9, 99, *range(steps // 5 - 1, steps, max(1, steps // 5)), steps - 1})
    for step in (mark for mark in marks if 0 <= mark < steps):
        ours, theirs = found.losses[step]
        lines.append(f"| {step + 1} | {ours:.7f} | {theirs:.7f} |")
    equal = sum(a == b for a, b in found.losses)
    lines.append("")
    lines.append(
        f"Losses equal bit for bit in {equal} of {steps} steps; largest difference of a loss "
        f"{cell(found.loss)}, of a weight or buffer after the last step {cell(found.weight)}."
    )
    return "\n".join(lines)


TEXT = """# Correctness

What a pipeline computes, against one process with the same micro-batches (`pipelane.reference`).
This file is written by

    python -m benchmarks.correctness --write docs/correctness.md

Last run: torch {torch}, {machine}, CPU, gloo.

## Features, schedules, ranks

The largest absolute difference of any loss, gradient, parameter or buffer over {table_steps} steps
of SGD with momentum; 6 micro-batches of 14 to 16 rows, which do not divide evenly. `0` is equal bit
for bit. The models are in `benchmarks/zoo.py`.

{table}

Where it is not 0 a weight is tied across stages: each stage sums its own micro-batches first and
the stages' sums are added in a fixed order, while one process adds in the order in which its
backwards meet. Both orders are right; the copies of the weight stay equal bit for bit.

## {steps} steps

GPT-2 with dropout 0.1 everywhere:

{exact}

GPT-2 with embedding and head tied, which rounds otherwise:

{tied}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500, help="of the long trainings")
    parser.add_argument("--table-steps", type=int, default=3, help="per entry of the table")
    parser.add_argument("--write", type=Path, metavar="FILE", help="instead of printing it")
    options = parser.parse_args()
    if options.steps < 1 or options.table_steps < 1:
        parser.error("--steps and --table-steps must be >= 1")
    text = TEXT.format(
        torch=torch.__version__,
        machine=f"{platform.system()} {platform.machine()}",
        table_steps=options.table_steps,
        steps=options.steps,
        table=table(options.table_steps, (1, 2, 4)),
        exact=curve("dropout", "1f1b", 1, 4, options.steps),
        tied=curve("gpt2-tied", "zbv", 2, 2, options.steps),
    )
    if options.write is not None:
        options.write.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
