"""Batch normalisation whose running statistics are those of the whole batch.

As torchgpipe's ``DeferredBatchNorm`` (arXiv 2004.09910, section 3.3): every micro-batch is
normalised with its own mean and variance; sums over all of them update the running statistics once
per step, so these do not depend on the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["WholeBatchNorm", "whole_batch_norms"]

# Buffers, so that a recomputation, which puts buffers back, does not count a micro-batch twice.
_COUNT, _SUM, _SQUARES = "pipelane_count", "pipelane_sum", "pipelane_squares"


class WholeBatchNorm:
    """Takes over the training forward of one batch normalisation layer."""

    def __init__(self, module: _BatchNorm) -> None:
        self._module = module
        self._forward: Callable[[Tensor], Tensor] = module.forward
        like = module.running_mean
        assert like is not None
        for name, shape in ((_COUNT, ()), (_SUM, like.shape), (_SQUARES, like.shape)):
            zeros = torch.zeros(shape, dtype=torch.float64, device=like.device)
            module.register_buffer(name, zeros, persistent=False)
        module.forward = self._run  # type: ignore[method-assign, assignment]

    def _run(self, x: Tensor) -> Tensor:
        module = self._module
        if not module.training:
            return self._forward(x)
        module._check_input_dim(x)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            over = [0, *range(2, x.dim())]
            values = x.detach().double()
            getattr(module, _COUNT).add_(x.numel() / x.shape[1])
            getattr(module, _SUM).add_(values.sum(over))
            getattr(module, _SQUARES).add_((values * values).sum(over))
        return batch_norm(x, None, None, module.weight, module.bias, True, 0.0, module.eps)

    @torch.no_grad()
    def finish(self) -> None:
        """At the end of a step: update the running statistics."""
        module = self._module
        count, sums, squares = (getattr(module, name) for name in (_COUNT, _SUM, _SQUARES))
        mean, tracked, variance = (
            module.running_mean,
            module.num_batches_tracked,
            module.running_var,
        )
        if not count.item() or mean is None or variance is None or tracked is None:
            return
        tracked.add_(1)
        share = 1.0 / float(tracked) if module.momentum is None else module.momentum
        middle = sums / count
        spread = (squares / count - middle * middle).clamp_(min=0) * (
            count / (count - 1).clamp(min=1)
        )
        mean.mul_(1 - share).add_((share * middle).to(mean.dtype))
        variance.mul_(1 - share).add_((share * spread).to(variance.dtype))
        for buffer in (count, sums, squares):
            buffer.zero_()

    def remove(self) -> None:
        """Leave the module as it was."""
        del self._module.forward
        for name in (_COUNT, _SUM, _SQUARES):
            del self._module._buffers[name]
            self._module._non_persistent_buffers_set.discard(name)


def whole_batch_norms(modules: Iterable[nn.Module]) -> list[WholeBatchNorm]:
    """Take over all batch normalisations in some modules that track running statistics."""
    found = dict.fromkeys(part for module in modules for part in module.modules())
    return [
        WholeBatchNorm(part)
        for part in found
        if isinstance(part, _BatchNorm) and part.running_mean is not None
    ]
