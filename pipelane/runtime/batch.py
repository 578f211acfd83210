"""A batch on its way in, and the outputs of its micro-batches on their way out."""

from __future__ import annotations

import math
from typing import Any

import torch

from pipelane.errors import InputError
from pipelane.runtime.boundary import Message
from pipelane.runtime.loss import total
from pipelane.trees import Rows, flatten, paths, rebuild, split_rows

__all__ = ["batch_of", "give_back", "moved", "plain", "put_together", "scale_of"]


def batch_of(value: Any, least: int) -> Rows:
    """The rows of a batch.

    Raises:
        InputError: it cannot be used.
    """
    if value is None:
        raise InputError(
            "the rank of the first stage was given no batch: pass x to step or forward there"
        )
    batch = split_rows(value, "the batch")
    if batch.count < least:
        if least == 1:
            raise InputError("the batch is empty; pass at least one row")
        raise InputError(
            f"the batch has {batch.count} rows, fewer than microbatches={least}; use larger "
            "batches (DataLoader(..., drop_last=True) drops a short last one) or fewer "
            "micro-batches"
        )
    return batch


def plain(leaf: torch.Tensor) -> torch.Tensor:
    """A tensor that autograd may save; the batch's own graph stays out of the pipeline.

    With a version counter of its own: views share one, and a layer that overwrites its rows of the
    batch must not spoil what the backward of other rows needs.
    """
    if leaf.is_inference() and not torch.is_inference_mode_enabled():
        return leaf.clone()
    return leaf.data


def give_back(batch: Rows, parts: list[list[Any]]) -> None:
    """Gradients of the batch itself, where it wants some."""
    for place, (leaf, split) in enumerate(zip(batch.leaves, batch.split, strict=True)):
        if leaf.requires_grad:
            own = [part[place] for part in parts]
            whole = torch.cat(own) if split else total(own)
            torch.autograd.backward((leaf,), (whole.to(leaf.device),))


def put_together(parts: list[Message], sizes: list[int]) -> Any:
    """One output of the outputs of the micro-batches."""
    first = parts[0]
    if len(parts) == 1:
        return rebuild(first.structure, first.leaves)
    leaves = []
    for place, leaf in enumerate(first.leaves):
        column = [part.leaves[place] for part in parts]
        where = paths(first.structure)[place]
        if leaf.dim() == 0:
            leaves.append(torch.stack(column))
            continue
        wrong = [
            (i, list(one.shape))
            for i, (one, size) in enumerate(zip(column, sizes, strict=True))
            if len(one) % size
        ]
        if wrong:
            raise InputError(
                f"the model's output{where} has shape {wrong[0][1]} for micro-batch {wrong[0][0]} "
                f"of {sizes[wrong[0][0]]} rows; rows must come first (dimension 0) for the outputs "
                "of micro-batches to be put together: move them there in the last layer"
            )
        leaves.append(torch.cat(column))
    return rebuild(first.structure, leaves)


def moved(value: Any, device: torch.device) -> Any:
    leaves, structure = flatten(value)
    return rebuild(structure, [leaf.to(device) for leaf in leaves])


def scale_of(scale: Any) -> float:
    """A number, or what a gradient scaler has."""
    if hasattr(scale, "get_scale"):
        scale = scale.get_scale()
    value = float(scale)
    if not math.isfinite(value):
        raise InputError(f"scale must be a finite number, got {value}")
    return value
