"""The floor: 1F1B written by hand with isend and irecv, for one fixed shape and nothing else.

No shape changes, no timeline, no failure handling, no loss on the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class HandWritten1F1B:
    """One stage per rank; ``shape`` and float32 at every boundary."""

    def __init__(
        self, stage: nn.Module, microbatches: int, loss_fn: Any, shape: Sequence[int], group: Any
    ) -> None:
        self.stage, self.m, self.loss_fn = stage, microbatches, loss_fn
        self.shape, self.group = list(shape), group
        self.rank, self.p = dist.get_rank(group), dist.get_world_size(group)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        rank, p, m, group = self.rank, self.p, self.m, self.group
        first, last = rank == 0, rank == p - 1
        xs, ys = x.chunk(m), y.chunk(m)
        sends: list[Any] = []
        kept: list[Any] = []

        def post(peer: int) -> tuple[torch.Tensor, Any]:
            buffer = torch.empty(self.shape)
            return buffer, dist.irecv(buffer, peer, group=group)

        inputs = [] if first else [post(rank - 1)]
        grads = [] if last else [post(rank + 1)]

        def forward(i: int) -> None:
            if first:
                value = xs[i]
            else:
                value, work = inputs.pop()
                if i + 1 < m:
                    inputs.append(post(rank - 1))
                work.wait()
                value.requires_grad_()
            out = self.stage(value)
            if last:
                out = self.loss_fn(out, ys[i]) / m
            else:
                sends.append((dist.isend(out.detach(), rank + 1, group=group), out))
            kept.append((value, out))

        def backward(i: int) -> None:
            value, out = kept.pop(0)
            if last:
                out.backward()
            else:
                grad, work = grads.pop()
                if i + 1 < m:
                    grads.append(post(rank + 1))
                work.wait()
                out.backward(grad)
            if not first:
                sends.append((dist.isend(value.grad, rank - 1, group=group), value.grad))

        ahead = min(p - 1 - rank, m)
        for i in range(ahead):
            forward(i)
        for i in range(ahead, m):
            forward(i)
            backward(i - ahead)
        for i in range(m - ahead, m):
            backward(i)
        for work, _ in sends:
            work.wait()
