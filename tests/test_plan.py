"""Plans: costs per stage, memory per rank, and the step that follows from them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipelane
from pipelane.actions import parse_action
from pipelane.costs import Link
from pipelane.errors import PartitionError, ProfileError, ScheduleError
from pipelane.plan import stage_costs
from pipelane.profile import LayerProfile, Profile
from pipelane.schedule import Schedule, Shape

MODEL = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
X = torch.randn(2, 8)


def profile_of(*seconds: float) -> Profile:
    """Layers "0", "1", ...; a third of the seconds forward; layer i keeps 50 * (i + 1) bytes."""
    layers = tuple(
        LayerProfile(f"{i}", "Layer", s / 3, 2 * s / 3, 100, 50 * (i + 1), 1000, (2, 8), "float32")
        for i, s in enumerate(seconds)
    )
    return Profile(layers, 64, "cpu", batch=2, repeats=1)


EVEN = profile_of(3, 3, 3, 3, 3, 3)


def test_stage_costs_add_up_layers() -> None:
    costs = stage_costs(profile_of(3, 6, 9), [2, 1], Link(0.5, 1e3))
    assert costs.forward == (3, 3)
    assert costs.input_grad == costs.weight_grad == (3, 3)
    assert costs.boundary_bytes == (1000,)
    assert costs.activation_bytes == (150, 150)
    assert costs.link == Link(0.5, 1e3)
    with pytest.raises(PartitionError, match="sums to 2"):
        stage_costs(EVEN, [1, 1])


def test_the_predicted_step() -> None:
    made = pipelane.plan(MODEL, X, 3, microbatches=4, profile=EVEN)
    assert made.profile is EVEN
    assert made.partition.sizes == (2, 2, 2)
    assert made.schedule.name == "1f1b"
    assert not made.timeline.measured
    assert made.timeline.makespan == pytest.approx((4 + 3 - 1) * 6)


def test_the_link_is_paid_in_the_partition_and_in_the_step() -> None:
    free = pipelane.plan(MODEL, X, 3, microbatches=4, profile=EVEN)
    priced = pipelane.plan(MODEL, X, 3, microbatches=4, profile=EVEN, link=Link(0.25))
    assert priced.partition.bottleneck == pytest.approx(free.partition.bottleneck + 4 * 0.25)
    assert priced.timeline.makespan > free.timeline.makespan


@pytest.mark.parametrize(
    ("schedule", "alive"), [("1f1b", (3, 2, 1)), ("gpipe", (4, 4, 4)), ("naive", (1, 1, 1))]
)
def test_memory_follows_the_schedule(schedule: str, alive: tuple[int, ...]) -> None:
    made = pipelane.plan(MODEL, X, 3, microbatches=4, schedule=schedule, profile=EVEN)
    kept = (150, 350, 550)
    assert made.memory_bytes == tuple(4 * 200 + n * k for n, k in zip(alive, kept, strict=True))


def test_a_rank_with_several_chunks_holds_them_all() -> None:
    order = [parse_action(a) for a in ("0F0", "0F1", "1F0", "1B0", "0B0", "1F1", "1B1", "0B1")]
    one_rank = Schedule.looped("by hand", Shape(1, 2, 2), [order])
    made = pipelane.plan(MODEL, X, 1, microbatches=2, chunks=2, schedule=one_rank, profile=EVEN)
    # At 1F0: stage 0 twice (50 + 100 + 150 bytes), stage 1 once (200 + 250 + 300).
    assert made.memory_bytes == (4 * 600 + 2 * 300 + 750,)
    with pytest.raises(ScheduleError, match="1 ranks, 2 micro-batches and 2 chunks"):
        pipelane.plan(MODEL, X, 1, microbatches=3, schedule=one_rank, profile=EVEN)


def test_too_little_memory_moves_layers_or_says_what_is_missing() -> None:
    uneven = profile_of(1, 1, 1, 1, 4, 4)
    fast = pipelane.plan(MODEL, X, 3, microbatches=4, profile=uneven)
    assert fast.partition.sizes == (4, 1, 1)
    assert fast.memory_bytes[0] == 4 * 400 + 3 * 500
    tight = pipelane.plan(MODEL, X, 3, microbatches=4, profile=uneven, memory=1500)
    assert max(tight.memory_bytes) <= 1500
    assert tight.partition.sizes == (2, 2, 2)
    assert tight.partition.bottleneck > fast.partition.bottleneck
    with pytest.raises(PartitionError, match=r"stage \d \('\d' to '\d'\) needs \d+ bytes .* more"):
        pipelane.plan(MODEL, X, 3, microbatches=4, profile=EVEN, memory=1000)
    with pytest.raises(PartitionError, match=r"layer '5' needs 700 bytes"):
        pipelane.plan(MODEL, X, 3, microbatches=4, profile=EVEN, memory=600)


def test_measures_when_no_profile_is_given() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), *MODEL, nn.Linear(8, 9))
    made = pipelane.plan(
        model, torch.randint(0, 9, (4, 5)), 2, microbatches=2, schedule="gpipe", device="cpu"
    )
    assert [layer.name for layer in made.profile.layers] == [
        name for name, _ in model.named_children()
    ]
    assert made.schedule.name == "gpipe"
    assert sum(made.costs.forward) == pytest.approx(
        sum(layer.forward_seconds for layer in made.profile.layers)
    )
    assert made.timeline.makespan > 0
    assert all(p.grad is None for p in model.parameters())


def test_what_cannot_be_planned() -> None:
    with pytest.raises(PartitionError, match="7 stages for 6 layers"):
        pipelane.plan(MODEL, X, 7, microbatches=4, profile=EVEN)
    with pytest.raises(PartitionError, match=r"the profile has 3 layers .* the model 6"):
        pipelane.plan(MODEL, X, 2, microbatches=4, profile=profile_of(1, 1, 1))
    with pytest.raises(ScheduleError, match="unknown schedule"):
        pipelane.plan(MODEL, X, 2, microbatches=4, schedule="nope", profile=EVEN)
    with pytest.raises(ProfileError, match="layer '0'"):
        pipelane.plan(MODEL, torch.randn(2, 3), 2, microbatches=4)


def test_auto_is_made_for_the_balanced_stages_and_the_memory_that_is_left() -> None:
    uneven = profile_of(1, 5, 2, 2, 7, 1)
    made = pipelane.plan(MODEL, X, 3, microbatches=6, schedule="auto", profile=uneven)
    plain = pipelane.plan(MODEL, X, 3, microbatches=6, schedule="1f1b", profile=uneven)
    assert made.schedule.name == "auto"
    assert made.schedule.splits_backward
    assert made.timeline.makespan < plain.timeline.makespan
    tight = pipelane.plan(MODEL, X, 3, microbatches=6, schedule="auto", profile=EVEN, memory=1700)
    assert max(tight.memory_bytes) <= 1700
