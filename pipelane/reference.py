"""One training step in one process: what a pipeline's results are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pipelane.errors import InputError
from pipelane.layers import layers_of
from pipelane.runtime.batchnorm import whole_batch_norms
from pipelane.runtime.forward import Layer, Policy, Runner
from pipelane.runtime.loss import (
    LossFn,
    LossPolicy,
    microbatch_loss,
    microbatch_weights,
    split_sizes,
    total,
)
from pipelane.trees import rebuild, split_rows

__all__ = ["reference"]


def reference(
    model: nn.Module,
    x: Any,
    target: Any,
    *,
    loss_fn: LossFn,
    microbatches: int,
    loss_reduction: str = "mean",
    loss_weight: Callable[[Any], Any] | None = None,
    scale: float = 1.0,
    autocast: torch.dtype | None = None,
    batch_norm: str = "micro-batch",
    seed: int | None = None,
    step: int = 0,
) -> torch.Tensor:
    """Forward and backward over the same micro-batches as a pipeline, one after the other.

    Gradients accumulate into the parameters' ``.grad`` in the order of the micro-batches, as they
    do in a pipeline with the catalogue's schedules; there the results are equal bit for bit (same
    device, same number of threads). The one exception is a weight that several stages share: its
    gradient is summed in another order, so it is equal up to rounding.

    Args:
        model: the whole model, an ``nn.Sequential``.
        x: batch, rows first; several arguments as :class:`pipelane.Inputs`.
        target: target of the batch, rows first.
        loss_fn, microbatches, loss_reduction, loss_weight, autocast, batch_norm, seed: as for
            ``Pipeline``.
        scale: as for ``Pipeline.step``.
        step: number of the step, from 0, on which random draws depend.

    Returns:
        The loss of the whole batch, a detached scalar.

    Raises:
        InputError: fewer rows than micro-batches.
    """
    layers = layers_of(model)
    batch = split_rows(x, "the batch")
    if batch.count < microbatches:
        raise InputError(f"{batch.count} rows cannot make {microbatches} micro-batches")
    device = batch.leaves[0].device
    policy = Policy(torch.initial_seed() if seed is None else seed, device, autocast)
    run = Runner([Layer(i, name, module) for i, (name, module) in enumerate(layers)], policy)
    sizes = split_sizes(batch.count, microbatches)
    whole = split_rows(target, "the target", batch.count)
    targets = [rebuild(whole.structure, part) for part in whole.parts(sizes)]
    weights = microbatch_weights(LossPolicy(loss_reduction, loss_weight), targets, sizes)
    norms = whole_batch_norms([model]) if batch_norm == "whole batch" else []
    losses = []
    for i, part in enumerate(batch.parts(sizes)):
        output = run(rebuild(batch.structure, part), {}, step, i)
        with policy.precision():
            loss, _ = microbatch_loss(loss_fn, output, targets[i], weights[i], i)
        torch.autograd.backward((loss,), (torch.full_like(loss, scale),) if scale != 1.0 else None)
        losses.append(loss.detach())
    for norm in norms:
        norm.finish()
        norm.remove()
    return total(losses)
