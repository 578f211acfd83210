"""Gradients and losses over real gloo processes, against one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import batch, classifier
from torch import nn
from torch.nn.functional import cross_entropy

import pipelane

SIZES = [1, 2, 3, 4, 8]


def compare(
    pipe: pipelane.Pipeline,
    model: nn.Sequential,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    step: int = 0,
    **options: Any,
) -> list[str]:
    """Run one step in the pipeline and in this process; the names of what is not equal."""
    for parameter in pipe.parameters():
        parameter.grad = None
    model.zero_grad(set_to_none=True)
    m = pipe.schedule.shape.microbatches
    loss = pipe.step(x, y)
    options.setdefault("loss_fn", cross_entropy)
    expected = pipelane.reference(model, x, y, microbatches=m, step=step, **options)
    wrong = [] if torch.equal(loss, expected) else [f"loss {loss} != {expected}"]
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in pipe.named_parameters():
        one, other = parameter.grad, gradients[name]
        if one is None or other is None:
            if one is not other:
                wrong.append(f"{name}: {one} != {other}")
        elif not torch.equal(one, other):
            wrong.append(f"{name}: off by {(one - other).abs().max()}")
    return wrong


def every_schedule(schedules: list[str]) -> list[str]:
    wrong = []
    for name in schedules:
        for m in SIZES:
            model = classifier()
            x, y = batch(2 * m + 1)  # uneven micro-batches unless m is 1
            pipe = pipelane.Pipeline(
                copy.deepcopy(model),
                schedule=name,
                microbatches=m,
                loss_fn=cross_entropy,
                example=x[:2],
            )
            wrong += [f"{name} m={m}: {text}" for text in compare(pipe, model, x, y)]
            held = {id(p) for p in pipe.parameters()}
            if pipe.ranks > 1 and len(held) >= len(list(model.parameters())):
                wrong.append(f"{name} m={m}: rank {pipe.rank} holds every parameter")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_equals_one_process_bit_for_bit(ranks: int) -> None:
    for wrong in pipelane.launch(every_schedule, ranks, ["gpipe", "1f1b", "naive"]):
        assert wrong == []


def changing_sizes() -> list[str]:
    """Other batch sizes and other lengths from step to step, forwards in between."""
    model = nn.Sequential(
        nn.Embedding(11, 8), nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Linear(8, 11)
    )
    torch.manual_seed(0)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output.flatten(0, 1), target.flatten())

    pipe = pipelane.Pipeline(
        copy.deepcopy(model), microbatches=3, loss_fn=loss_fn, partition=[2, 3], seed=5
    )
    for name, value in model.named_parameters():  # every rank drew its own: make them one
        torch.distributed.broadcast(value.data, 0)
        own = dict(pipe.named_parameters())
        if name in own:
            own[name].data.copy_(value.data)
    wrong = []
    shapes = [(6, 4), (7, 4), (3, 9), (6, 4), (11, 2), (7, 4), (3, 1)]
    for number, shape in enumerate(shapes):
        x = torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(number))
        own_x = x if pipe.rank == 0 else None
        own_y = x if pipe.rank == pipe.ranks - 1 else None
        found = compare_with_none(pipe, model, own_x, own_y, x, number, loss_fn)
        wrong += [f"step {number} {shape}: {text}" for text in found]
        for rows in (1, 5):
            z = torch.randint(0, 11, (rows, 3 + number))
            torch.distributed.broadcast(z, 0)
            pipe.eval()
            model.eval()
            out = pipe(z)
            if pipe.rank == pipe.ranks - 1:
                with torch.no_grad():
                    if not torch.allclose(out, model(z), atol=1e-6):
                        wrong.append(f"forward {rows} rows after step {number}")
            elif out is not None:
                wrong.append("a rank without the last stage got an output")
            pipe.train()
            model.train()
    return wrong


def compare_with_none(
    pipe: Any, model: Any, own_x: Any, own_y: Any, x: Any, number: int, loss_fn: Any
) -> list[str]:
    for parameter in pipe.parameters():
        parameter.grad = None
    model.zero_grad(set_to_none=True)
    loss = pipe.step(own_x, own_y)
    expected = pipelane.reference(model, x, x, loss_fn=loss_fn, microbatches=3, seed=5, step=number)
    wrong = [] if torch.equal(loss, expected) else [f"loss {loss} != {expected}"]
    gradients = {name: p.grad for name, p in model.named_parameters()}
    wrong += [
        name for name, p in pipe.named_parameters() if not torch.equal(p.grad, gradients[name])
    ]
    return wrong


def test_sizes_change_from_step_to_step_and_dropout_is_the_same() -> None:
    for wrong in pipelane.launch(changing_sizes, 2):
        assert wrong == []
