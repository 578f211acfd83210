"""Real architectures from their public configuration, small, with random weights, as chains.

Widths and depths are cut so that a step takes milliseconds; the structure is the real one: what
passes from layer to layer, what is shared, what draws, what keeps running statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipelane

__all__ = ["ZOO", "Model"]

VOCABULARY, LENGTH, PADDING = 61, 12, -100


@dataclass(frozen=True)
class Model:
    """One architecture.

    Attributes:
        name: short, unique.
        about: one line.
        build: makes it, an ``nn.Sequential`` of at least 8 layers; the same for the same
            ``torch.manual_seed``.
        batch: ``(rows, generator) -> (input, target)``.
        loss_fn: of one micro-batch.
        options: for Pipeline and reference alike.
        exact: whether all schedules give the bits of one process; a weight that stages share is
            summed in another order.
    """

    name: str
    about: str
    build: Callable[[], nn.Sequential]
    batch: Callable[[int, torch.Generator], tuple[Any, Any]]
    loss_fn: Callable[[Any, Any], Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = True


# -- language models -------------------------------------------------------------------------------


def tokens(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Token ids, and the next ones; rows end at random, and what is behind the end is ignored."""
    ids = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=generator)
    ends = torch.randint(LENGTH // 2, LENGTH + 1, (rows, 1), generator=generator)
    following = ids[:, 1:].masked_fill(torch.arange(LENGTH) >= ends, PADDING)
    return ids[:, :-1].contiguous(), following


def next_token(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PADDING)


def counted(target: Tensor) -> Tensor:
    return (target != PADDING).sum()


class GPTEmbedding(nn.Module):
    """Token and learned position embedding (Radford et al. 2019)."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(LENGTH, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.drop(self.token(ids) + self.position(places))  # type: ignore[no-any-return]


class GPTBlock(nn.Module):
    """Pre-norm, fused projection, GELU in its tanh form, dropout on both branches."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        q, k, v = (p.view(rows, length, self.heads, -1).transpose(1, 2) for p in parts)
        chance = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=chance, is_causal=True)
        x = x + self.drop(self.merge(mixed.transpose(1, 2).reshape(rows, length, width)))
        return x + self.drop(self.feed(self.norms[1](x)))  # type: ignore[no-any-return]


def gpt2(tied: bool, dropout: float = 0.0, width: int = 16, blocks: int = 6) -> nn.Sequential:
    embedding = GPTEmbedding(width, dropout)
    head = nn.Linear(width, VOCABULARY, bias=False)
    if tied:
        head.weight = embedding.token.weight
    return nn.Sequential(
        embedding, *[GPTBlock(width, 4, dropout) for _ in range(blocks)], nn.LayerNorm(width), head
    )


