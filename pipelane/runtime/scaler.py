"""A gradient scaler for fp16 that agrees across the ranks of a pipeline."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.amp import GradScaler as TorchGradScaler

__all__ = ["GradScaler"]


class _Pipeline(Protocol):
    """What is needed of a pipeline here; runtime does not know the class itself."""

    @property
    def device(self) -> torch.device: ...

    def gather(self, value: Any) -> list[Any]: ...


class GradScaler(TorchGradScaler):
    """``torch.amp.GradScaler`` for a pipeline: if any stage's gradients overflow, all skip a step.

    ::

        scaler = pipelane.GradScaler(pipe)
        loss = pipe.step(x, y, scale=scaler)
        scaler.unscale_(optimizer)  # only if gradients are looked at or clipped
        pipe.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()

    **Every rank must make the same calls**, with one optimizer for its own parameters.

    Args:
        pipe: the pipeline whose gradients are scaled.
        options: as for ``torch.amp.GradScaler``: ``init_scale``, ``growth_interval`` ...
    """

    def __init__(self, pipe: _Pipeline, **options: Any) -> None:
        super().__init__(pipe.device.type, **options)
        self._pipe = pipe
        # The scale is made at its first use; every rank has one, also those without a loss.
        self.scale(torch.zeros((), device=pipe.device))

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, and agree on whether any of them overflowed."""
        super().unscale_(optimizer)
        if not self.is_enabled():
            return
        found: dict[Any, torch.Tensor] = self._per_optimizer_states[id(optimizer)][
            "found_inf_per_device"
        ]
        own = max((float(flag) for flag in found.values()), default=0.0)
        anywhere = max(self._pipe.gather(own))
        if not found:  # a rank whose parameters have no gradients steps and skips with the others
            found[self._pipe.device] = torch.zeros((), device=self._pipe.device)
        for flag in found.values():
            flag.fill_(anywhere)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step()``, unless gradients overflowed on any rank."""
        from torch.amp.grad_scaler import OptState

        if self.is_enabled():
            stage = self._per_optimizer_states[id(optimizer)]["stage"]
            if stage is OptState.READY:
                self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)
