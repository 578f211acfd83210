"""Real architectures, trained in a pipeline as in one process."""

from __future__ import annotations

import copy

import pytest
import torch

import pipelane
from benchmarks.correctness import SCHEDULES, VARIANTS, every, train, worst
from benchmarks.zoo import ZOO

TIED = {name for name in VARIANTS if not ZOO[VARIANTS[name][0]].exact}


@pytest.mark.parametrize("name", ZOO)
def test_models_are_chains_that_learn(name: str) -> None:
    """A zoo whose models do not train would prove nothing."""
    model = ZOO[name]
    torch.manual_seed(0)
    chain = model.build()
    assert len(chain) >= 8
    x, y = model.batch(8, torch.Generator().manual_seed(1))
    optimizer = torch.optim.Adam(chain.parameters(), lr=1e-2)
    losses = []
    for step in range(12):
        optimizer.zero_grad()
        loss = pipelane.reference(
            chain, x, y, loss_fn=model.loss_fn, microbatches=2, step=step, **model.options
        )
        losses.append(float(loss))
        assert all(p.grad is not None for p in chain.parameters())
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.timeout(240)
def test_every_model_and_schedule_equals_one_process() -> None:
    found = pipelane.launch(every, 2, list(VARIANTS), 2)
    for variant, schedule in found[0]:
        apart = worst([one[variant, schedule] for one in found])
        if variant in TIED:
            # Sums of few terms in another order: some units in the last place.
            assert apart.largest < 1e-6, (variant, schedule)
        else:
            assert apart.largest == 0, (variant, schedule)
    assert len(found[0]) == len(VARIANTS) * len(SCHEDULES)


@pytest.mark.timeout(120)
def test_longest_skips_and_tied_weights_over_four_ranks() -> None:
    found = pipelane.launch(train, 4, "unet", [("zbv", 2)], 2)
    unet = worst([one["zbv"] for one in found])
    assert unet.largest == 0
    found = pipelane.launch(train, 4, "llama-tied", [("interleaved", 2)], 2)
    tied = worst([one["interleaved"] for one in found])
    assert tied.largest < 1e-6


def other_draws() -> float:
    """The loss of the dropout model with a seed of its own, less that of the reference."""
    model = ZOO["dropout"]
    torch.manual_seed(0)
    chain = model.build()
    alone = copy.deepcopy(chain)
    x, y = model.batch(8, torch.Generator().manual_seed(1))
    pipe = pipelane.Pipeline(
        chain, microbatches=2, partition=[5, 4], loss_fn=model.loss_fn, seed=8, **model.options
    )
    loss = pipe.step(x, target=y)
    wanted = pipelane.reference(
        alone, x, y, loss_fn=model.loss_fn, microbatches=2, seed=7, **model.options
    )
    return float(loss - wanted)


def test_the_comparison_would_see_other_random_draws() -> None:
    assert pipelane.launch(other_draws, 2)[0] != 0