def rotated(x: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021), halves paired as Llama does."""
    length, half = x.shape[-2], x.shape[-1] // 2
    speeds = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.outer(torch.arange(length, device=x.device).float(), speeds)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class LlamaBlock(nn.Module):
    """RMSNorm, rotary grouped-query attention, SwiGLU (Touvron et al. 2023)."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norms = nn.ModuleList([nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)])
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * self.size, bias=False)
        self.v = nn.Linear(width, groups * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape

        def split(y: Tensor, heads: int) -> Tensor:
            return y.view(rows, length, heads, self.size).transpose(1, 2)

        y = self.norms[0](x)
        q, k = rotated(split(self.q(y), self.heads)), rotated(split(self.k(y), self.groups))
        v = split(self.v(y), self.groups)
        k, v = (one.repeat_interleave(self.heads // self.groups, dim=1) for one in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(rows, length, width))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


def llama(tied: bool, width: int = 16, blocks: int = 6) -> nn.Sequential:
    embedding = nn.Embedding(VOCABULARY, width)
    head = nn.Linear(width, VOCABULARY, bias=False)
    if tied:
        head.weight = embedding.weight
    made = [LlamaBlock(width, 4, 2, 40) for _ in range(blocks)]
    return nn.Sequential(embedding, *made, nn.RMSNorm(width, eps=1e-5), head)


class Experts(nn.Module):
    """A block whose feed-forward part is a mixture of experts, top 2 of 4 (Fedus et al. 2021 for
    the loss that balances them); passes (value, balance loss so far) on."""

    def __init__(self, width: int, experts: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.experts, self.chosen = experts, chosen
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.feeds = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, balance = pair
        y = self.norm(x).flatten(0, 1)
        chances = self.router(y).softmax(-1)
        weights, places = chances.topk(self.chosen, dim=-1)
        out = torch.zeros_like(y)
        for number, feed in enumerate(self.feeds):
            rows, column = (places == number).nonzero(as_tuple=True)
            # An expert that nobody chose still runs, on no rows: its gradient is 0, not None.
            out = out.index_add(0, rows, feed(y[rows]) * weights[rows, column, None])
        share = F.one_hot(places, self.experts).to(y.dtype).mean((0, 1))
        balance = balance + self.experts * (share * chances.mean(0)).sum()
        return x + out.view_as(x), balance


class OnFirst(nn.Module):
    """A layer for the first of a pair."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.layer(pair[0]), pair[1]


class WithBalance(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layer(ids)
        return x, x.new_zeros(())


def mixture(width: int = 16, blocks: int = 3) -> nn.Sequential:
    layers: list[nn.Module] = [WithBalance(GPTEmbedding(width, 0.0))]
    for _ in range(blocks):
        layers += [OnFirst(GPTBlock(width, 4, 0.0)), Experts(width)]
    head = nn.Linear(width, VOCABULARY, bias=False)
    return nn.Sequential(*layers, OnFirst(nn.Sequential(nn.LayerNorm(width), head)))


def balanced(output: tuple[Tensor, Tensor], target: Tensor) -> dict[str, Tensor]:
    logits, balance = output
    token = next_token(logits, target)
    return {"loss": token + 0.01 * balance, "tokens": token.detach(), "balance": balance.detach()}


# -- images ----------------------------------------------------------------------------------------


def images(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 3, 16, 16, generator=generator)
    return x, torch.randint(10, (rows,), generator=generator)


class Residual(nn.Module):
    """ResNet's basic block (He et al. 2015)."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(inplace=True),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.short: nn.Module = nn.Identity()
        if stride != 1 or inner != outer:
            self.short = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.short(x))  # type: ignore[no-any-return]


def resnet(width: int = 4) -> nn.Sequential:
    """ResNet-18's blocks behind the stem for small images."""
    stem = nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
    )
    blocks: list[nn.Module] = []
    inner = width
    for level in range(4):
        outer = width * 2**level
        blocks += [Residual(inner, outer, 1 + (level > 0)), Residual(outer, outer, 1)]
        inner = outer
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(stem, *blocks, pool, nn.Linear(inner, 10))


def convolutions(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, 1, 1), nn.GroupNorm(2, outer), nn.ReLU(inplace=True)
    )


class Down(nn.Module):
    """Stashes what it has before it halves the image."""

    def __init__(self, name: str, inner: int, outer: int) -> None:
        super().__init__()
        self.name = name
        self.body = convolutions(inner, outer)
        pipelane.skippable(stash=[name])(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        pipelane.stash(self.name, y)
        return F.max_pool2d(y, 2)


class Up(nn.Module):
    """Doubles the image and takes what was stashed at that size."""

    def __init__(self, name: str, inner: int, outer: int) -> None:
        super().__init__()
        self.name = name
        self.grow = nn.ConvTranspose2d(inner, outer, 2, 2)
        self.body = convolutions(2 * outer, outer)
        pipelane.skippable(pop=[name])(self)

    def forward(self, x: Tensor) -> Tensor:
        kept = pipelane.pop(self.name)
        return self.body(torch.cat([kept, self.grow(x)], dim=1))  # type: ignore[no-any-return]


def unet(width: int = 4, levels: int = 4) -> nn.Sequential:
    """U-Net (Ronneberger et al. 2015): a skip from every level down to the same level up."""
    sizes = [width * 2**level for level in range(levels + 1)]
    downs = [Down(f"level {n}", sizes[n - 1] if n else 3, sizes[n]) for n in range(levels)]
    middle = convolutions(sizes[-2], sizes[-1])
    ups = [Up(f"level {n}", sizes[n + 1], sizes[n]) for n in reversed(range(levels))]
    return nn.Sequential(*downs, middle, *ups, nn.Conv2d(width, 3, 1))


def pictures(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 3, 16, 16, generator=generator)
    return x, torch.randint(3, (rows, 16, 16), generator=generator)


LANGUAGE = {"loss_weight": counted}

ZOO = {
    model.name: model
    for model in [
        Model("gpt2", "GPT-2, head of its own", lambda: gpt2(False), tokens, next_token, LANGUAGE),
        Model("gpt2-tied", "GPT-2, embedding and head tied", lambda: gpt2(True), tokens, next_token,
              LANGUAGE, exact=False),
        Model("llama", "Llama, head of its own", lambda: llama(False), tokens, next_token,
              LANGUAGE),
        Model("llama-tied", "Llama, embedding and head tied", lambda: llama(True), tokens,
              next_token, LANGUAGE, exact=False),
        Model("dropout", "GPT-2, dropout 0.1 everywhere", lambda: gpt2(False, 0.1), tokens,
              next_token, LANGUAGE),
        Model("experts", "mixture of experts, auxiliary loss", mixture, tokens, balanced,
              LANGUAGE),
        Model("resnet", "ResNet-18 with BatchNorm", resnet, images, F.cross_entropy),
        Model("unet", "U-Net with long skips", unet, pictures, F.cross_entropy),
    ]
}  # fmt: skip
