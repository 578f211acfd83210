"""The loss of a step from the losses of its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipelane.errors import LossError
from pipelane.trees import flatten

__all__ = [
    "LossFn",
    "LossPolicy",
    "checked_loss",
    "microbatch_loss",
    "microbatch_weights",
    "split_sizes",
    "total",
    "total_metrics",
]

LossFn: TypeAlias = Callable[[Any, Any], Any]
"""``(output, target) -> scalar tensor``, or a dict with one as "loss" and other numbers."""


def split_sizes(rows: int, microbatches: int) -> list[int]:
    """Rows of each micro-batch: they differ by at most one, larger ones first."""
    whole, rest = divmod(rows, microbatches)
    return [whole + (i < rest) for i in range(microbatches)]


class LossPolicy:
    """How micro-batch losses make the loss of the batch.

    Args:
        reduction: what the loss function does over a micro-batch: "mean" or "sum".
        weight: for "mean": ``weight(target) -> number`` over which the mean is taken, for losses
            that ignore some entries (say ``lambda t: (t != pad).sum()``); the number of rows if
            not given.
    """

    def __init__(self, reduction: str = "mean", weight: Callable[[Any], Any] | None = None) -> None:
        self.reduction = reduction
        self.weight = weight


def microbatch_weights(
    policy: LossPolicy, targets: Sequence[Any], sizes: Sequence[int]
) -> list[float]:
    """What each micro-batch's loss is multiplied with, so that their sum is the batch's loss.

    Args:
        policy: how the loss is reduced.
        targets: per micro-batch.
        sizes: rows per micro-batch.

    Raises:
        LossError: ``weight`` gave numbers that are no weights.
    """
    if policy.reduction == "sum":
        return [1.0] * len(targets)
    if policy.weight is None:
        parts = [float(size) for size in sizes]
    else:
        parts = [float(policy.weight(target)) for target in targets]
    total = sum(parts)
    if not (0 < total < float("inf")) or min(parts) < 0:
        raise LossError(
            f"loss_weight gave {parts} for the micro-batches; each must be >= 0 and one > 0"
        )
    return [part / total for part in parts]


def microbatch_loss(
    loss_fn: LossFn, output: Any, target: Any, weight: float, number: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted loss of one micro-batch, and the weighted other entries if it is a dict.

    The one way that pipeline and reference share.

    Raises:
        LossError: see :func:`checked_loss`.
    """
    if weight == 0.0:
        # Nothing counts here, and a mean over nothing would be NaN: zero, with zero gradients.
        parts = [leaf for leaf in flatten(output)[0] if leaf.requires_grad] or flatten(output)[0]
        nothing = sum(((part * 0.0).sum() for part in parts), torch.zeros(()))
        assert isinstance(nothing, Tensor)
        return nothing, {}
    found = loss_fn(output, target)
    where = f"for micro-batch {number}"
    metrics: dict[str, Tensor] = {}
    if isinstance(found, Mapping):
        if "loss" not in found:
            raise LossError(
                f'the loss function returned a dict without "loss" {where}, only '
                f"{', '.join(map(repr, found)) or 'nothing'}; put the loss to train on there"
            )
        metrics = {
            str(name): _metric(str(name), value, where) * weight
            for name, value in found.items()
            if name != "loss"
        }
        found = found["loss"]
    loss = checked_loss(found, where)
    return (loss if weight == 1.0 else loss * weight), metrics


def total(parts: Sequence[Tensor]) -> Tensor:
    """Their sum, in this order."""
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    return whole


def total_metrics(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Per name the sum over the micro-batches that have it, in order."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: total([part[name] for part in parts if name in part]) for name in names}


def _metric(name: str, value: object, where: str) -> Tensor:
    if isinstance(value, (bool, int, float)):
        return torch.tensor(float(value))
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise LossError(
            f"the loss function returned {name!r} as {what} {where}; next to the loss only numbers "
            "and scalar tensors can be returned"
        )
    value = value.detach().reshape(())
    return value if value.is_floating_point() else value.float()


def checked_loss(loss: object, where: str) -> Tensor:
    """The loss itself, if it is a scalar floating-point tensor.

    Raises:
        LossError: naming the place and the remedy.
    """
    if not isinstance(loss, Tensor):
        raise LossError(
            f"the loss function returned {type(loss).__name__} {where}; it must return a scalar "
            "tensor, such as torch.nn.functional.cross_entropy(output, target) does, or a dict "
            'with one as "loss"'
        )
    if loss.dim() != 0:
        raise LossError(
            f"the loss function returned a tensor of shape {list(loss.shape)} {where}; it must "
            "return a scalar: reduce with .mean() or .sum(), and say which with loss_reduction="
        )
    if not loss.is_floating_point():
        raise LossError(f"the loss function returned a tensor of dtype {loss.dtype} {where}")
    return loss
