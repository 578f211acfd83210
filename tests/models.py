"""Small models and batches for the runtime tests."""

from __future__ import annotations

import torch
from torch import nn


def classifier(layers: int = 6, width: int = 8, seed: int = 0) -> nn.Sequential:
    """Linear layers with activations; layers that overwrite their input and that draw included."""
    torch.manual_seed(seed)
    made: list[nn.Module] = []
    for index in range(layers):
        kind = index % 3
        if kind == 0:
            made.append(nn.Linear(width, width))
        elif kind == 1:
            made.append(nn.ReLU(inplace=True))
        else:
            made.append(nn.LayerNorm(width))
    return nn.Sequential(*made)


def batch(rows: int, width: int = 8, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    return x, torch.randint(0, width, (rows,), generator=generator)
