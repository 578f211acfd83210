"""``pipelane demo``: train a classifier of scanned digits and look at the bubbles."""

from __future__ import annotations

import copy
import itertools
import os
import time
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.nn.functional import cross_entropy

import pipelane
from pipelane.errors import ConfigError
from pipelane.views.tables import partition_table

__all__ = ["run"]

EPOCHS = 20
BATCH = 256
MICROBATCHES = 8


def build() -> nn.Sequential:
    """A classifier of 8 x 8 images: 17 layers of uneven cost."""
    torch.manual_seed(0)
    widths = [64, *[512] * 6, 256]
    layers: list[nn.Module] = []
    for one, following in itertools.pairwise(widths):
        layers += [nn.Linear(one, following), nn.ReLU()]
    return nn.Sequential(*layers, nn.LayerNorm(widths[-1]), nn.Dropout(0.1), nn.Linear(256, 10))


def load() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """scikit-learn's 1797 scanned digits, a fifth of them held out: x, y, held-out x, y."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(
            "the demo's data comes with scikit-learn: pip install 'torch-pipelane[demo]'"
        ) from error
    digits: Any = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16.0
    y = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    held = len(x) // 5
    return x[held:], y[held:], x[:held], y[:held]


def train(epochs: int) -> tuple[float, bool]:
    """The demo's work on each rank: the accuracy on held-out digits, and whether the first step
    equalled one process to the last bit."""
    x, y, held_x, held_y = load()
    model = build()
    whole = copy.deepcopy(model)
    pipe = pipelane.Pipeline(
        model, example=x[: BATCH // MICROBATCHES], schedule="1f1b", microbatches=MICROBATCHES,
        loss_fn=cross_entropy, seed=0,
    )  # fmt: skip
    console = Console(quiet=pipe.rank != 0)
    console.print(f"[bold]1. Partition[/] of {len(whole)} layers, balanced by their profile\n")
    console.print(partition_table(pipe.partition, pipe.plan.profile if pipe.plan else None))
    if pipe.plan is not None:
        console.print("\n[bold]2. Plan[/]: the step that the profile predicts\n")
        console.print(pipe.plan.timeline)

    equal, loss, expected = first_step(pipe, whole, x[:BATCH], y[:BATCH])
    console.print(
        f"\n[bold]3. First step[/]: loss {loss:.6f}, in one process {expected:.6f}; gradients "
        + ("equal bit for bit on every rank" if equal else "[red]differ[/]")
    )

    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    began = time.perf_counter()
    shuffle = torch.Generator().manual_seed(1)
    steps = len(x) // BATCH
    with Progress(
        TextColumn("[bold]4. Train[/]"), BarColumn(), MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"), TimeElapsedColumn(), console=console,
    ) as progress:  # fmt: skip
        task = progress.add_task("", total=epochs * steps, loss=loss)
        for _ in range(epochs):
            order = torch.randperm(len(x), generator=shuffle)[: steps * BATCH]
            for rows in torch.split(order, BATCH):
                optimizer.zero_grad()
                value = pipe.step(x[rows], y[rows])
                optimizer.step()
                progress.update(task, advance=1, loss=value.item())
    seconds = time.perf_counter() - began

    console.print("\n[bold]5. Measured[/]: the last step\n")
    measured = pipe.timeline()
    console.print(measured)
    if (os.cpu_count() or 1) < pipe.ranks:
        console.print(
            f"\n({pipe.ranks} ranks share {os.cpu_count()} cores here, so they wait for cores as "
            "well: measured bubbles are larger than on a device per rank.)"
        )
    pipe.eval()
    accuracy = (pipe(held_x, gather=True).argmax(1) == held_y).float().mean().item()
    console.print(
        f"\n[bold]6. Result[/]: {accuracy:.1%} of {len(held_y)} held-out digits right after "
        f"{epochs} epochs in {seconds:.1f} s ({epochs * steps / seconds:.0f} steps/s)"
    )
    return accuracy, equal


def first_step(
    pipe: pipelane.Pipeline, whole: nn.Sequential, x: torch.Tensor, y: torch.Tensor
) -> tuple[bool, float, float]:
    """Compare loss and gradients with the same step in one process."""
    loss = pipe.step(x, y)
    expected = pipelane.reference(
        whole, x, y, loss_fn=cross_entropy, microbatches=MICROBATCHES, seed=0
    )
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    same = torch.equal(loss, expected)
    for name, parameter in pipe.named_parameters():
        here, there = parameter.grad, gradients[name]
        same = same and here is not None and there is not None and torch.equal(here, there)
    return all(pipe.gather(same)), loss.item(), expected.item()


def run(ranks: int = 4, epochs: int | None = None) -> int:
    """Train over local ranks; 0 if the first step was exact and at least 95 % are right."""
    load()  # say what is missing before any process starts
    accuracy, equal = pipelane.launch(train, ranks, EPOCHS if epochs is None else epochs)[0]
    return 0 if equal and (accuracy >= 0.95 or epochs is not None) else 1
