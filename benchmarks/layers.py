"""Layers whose cost is known."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, f: float, b: float) -> Any:
        ctx.seconds = b
        time.sleep(f)
        return x + weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        (grad,) = grads
        return grad, grad.sum(0), None, None


class SleepLayer(nn.Module):
    """Sleeps instead of computing, so that many ranks truly overlap on few cores.

    Forward takes ``f`` seconds, backward ``b`` seconds, whatever the machine.
    """

    def __init__(self, width: int, f: float, b: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.f, self.b = f, b

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x, self.weight, self.f, self.b)


class _SleepBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, f: float, b: float) -> Any:
        ctx.seconds = b
        if f:
            time.sleep(f)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], None, None


class SplitSleepLayer(nn.Module):
    """As :class:`SleepLayer`, but half of the backward is for the input and half for the weight."""

    def __init__(self, width: int, f: float, b: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.f, self.b = f, b

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved = _SleepBack.apply(x, self.f, self.b / 2)
        return moved + _SleepBack.apply(self.weight, 0.0, self.b / 2)  # type: ignore[no-any-return]


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.project(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (p.view(rows, length, self.heads, -1).transpose(1, 2) for p in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.feed(x)
