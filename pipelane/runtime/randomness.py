"""Random draws that depend on (seed, step, micro-batch, layer) and on nothing else.

So dropout is the same for every number of stages, every schedule, and in one process. A layer
that may draw gets its generator seeded just before it runs; the user's own stream is put back
afterwards, untouched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["layer_seed", "may_draw", "preserved_stream"]

_MASK = (1 << 64) - 1

# Module types known never to draw in forward. All others may: seeding costs about a microsecond.
_NEVER = (
    nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.Identity, nn.Flatten, nn.Unflatten,
    nn.Sequential, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Tanh, nn.Sigmoid, nn.Softmax, nn.LogSoftmax, nn.Softplus, nn.Hardswish, nn.Hardtanh,
)  # fmt: skip


def may_draw(layer: nn.Module) -> bool:
    """Whether the layer's forward may use random numbers."""
    return any(type(module) not in _NEVER for module in layer.modules())


def layer_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """Mix the four numbers into 63 bits (the finaliser of SplitMix64, once per number)."""
    state = seed & _MASK
    for number in (step, microbatch, layer):
        state = (state + 0x9E3779B97F4A7C15 * (number + 1)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        made: torch.Generator = torch.cuda.default_generators[index]
        return made
    return torch.default_generator


@contextmanager
def preserved_stream(device: torch.device) -> Iterator[torch.Generator]:
    """The device's default generator, to be seeded at will; its state is put back at the end."""
    generator = _generator(device)
    state = generator.get_state()
    try:
        yield generator
    finally:
        generator.set_state(state)
