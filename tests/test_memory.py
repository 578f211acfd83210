"""Peak memory of a step, counted storage by storage, against what the plan says."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipelane
from pipelane.profile.meters import LiveBytes
from pipelane.runtime.transport import LOOKAHEAD, SENDS_AHEAD

M, ROWS, WIDTH = 8, 8192, 32
MESSAGE = ROWS * WIDTH * 4  # so large that look-ahead is by number, not by bytes
WAYS = [(s, r) for s in ("1f1b", "gpipe") for r in ("none", "full", "layer")]


def peaks() -> dict[tuple[str, str], tuple[int, int]]:
    """Planned and counted bytes of activations and gradients on this rank."""
    found = {}
    x, y = torch.randn(M * ROWS, WIDTH), torch.randn(M * ROWS, WIDTH)
    for schedule, recompute in WAYS:
        model = nn.Sequential(
            *[layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        )
        pipe = pipelane.Pipeline(
            model,
            schedule=schedule,
            microbatches=M,
            loss_fn=mse_loss,
            example=x[:ROWS],
            recompute=recompute,
        )
        own = list(pipe.parameters())
        pipe.step(x, y)
        pipe.zero_grad()
        with LiveBytes([x, y, *own]) as live:
            pipe.step(x, y)
        # The plan also has parameters and two states of the optimizer, which are not made here.
        static = 3 * sum(parameter.nbytes for parameter in own)
        assert pipe.plan is not None
        found[schedule, recompute] = (pipe.plan.memory_bytes[pipe.rank] - static, live.peak)
        pipe.close()
    return found


@pytest.mark.timeout(120)
def test_peak_memory_is_as_planned() -> None:
    # Beyond the plan: messages under way, one in hand at each side, and the loss at work.
    under_way = (LOOKAHEAD + 1 + SENDS_AHEAD + 1 + 2) * MESSAGE
    found = pipelane.launch(peaks, 2)
    for rank, ours in enumerate(found):
        for way, (planned, counted) in ours.items():
            # The plan knows no loss function: this one keeps the output until the backward.
            kept = (M if way == ("gpipe", "none") else 1) * MESSAGE if rank == 1 else 0
            assert 0.75 * planned < counted < planned + under_way + kept, (way, planned, counted)
        assert ours["gpipe", "full"][1] < 0.4 * ours["gpipe", "none"][1]
    assert found[0]["1f1b", "none"][1] < 0.5 * found[0]["gpipe", "none"][1]
