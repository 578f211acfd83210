"""The loss of a step from the losses of its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipelane.errors import LossError

__all__ = ["LossPolicy", "checked_loss", "microbatch_loss", "microbatch_weights", "split_sizes"]

LossFn = Callable[[Any, Any], torch.Tensor]


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


def microbatch_weights(policy: LossPolicy, targets: Sequence[torch.Tensor]) -> list[float]:
    """What each micro-batch's loss is multiplied with, so that their sum is the batch's loss."""
    if policy.reduction == "sum":
        return [1.0] * len(targets)
    if policy.weight is None:
        parts = [float(len(target)) for target in targets]
    else:
        parts = [float(policy.weight(target)) for target in targets]
    total = sum(parts)
    if not total > 0 or min(parts) < 0:
        raise LossError(
            f"loss_weight gave {parts} for the micro-batches; each must be >= 0 and one > 0"
        )
    return [part / total for part in parts]


def microbatch_loss(
    loss_fn: LossFn, output: Any, target: Any, weight: float, number: int
) -> torch.Tensor:
    """The weighted loss of one micro-batch, in the one way that pipeline and reference share."""
    if weight == 0.0:
        # Nothing counts here, and a mean over nothing would be NaN: zero, with zero gradients.
        nothing: torch.Tensor = (output * 0.0).sum()
        return nothing
    loss = checked_loss(loss_fn(output, target), f"for micro-batch {number}")
    return loss if weight == 1.0 else loss * weight


def checked_loss(loss: object, where: str) -> torch.Tensor:
    """The loss itself, if it is a scalar floating-point tensor.

    Raises:
        LossError: naming the place and the remedy.
    """
    if not isinstance(loss, torch.Tensor):
        raise LossError(
            f"the loss function returned {type(loss).__name__} {where}; it must return a scalar "
            "tensor, such as torch.nn.functional.cross_entropy(output, target) does"
        )
    if loss.dim() != 0:
        raise LossError(
            f"the loss function returned a tensor of shape {list(loss.shape)} {where}; it must "
            "return a scalar: reduce with .mean() or .sum(), and say which with loss_reduction="
        )
    if not loss.is_floating_point():
        raise LossError(f"the loss function returned a tensor of dtype {loss.dtype} {where}")
    return loss
