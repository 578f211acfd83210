"""One stage on its device: forward and backward of one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from pipelane.errors import BoundaryError
from pipelane.runtime.randomness import may_draw, run_layers
from pipelane.runtime.transport import DTYPES, MAX_DIMS, Spec

__all__ = ["StageModule", "backward_from"]


class StageModule:
    """A stage's layers and what running them needs.

    Args:
        index: number of the stage.
        layers: (name in the model, layer), in order.
        first: index of the first of them in the model.
        device: where it runs.
        seed: of the whole run; see :mod:`pipelane.runtime.randomness`.
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[tuple[str, nn.Module]],
        first: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self.index = index
        self.names = [name for name, _ in layers]
        self.modules = [module for _, module in layers]
        self.device = device
        self._seed = seed
        self._plan = [(first + i, m, may_draw(m)) for i, m in enumerate(self.modules)]
        self._draws = any(draws for _, _, draws in self._plan)
        # Autograd refuses to overwrite a leaf; a received tensor is one.
        self._overwrites = any(
            getattr(m, "inplace", False) is True for layer in self.modules for m in layer.modules()
        )

    def __call__(self, value: torch.Tensor, step: int, microbatch: int) -> torch.Tensor:
        """The stage's output; a tensor of its own that no later in-place operation changes."""
        if self._overwrites and value.requires_grad:
            value = value.clone()
        if self._draws:
            return run_layers(self._plan, value, self._seed, step, microbatch, self.device)
        for module in self.modules:
            value = module(value)
        return value

    @property
    def where(self) -> str:
        """The stage and its last layer, for messages about its output."""
        return (
            f"stage {self.index} (last layer {self.names[-1]!r}, {type(self.modules[-1]).__name__})"
        )

    def spec_of(self, output: object) -> Spec:
        """The spec of an output that goes to the next stage.

        Raises:
            BoundaryError: the output cannot be sent.
        """
        if not isinstance(output, torch.Tensor):
            raise BoundaryError(
                f"{self.where} returned {type(output).__name__}; in this version exactly one "
                "tensor may pass from stage to stage: return a tensor, or cut the model elsewhere "
                "with partition=[layers per stage]"
            )
        if output.dim() > MAX_DIMS or output.dtype not in DTYPES:
            raise BoundaryError(
                f"{self.where} returned {output.dtype} with {output.dim()} dimensions; at most "
                f"{MAX_DIMS} dimensions and torch's plain dtypes can be sent"
            )
        if output.device != self.device:
            raise BoundaryError(
                f"{self.where} returned a tensor on {output.device}; the pipeline runs on "
                f"{self.device}"
            )
        return Spec(tuple(output.shape), output.dtype)


_EDGES_IN_BACKWARD = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)


def backward_from(edge: torch.autograd.graph.GradientEdge, gradient: torch.Tensor) -> None:
    """Backward from a graph edge whose tensor is gone; gradients accumulate into the leaves.

    Keeping the edge instead of the output lets the output's storage go once it was sent.
    """
    if _EDGES_IN_BACKWARD:
        torch.autograd.backward((edge,), (gradient,))
        return
    # Up to torch 2.7 the public function takes tensors only; its engine takes edges.
    torch.autograd.Variable._execution_engine.run_backward(
        (edge,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
