"""Train a classifier of scanned digits over 4 local ranks, and see the bubbles.

    python examples/digits.py
    torchrun --nproc-per-node 4 examples/digits.py

Needs scikit-learn for its data: pip install 'torch-pipelane[demo]'
"""

import itertools

import torch
from sklearn.datasets import load_digits

import pipelane


def main() -> None:
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    mixed = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[mixed], y[mixed]
    held_x, held_y, x, y = x[:360], y[:360], x[360:], y[360:]

    torch.manual_seed(0)
    widths = [64, 384, 384, 256, 256, 256, 128]
    layers: list[torch.nn.Module] = []
    for one, following in itertools.pairwise(widths):
        layers += [torch.nn.Linear(one, following), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(128, 10))

    pipe = pipelane.Pipeline(
        model,
        example=x[:16],
        schedule="1f1b",
        microbatches=8,
        loss_fn=torch.nn.functional.cross_entropy,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    for epoch in range(20):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(128):
            optimizer.zero_grad()
            loss = pipe.step(x[rows], y[rows])
            optimizer.step()
        if pipe.rank == 0:
            print(f"epoch {epoch + 1:2}  loss {loss.item():.4f}")

    timeline = pipe.timeline()  # every rank calls it
    pipe.eval()
    right = (pipe(held_x, gather=True).argmax(1) == held_y).float().mean().item()
    if pipe.rank == 0:
        print(timeline)
        print(f"{right:.1%} of {len(held_y)} held-out digits are right")


if __name__ == "__main__":
    pipelane.launch(main, ranks=4)
