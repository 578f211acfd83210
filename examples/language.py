"""A small language model: tied embedding and head, padding, recomputation, bf16, clipping.

    pipelane run -n 4 examples/language.py
    torchrun --nproc-per-node 4 examples/language.py

Run as plain `python examples/language.py` it starts 4 local processes itself. It learns to add:
"7+15=22", one character per token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pipelane

ALPHABET = "0123456789+= "
PADDING = -100
LENGTH = 9


def sums(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Characters, and the following ones; only those of the result count."""
    ids = torch.full((rows, LENGTH), ALPHABET.index(" "))
    target = torch.full((rows, LENGTH), PADDING)
    for row, (a, b) in enumerate(torch.randint(50, (rows, 2), generator=generator).tolist()):
        text = f"{a}+{b}={a + b} "
        codes = torch.tensor([ALPHABET.index(letter) for letter in text])
        ids[row, : len(codes) - 1] = codes[:-1]
        begin = text.index("=")
        target[row, begin : len(codes) - 1] = codes[begin + 1 :]
    return ids, target


class Embedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(len(ALPHABET), width)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        nn.init.normal_(self.token.weight, std=0.1)  # it is the head, too

    def forward(self, ids: Tensor) -> Tensor:
        return self.token(ids) + self.place  # type: ignore[no-any-return]


class Block(nn.Module):
    """Causal self-attention and a feed-forward part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.layer(x, src_mask=mask, is_causal=True)  # type: ignore[no-any-return]


def loss_fn(logits: Tensor, target: Tensor) -> dict[str, Tensor]:
    loss = cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PADDING)
    counted = target != PADDING
    right = (logits.argmax(-1) == target)[counted].float().mean()
    return {"loss": loss, "accuracy": right}


def main() -> None:
    torch.manual_seed(0)
    width = 64
    embedding = Embedding(width)
    head = nn.Linear(width, len(ALPHABET), bias=False)
    head.weight = embedding.token.weight  # tied: found by pipelane, also across stages
    blocks = [Block(width) for _ in range(4)]
    model = nn.Sequential(embedding, *blocks, nn.LayerNorm(width), head)

    generator = torch.Generator().manual_seed(1)
    pipe = pipelane.Pipeline(
        model,
        example=sums(16, generator)[0],
        schedule="1f1b",
        microbatches=8,
        loss_fn=loss_fn,
        loss_weight=lambda target: (target != PADDING).sum(),  # mean over what counts
        recompute="layer",
        autocast=torch.bfloat16,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    for step in range(200):
        x, y = sums(128, generator)
        loss = pipe.step(x, target=y)
        norm = pipe.clip_grad_norm_(1.0)  # of the whole model, the tied weight once
        optimizer.step()
        scheduler.step()
        pipe.zero_grad()
        if pipe.rank == 0 and (step + 1) % 40 == 0:
            print(
                f"step {step + 1}: loss {float(loss):.3f}, gradient norm {float(norm):.2f}, "
                f"{100 * float(pipe.metrics['accuracy']):.0f}% of the digits right"
            )
    pipe.close()


if __name__ == "__main__":
    pipelane.launch(main, ranks=4)
