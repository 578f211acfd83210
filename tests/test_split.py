"""Schedules that run I and W apart, and the whole catalogue, over real gloo processes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import batch, classifier
from test_runtime import compare
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

import pipelane
from pipelane.catalogue import load_generator, schedule_names
from pipelane.costs import Costs
from pipelane.schedule import Schedule, Shape
from pipelane.synthesis import auto

SIZES = [1, 3, 5, 8]


def uneven_auto(shape: Shape) -> Schedule:
    """An order made for uneven stages, with weight gradients wherever they fill a gap."""
    s = range(1, shape.stages + 1)
    costs = Costs(tuple(1.0 * i for i in s), tuple(2.0 / i for i in s), tuple(0.7 * i for i in s))
    return auto(shape, costs, seconds=0.0)


def every_schedule(names: list[str]) -> list[str]:
    wrong = []
    for name in names:
        for m in SIZES:
            model = classifier(layers=12)
            x, y = batch(2 * m + 1)
            ranks = torch.distributed.get_world_size()
            schedule: str | Callable[..., Schedule] = uneven_auto if name == "auto" else name
            chunks = getattr(load_generator(name), "default_chunks", 1)
            stages = chunks * ranks
            sizes = [12 // stages + (s < 12 % stages) for s in range(stages)]
            pipe = pipelane.Pipeline(
                copy.deepcopy(model), schedule=schedule, microbatches=m, chunks=chunks,
                loss_fn=cross_entropy, partition=sizes,
            )  # fmt: skip
            for step in range(2):
                found = compare(pipe, model, x, y, step=step)
                wrong += [f"{name} m={m} step {step}: {text}" for text in found]
            kinds = {s.action.kind.value for row in pipe.timeline().spans for s in row}
            if pipe.schedule.splits_backward != ("W" in kinds):
                wrong.append(f"{name} m={m}: the timeline has {kinds}")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_catalogue_equals_one_process_bit_for_bit(ranks: int) -> None:
    for wrong in pipelane.launch(every_schedule, ranks, schedule_names()):
        assert wrong == []


def operations_of_halves() -> list[tuple[str, int]]:
    """Floating-point operations of each I and W that this rank runs in one step."""
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(2)])
    pipe = pipelane.Pipeline(
        model, schedule="zb-h1", microbatches=2, loss_fn=torch.nn.functional.mse_loss,
        partition=[1, 1],
    )  # fmt: skip
    x, y = torch.randn(4, 16), torch.randn(4, 16)
    pipe.step(x, y)
    engine = pipe._train_engine
    found = []
    for index, label in enumerate(engine._labels):
        if label.what == "run" and label.action.kind.value in "IW":
            op = engine._ops[index]

            def counted(op: Any = op, kind: str = label.action.kind.value) -> None:
                counter = FlopCounterMode(display=False)
                with counter:
                    op()
                found.append((kind, counter.get_total_flops()))

            engine._ops[index] = counted
    pipe.step(x, y)
    return found


def test_input_gradients_do_not_do_the_work_of_weight_gradients() -> None:
    first, second = pipelane.launch(operations_of_halves, 2)
    product = 2 * 2 * 16 * 16  # of one micro-batch of two rows
    assert [n for kind, n in first if kind == "I"] == [0, 0]  # the batch needs no gradient
    assert [n for kind, n in first if kind == "W"] == [product] * 2
    assert [n for kind, n in second if kind == "I"] == [product] * 2
    assert [n for kind, n in second if kind == "W"] == [product] * 2


class Square(torch.autograd.Function):
    """One of the user's own, which computes both gradients at once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] * weight, (grads[0] * x).sum(0)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 1.5))

    def forward(self, x: torch.Tensor) -> Any:
        return Square.apply(x, self.weight)


def odd_layers() -> list[str]:
    """Layers that cannot be split, are frozen, have no parameters, or are no floating point."""
    wrong = []
    torch.manual_seed(0)
    frozen = nn.Linear(8, 8).requires_grad_(False)
    model = nn.Sequential(
        nn.Embedding(8, 8), nn.ReLU(), frozen, nn.Linear(8, 8), Scale(), nn.Linear(8, 8)
    )
    x, y = torch.randint(0, 8, (5,)), torch.randint(0, 8, (5,))
    for sizes in ([1, 1, 4], [3, 2, 1], [1, 4, 1]):
        pipe = pipelane.Pipeline(
            copy.deepcopy(model), schedule="zb-h2", microbatches=3, loss_fn=cross_entropy,
            partition=sizes,
        )  # fmt: skip
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrong += [f"{sizes}: {text}" for text in compare(pipe, model, x, y)]
            wrong += [f"{sizes}: {text}" for text in compare(pipe, model, x, y, step=1)]
        told = [str(w.message) for w in caught if "cannot be split" in str(w.message)]
        has_square = any(name == "4.weight" for name, _ in pipe.named_parameters())
        if len(told) != has_square:
            wrong.append(f"{sizes}: {told}")
        if told and "SquareBackward" not in told[0]:
            wrong.append(told[0])
    return wrong


def test_what_cannot_be_split_is_named_once_and_right() -> None:
    for wrong in pipelane.launch(odd_layers, 3):
        assert wrong == []


def held_after_a_step() -> int:
    model = classifier(layers=6)
    pipe = pipelane.Pipeline(
        model, schedule="zbv", microbatches=3, loss_fn=cross_entropy, partition=[2, 2, 1, 1]
    )
    pipe.step(*batch(6))
    return pipe._train_engine.held()


def test_nothing_is_kept_after_the_last_weight_gradient() -> None:
    assert pipelane.launch(held_after_a_step, 2) == [0, 0]
