"""One training step in one process: what a pipeline's results are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pipelane.errors import InputError
from pipelane.layers import layers_of
from pipelane.runtime.loss import LossPolicy, microbatch_loss, microbatch_weights, split_sizes
from pipelane.runtime.randomness import may_draw, run_layers

__all__ = ["reference"]


def reference(
    model: nn.Module,
    x: torch.Tensor,
    target: Any,
    *,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    microbatches: int,
    loss_reduction: str = "mean",
    loss_weight: Callable[[Any], Any] | None = None,
    seed: int | None = None,
    step: int = 0,
) -> torch.Tensor:
    """Forward and backward over the same micro-batches as a pipeline, one after the other.

    Gradients accumulate into the parameters' ``.grad`` in the order of the micro-batches, as they
    do in a pipeline with the schedules naive, gpipe and 1f1b; there the results are equal bit for
    bit (same device, same number of threads).

    Args:
        model: the whole model, an ``nn.Sequential``.
        x: batch, rows first.
        target: target of the batch, rows first.
        loss_fn, microbatches, loss_reduction, loss_weight, seed: as for ``Pipeline``.
        step: number of the step, from 0, on which random draws depend.

    Returns:
        The loss of the whole batch, a detached scalar.

    Raises:
        InputError: fewer rows than micro-batches.
    """
    layers = [(i, m, may_draw(m)) for i, (_, m) in enumerate(layers_of(model))]
    if len(x) < microbatches:
        raise InputError(f"{len(x)} rows cannot make {microbatches} micro-batches")
    sizes = split_sizes(len(x), microbatches)
    targets = list(torch.split(target, sizes))
    weights = microbatch_weights(LossPolicy(loss_reduction, loss_weight), targets)
    seed = torch.initial_seed() if seed is None else seed
    total: torch.Tensor | None = None
    for i, part in enumerate(torch.split(x, sizes)):
        output = run_layers(layers, part, seed, step, i, x.device)
        loss = microbatch_loss(loss_fn, output, targets[i], weights[i], i)
        torch.autograd.backward((loss,))
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    return total
