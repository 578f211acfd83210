"""Train a small character-level transformer on text that ships with Python (its own manual).

python examples/characters.py
torchrun --nproc-per-node 3 examples/characters.py
"""

import argparse
import pydoc_data.topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pipelane

CONTEXT = 64


class Tokens(nn.Module):
    """Characters and their places to vectors: (rows, length) int64 -> (rows, length, width)."""

    def __init__(self, characters: int, width: int) -> None:
        super().__init__()
        self.what = nn.Embedding(characters, width)
        self.where = nn.Embedding(CONTEXT, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.what(x) + self.where(torch.arange(x.shape[1], device=x.device))


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, with residual connections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.project(self.before_attention(x)).chunk(3, dim=-1)
        q, k, v = (p.view(rows, length, self.heads, -1).transpose(1, 2) for p in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.feed(x)


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten())


def main(steps: int = 200, width: int = 64, blocks: int = 4) -> None:
    text = "\n".join(pydoc_data.topics.topics.values())
    letters = sorted(set(text))
    index = {letter: number for number, letter in enumerate(letters)}
    data = torch.tensor([index[letter] for letter in text])

    torch.manual_seed(0)
    model = nn.Sequential(
        Tokens(len(letters), width),
        *[Block(width, heads=4) for _ in range(blocks)],
        nn.LayerNorm(width),
        nn.Linear(width, len(letters)),
    )
    draw = torch.Generator().manual_seed(0)

    def batch(rows: int) -> torch.Tensor:
        starts = torch.randint(0, len(data) - CONTEXT - 1, (rows,), generator=draw)
        return torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()])

    example = batch(4)[:, :-1]
    pipe = pipelane.Pipeline(
        model, example=example, schedule="1f1b", microbatches=4, loss_fn=loss_fn
    )
    if pipe.rank == 0:
        print(f"{len(data)} characters, layers per stage: {list(pipe.partition.sizes)}")
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        tokens = batch(16)
        loss = pipe.step(tokens[:, :-1], tokens[:, 1:])
        optimizer.step()
        optimizer.zero_grad()
        if pipe.rank == 0 and (step == 1 or step % 25 == 0):
            print(f"step {step:4}  loss {loss.item():.3f}")

    timeline = pipe.timeline()
    if pipe.rank == 0:
        print(timeline)
    pipe.eval()
    written = [index[letter] for letter in "The "]
    for _ in range(60):
        logits = pipe(torch.tensor([written[-CONTEXT:]]), gather=True)[0, -1]
        written.append(int(torch.multinomial(logits.softmax(-1), 1, generator=draw)))
    if pipe.rank == 0:
        print("A sample:", repr("".join(letters[number] for number in written)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--ranks", type=int, default=2, help="local ranks; torchrun decides its own"
    )
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    pipelane.launch(main, options.ranks, options.steps)
