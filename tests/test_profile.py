"""Profiles: what is measured, and that nothing is changed by measuring."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn

import pipelane
from pipelane.errors import ConfigError, ModelError, ProfileError
from pipelane.profile import Profile


class Slow(nn.Module):
    """Sleeps 4 ms forward and 8 ms backward."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.004)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            time.sleep(0.008)
            return grads[0]

    def forward(self, x: torch.Tensor) -> Any:
        return self.Function.apply(x)


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x, x


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(7, 8), nn.Flatten(), nn.BatchNorm1d(24), nn.Dropout(0.5), nn.Linear(24, 8),
        nn.ReLU(inplace=True), nn.Linear(8, 4),
    )  # fmt: skip


def test_seconds_and_bytes() -> None:
    found = pipelane.profile(nn.Sequential(Slow(), nn.Linear(8, 4)), torch.randn(6, 8), repeats=3)
    slow, linear = found.layers
    assert 0.004 <= slow.forward_seconds < 0.02
    assert 0.008 <= slow.backward_seconds < 0.03
    assert linear.forward_seconds < 0.004
    assert linear.parameter_bytes == (8 * 4 + 4) * 4
    assert linear.activation_bytes == 6 * 8 * 4  # its input; its weight is not counted
    assert linear.output_bytes == 6 * 4 * 4
    assert linear.output_shape == (6, 4)
    assert linear.output_dtype == "float32"
    assert (found.rows, found.input_bytes, found.repeats) == (6, 192, 3)


def test_activations_are_counted_once_per_storage() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * x) * x.view(-1).view_as(x)

    (twice,) = pipelane.profile(nn.Sequential(Twice()), torch.randn(5, 4)).layers
    assert twice.activation_bytes == 2 * 5 * 4 * 4  # x once, x * x once


def test_integer_input_and_layers_without_parameters() -> None:
    found = pipelane.profile(model(), torch.randint(0, 7, (4, 3)))
    assert [layer.kind for layer in found.layers][:3] == ["Embedding", "Flatten", "BatchNorm1d"]
    assert found.layers[1].parameter_bytes == 0
    assert all(layer.backward_seconds > 0 for layer in found.layers)


def test_a_frozen_first_layer_has_no_backward() -> None:
    made = nn.Sequential(nn.Embedding(7, 8).requires_grad_(False), nn.Linear(8, 2))
    frozen, linear = pipelane.profile(made, torch.randint(0, 7, (4,))).layers
    assert frozen.backward_seconds == 0
    assert linear.backward_seconds > 0


def test_nothing_is_changed() -> None:
    made = model()
    made[6].bias.grad = torch.ones(4)
    before = copy.deepcopy(made)
    x = torch.randint(0, 7, (4, 3))
    stream = torch.get_rng_state()
    pipelane.profile(made, x)
    assert torch.equal(stream, torch.get_rng_state())
    for (name, one), (_, other) in zip(
        made.state_dict().items(), before.state_dict().items(), strict=True
    ):
        assert torch.equal(one, other), name
    gradients = {name: p.grad for name, p in made.named_parameters()}
    assert torch.equal(gradients.pop("6.bias"), torch.ones(4))
    assert all(g is None for g in gradients.values())
    assert made.training


def test_progress_and_json() -> None:
    calls: list[tuple[int, int, str]] = []
    found = pipelane.profile(
        nn.Sequential(nn.ReLU(), nn.ReLU()), torch.randn(2, 2),
        progress=lambda *arguments: calls.append(arguments),
    )  # fmt: skip
    assert calls == [(0, 2, "0"), (1, 2, "1")]
    assert Profile.from_json(found.to_json()) == found
    for text in ("{}", "x", "[]"):
        with pytest.raises(ConfigError):
            Profile.from_json(text)


@pytest.mark.parametrize(
    ("layers", "example", "words"),
    [
        ([nn.Linear(3, 4)], torch.randn(2, 5), ["'0'", "Linear", "[2, 5]"]),
        ([nn.ReLU(), Pair()], torch.randn(2, 5), ["'1'", "Pair", "tuple"]),
        ([nn.ReLU()], torch.randn(0, 5), ["[0, 5]"]),
        ([nn.ReLU()], torch.tensor(1.0), ["[]"]),
        ([nn.ReLU()], [1.0], ["list"]),
    ],
)
def test_bad_examples_and_layers(layers: list[nn.Module], example: Any, words: list[str]) -> None:
    with pytest.raises(ProfileError) as caught:
        pipelane.profile(nn.Sequential(*layers), example)
    for word in words:
        assert word in str(caught.value)


class OwnForward(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x


@pytest.mark.parametrize("bad", [nn.Linear(2, 2), nn.Sequential(), OwnForward(nn.ReLU())])
def test_models_that_are_no_chain(bad: nn.Module) -> None:
    with pytest.raises(ModelError):
        pipelane.profile(bad, torch.randn(2, 2))
