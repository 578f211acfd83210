"""Profiles: what is measured, and that nothing is changed by measuring."""

from __future__ import annotations

import copy
import time
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import pipelane
from pipelane.errors import ConfigError, ModelError, ProfileError
from pipelane.layers import layers_of
from pipelane.plan import stage_costs
from pipelane.profile import LayerProfile, Profile, SharedParameter
from pipelane.profile.measure import _unchanged
from pipelane.profile.optimizers import state_bytes


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
    found = pipelane.profile(
        nn.Sequential(Slow(), nn.Linear(8, 4)), torch.randn(6, 8, requires_grad=True), repeats=3
    )
    slow, linear = found.layers
    assert 0.004 <= slow.forward_seconds < 0.02
    assert 0.008 <= slow.backward_seconds < 0.03
    assert linear.forward_seconds < 0.004
    assert linear.parameter_bytes == (8 * 4 + 4) * 4
    assert linear.activation_bytes == 6 * 8 * 4  # its input; its weight is not counted
    assert linear.output_bytes == 6 * 4 * 4
    assert linear.output_shape == (6, 4)
    assert linear.output_dtype == "float32"
    assert (found.batch, found.input_bytes, found.repeats) == (6, 192, 3)


def test_activations_are_counted_once_per_storage() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * x) * x.view(-1).view_as(x)

    (twice,) = pipelane.profile(
        nn.Sequential(Twice()), torch.randn(5, 4, requires_grad=True)
    ).layers
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


class Restless(nn.Module):
    """Assigns its buffer anew and draws in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return x + torch.rand(())


def test_assigned_buffers_and_modes_are_put_back() -> None:
    made = nn.Sequential(nn.BatchNorm1d(4).eval(), Restless(), nn.Linear(4, 4))
    seen, weight = made[1].seen, made[2].weight
    gradient = weight.grad = torch.ones(4, 4)
    pipelane.profile(made, torch.randn(3, 4))
    assert made[1].seen is seen
    assert seen == 0
    assert made[2].weight is weight
    assert weight.grad is gradient
    assert torch.equal(gradient, torch.ones(4, 4))
    assert (made.training, made[0].training, made[2].training) == (True, False, True)
    assert made[0].num_batches_tracked == 0


def test_a_failing_layer_leaves_the_model_as_it_was() -> None:
    made = nn.Sequential(nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(5, 4)))
    made[1][1].bias.grad = torch.ones(4)
    before = copy.deepcopy(made.state_dict())
    x = torch.randn(3, 4)
    stream = torch.get_rng_state()
    with pytest.raises(ProfileError, match="layer '1'") as caught:
        pipelane.profile(made, x)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert all(torch.equal(value, before[key]) for key, value in made.state_dict().items())
    assert torch.equal(made[1][1].bias.grad, torch.ones(4))
    assert torch.equal(stream, torch.get_rng_state())


def test_the_copy_of_the_input_is_not_timed_and_the_example_not_overwritten() -> None:
    x = torch.randn(4000, 1000)
    before = x.clone()
    found = pipelane.profile(nn.Sequential(nn.Identity(), nn.ReLU(inplace=True)), x, repeats=3)
    assert found.layers[0].forward_seconds < 1e-3  # a copy takes several milliseconds
    assert torch.equal(x, before)


def test_medians_of_runs_after_the_warm_up() -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Counting.calls += 1
            # Four counts of bytes and operations, two runs to warm up and an outlier; each run is
            # one forward for the whole backward and one for its halves.
            if Counting.calls <= 4 + 2 * 3:
                time.sleep(0.05)
            return x * 1

    found = pipelane.profile(
        nn.Sequential(Counting()), torch.randn(2, requires_grad=True), repeats=3, warmup=2
    )
    assert Counting.calls == 4 + 2 * (2 + 3)
    assert found.layers[0].forward_seconds < 0.02
    assert found.layers[0].backward_seconds > 0


def test_the_callers_own_modes_do_not_matter() -> None:
    made = nn.Sequential(nn.Linear(4, 4))
    with torch.no_grad():
        assert pipelane.profile(made, torch.randn(2, 4)).layers[0].backward_seconds > 0
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        x = torch.randn(2, 4)
        assert pipelane.profile(made, x).layers[0].activation_bytes == 2 * 4 * 4


def test_a_layer_that_is_used_twice_is_measured_twice() -> None:
    shared = nn.Linear(4, 4)
    found = pipelane.profile(nn.Sequential(shared, nn.Tanh(), shared), torch.randn(2, 4))
    assert [layer.name for layer in found.layers] == ["0", "1", "2"]
    assert found.layers[0].parameter_bytes == found.layers[2].parameter_bytes == 80


def test_names_are_those_of_the_model() -> None:
    made = nn.Sequential(OrderedDict(inner=nn.Linear(4, 3), head=nn.Linear(3, 2).double()))
    made[0].register_forward_hook(lambda module, given, output: output.double())
    found = pipelane.profile(made, torch.randn(2, 4))
    assert [layer.name for layer in found.layers] == ["inner", "head"]
    assert found.layers[1].output_dtype == "float64"
    assert found.layers[1].output_bytes == 2 * 2 * 8


def test_sizes_and_counts_of_runs_are_checked() -> None:
    made, x = nn.Sequential(nn.LazyLinear(2)), torch.randn(2, 4)
    with pytest.raises(ProfileError, match=r"layer '0' .*no sizes yet"):
        pipelane.profile(made, x)
    for wrong in ({"repeats": 0}, {"warmup": -1}):
        with pytest.raises(ProfileError, match="repeats must be"):
            pipelane.profile(nn.Sequential(nn.ReLU()), x, **wrong)


def test_a_progress_bar_on_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich, then, standard error is a terminal
    monkeypatch.setenv("TERM", "xterm")
    made = nn.Sequential(OrderedDict({"[/odd]": nn.ReLU()}))
    pipelane.profile(made, torch.randn(2), progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "[/odd]" in captured.err


def test_json_from_elsewhere_is_refused() -> None:
    found = pipelane.profile(nn.Sequential(nn.ReLU()), torch.randn(2, 2))
    text = found.to_json()
    with pytest.raises(ConfigError, match="schema 99"):
        Profile.from_json(text.replace('"schema": 2', '"schema": 99'))
    with pytest.raises(ConfigError, match=r"kind 'pipelane\.timeline'"):
        Profile.from_json(text.replace("pipelane.profile", "pipelane.timeline"))
    negative = text.replace('"output_bytes": 16', '"output_bytes": -16')
    with pytest.raises(ConfigError, match=r"layer 0 .*output_bytes"):
        Profile.from_json(negative)


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
        ([Pair(), nn.ReLU()], torch.randn(2, 5), ["'1'", "ReLU", "tuple"]),
        ([nn.ReLU()], torch.randn(0, 5), ["[0, 5]"]),
        ([nn.ReLU()], torch.tensor(1.0), ["without dimensions"]),
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


def overridden() -> nn.Sequential:
    made = nn.Sequential(nn.ReLU())
    made.forward = lambda x: x  # type: ignore[assignment, method-assign]
    return made


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (nn.Linear(2, 2), "Linear, not an nn.Sequential; .* will come"),
        (nn.Sequential(), "no layers"),
        (OwnForward(nn.ReLU()), "OwnForward is an nn.Sequential with its own forward"),
        (overridden(), "its own forward"),
        (torch.nn.functional.relu, "not an nn.Sequential"),
    ],
)
def test_models_that_are_no_chain(bad: nn.Module, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        pipelane.profile(bad, torch.randn(2, 2))


def test_layers_come_back_from_another_device() -> None:
    """The meta device stands for a GPU: what is moved there has lost its values."""
    made = model()[2:]
    made[2].bias.grad = torch.ones(8)
    before = copy.deepcopy(made.state_dict())
    tensors = [id(t) for t in (*made.parameters(), *made.buffers())]
    for layer in made:
        with _unchanged(layer, torch.device("meta")):
            assert all(t.is_meta for t in (*layer.parameters(), *layer.buffers()))
    assert [id(t) for t in (*made.parameters(), *made.buffers())] == tensors
    assert torch.equal(made[2].bias.grad, torch.ones(8))
    for name, value in made.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_the_batch_itself_needs_no_gradient_unless_it_says_so() -> None:
    """As in a pipeline: the first layer's backward makes no gradient of its input."""

    class Seen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            needed.append(x.requires_grad)
            return x * 2

    for wanted in (False, True):
        needed: list[bool] = []
        pipelane.profile(
            nn.Sequential(Seen(), nn.Linear(3, 3)), torch.randn(2, 3, requires_grad=wanted)
        )
        assert set(needed) == {wanted}


# -- halves of the backward, bytes, shared parameters ----------------------------------------------


def profile_of(*layers: nn.Module, x: torch.Tensor, **options: Any) -> tuple[LayerProfile, ...]:
    return pipelane.profile(nn.Sequential(*layers), x, repeats=1, warmup=0, **options).layers


def test_halves_of_the_backward() -> None:
    """The halves of a layer that sleeps in each of them."""

    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
            ctx.seconds = seconds
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            time.sleep(ctx.seconds)
            return grads[0], None

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Half.apply(x, 0.004) + Half.apply(self.weight, 0.012)

    layers = profile_of(Layer(), Layer(), x=torch.randn(2, 4))
    first, second = layers
    assert first.input_grad_seconds == 0.0  # the batch needs no gradient
    assert first.weight_grad_seconds >= 0.012
    assert 0.004 <= second.input_grad_seconds < second.weight_grad_seconds
    assert second.weight_grad_seconds >= 0.012
    assert second.backward_seconds >= 0.016


def test_what_has_no_weight_gradient() -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    relu, linear = profile_of(nn.ReLU(), frozen, x=torch.randn(2, 4, requires_grad=True))
    for layer in (relu, linear):
        assert layer.weight_grad_seconds == 0.0
        assert layer.input_grad_seconds > 0
        assert layer.gradient_bytes == layer.optimizer_bytes == 0
    assert linear.parameter_bytes == linear.static_bytes == 80
    assert relu.static_bytes == 0


def test_bytes_from_input_gradient_to_weight_gradient() -> None:
    """A linear layer keeps its input and the gradient that arrived; a GELU keeps nothing."""
    x = torch.randn(8, 16)
    relu, linear, gelu = profile_of(nn.ReLU(), nn.Linear(16, 4), nn.GELU(), x=x)
    assert linear.activation_bytes == x.nbytes
    assert linear.weight_grad_bytes == x.nbytes + 8 * 4 * 4
    assert gelu.weight_grad_bytes == 0
    assert relu.weight_grad_bytes == 0


def test_temporary_bytes_and_operations() -> None:
    class Wasteful(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                torch.cat([x] * 10)  # gone at the end
            return x @ x.T

    (layer,) = profile_of(Wasteful(), x=torch.randn(8, 8))
    assert 10 * 256 <= layer.temporary_bytes < 13 * 256
    assert layer.flops == 2 * 8 * 8 * 8
    (linear,) = profile_of(nn.Linear(16, 4), x=torch.randn(8, 16))
    assert linear.flops == 2 * 8 * 16 * 4


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [("adam", 2), ("AdamW", 2), ("momentum", 1), ("sgd", 0),
     (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1)],
)  # fmt: skip
def test_state_of_optimizers(optimizer: Any, copies: int) -> None:
    (layer,) = profile_of(nn.Linear(4, 4), x=torch.randn(2, 4), optimizer=optimizer)
    assert layer.optimizer_bytes == copies * 80
    assert layer.static_bytes == (2 + copies) * 80


def test_state_of_an_optimizer_is_that_of_a_real_one() -> None:
    linear = nn.Linear(4, 4)
    real = torch.optim.Adagrad(linear.parameters())
    linear(torch.randn(2, 4)).sum().backward()
    real.step()
    found = sum(t.nbytes for state in real.state.values() for t in state.values())
    assert state_bytes(list(linear.parameters()), torch.optim.Adagrad) == found
    with pytest.raises(ProfileError, match="unknown optimizer 'nope'"):
        pipelane.profile(nn.Sequential(linear), torch.randn(2, 4), optimizer="nope")

    def broken(parameters: Any) -> torch.optim.Optimizer:
        raise RuntimeError("no")

    with pytest.raises(ProfileError, match="the optimizer broken failed"):
        pipelane.profile(nn.Sequential(linear), torch.randn(2, 4), optimizer=broken)


def test_shared_parameters_are_found_by_identity() -> None:
    embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = embedding.weight
    twice = nn.Linear(4, 4)
    made = nn.Sequential(embedding, twice, nn.ReLU(), twice, head)
    found = pipelane.profile(made, torch.randint(0, 7, (3,)), repeats=1)
    assert found.shared == (
        SharedParameter("0.weight", (0, 4), 7 * 4 * 4, 4 * 7 * 4 * 4),
        SharedParameter("1.weight", (1, 3), 64, 256),
        SharedParameter("1.bias", (1, 3), 16, 64),
    )
    assert pipelane.profile(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)).shared == ()


def test_pieces_of_one_storage_are_not_shared() -> None:
    flat = torch.randn(32)
    one, other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    one.weight = nn.Parameter(flat[:16].view(4, 4))
    other.weight = nn.Parameter(flat[16:].view(4, 4))
    made = nn.Sequential(one, other)
    assert pipelane.profile(made, torch.randn(2, 4), repeats=1).shared == ()


def test_static_bytes_of_shared_parameters_are_there_once() -> None:
    """A frozen embedding, and a head with its weight and a trained bias, on one rank."""
    embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7)
    embedding.weight.requires_grad_(False)
    head.weight = embedding.weight
    made = nn.Sequential(embedding, head)
    x = torch.randint(0, 7, (3,))
    found = pipelane.profile(made, x, repeats=1)
    (shared,) = found.shared
    assert shared.static_bytes == shared.bytes == 112
    plan = pipelane.plan(made, x, 1, microbatches=1, profile=found)
    kept = sum(layer.activation_bytes for layer in found.layers)
    assert plan.memory_bytes == (112 + 4 * 28 + kept,)
    assert plan.partition.loads[0].static_bytes == 112 + 4 * 28


def test_the_whole_backward_is_what_a_whole_backward_costs() -> None:
    layer = LayerProfile("0", "L", 1.0, 3.0, 0, 0, 0, (1,), "float32", 2.5, 1.5)
    costs = stage_costs(Profile((layer,), 0, "cpu", 1, 1), [1])
    assert costs.backward(0) == 3.0
    assert (costs.input_grad, costs.weight_grad) == ((2.5,), (1.5,))


def test_what_was_measured_is_recorded() -> None:
    found = pipelane.profile(
        nn.Sequential(nn.Linear(4, 4).double()), torch.randn(3, 4).double(), repeats=4
    )
    assert (found.batch, found.dtype, found.repeats) == (3, "float64", 4)
    assert (found.method, found.optimizer, found.device) == ("measured", "adam", "cpu")
    assert found.layers[0].forward_spread >= 0


def test_files(tmp_path: Any) -> None:
    found = pipelane.profile(model(), torch.randint(0, 7, (4, 3)), repeats=1)
    found.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == found
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]
    with pytest.raises(ConfigError, match="cannot read the profile"):
        Profile.load(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="cannot write"):
        found.save(tmp_path / "no" / "folder")
    (tmp_path / "bad.json").write_text(found.to_json().replace('"forward_seconds": ', '"x": ', 1))
    with pytest.raises(ConfigError, match=r"bad\.json: layer 0: unknown 'x'"):
        Profile.load(tmp_path / "bad.json")


def test_files_of_the_first_version_are_read() -> None:
    text = (
        '{"schema": 1, "kind": "pipelane.profile", "layers": [{"name": "0", "kind": "Linear", '
        '"forward_seconds": 1.0, "backward_seconds": 3.0, "parameter_bytes": 10, '
        '"activation_bytes": 20, "output_bytes": 30, "output_shape": [2, 3], '
        '"output_dtype": "float32"}], "input_bytes": 5, "device": "cpu", "batch": 2, "repeats": 3}'
    )
    (layer,) = Profile.from_json(text).layers
    assert layer.input_grad_seconds == layer.weight_grad_seconds == 1.5
    assert layer.static_bytes == 40
    assert layer.weight_grad_bytes == 20


# -- estimates -----------------------------------------------------------------------------------


def small_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(50, 16), nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.1),
        nn.Linear(32, 50),
    )  # fmt: skip


def test_an_estimate_has_the_bytes_of_a_measurement() -> None:
    x = torch.randint(0, 50, (4, 7))
    made = small_model()
    before = copy.deepcopy(made.state_dict())
    measured = pipelane.profile(made, x, repeats=1)
    estimated = pipelane.profile(made, x, method="estimate", peak_flops=1e9, memory_bandwidth=1e9)
    assert (estimated.method, estimated.repeats) == ("estimated", 0)
    for one, other in zip(measured.layers, estimated.layers, strict=True):
        for key in (
            "name", "kind", "parameter_bytes", "gradient_bytes", "optimizer_bytes",
            "activation_bytes", "weight_grad_bytes", "output_bytes", "output_shape",
            "output_dtype", "flops",
        ):  # fmt: skip
            assert getattr(one, key) == getattr(other, key), (one.name, key)
    for name, value in made.state_dict().items():
        assert torch.equal(value, before[name])


def test_estimated_seconds_follow_from_operations_and_bytes() -> None:
    made, x = nn.Sequential(nn.Linear(64, 64, bias=False)), torch.randn(32, 64, requires_grad=True)
    work = 2 * 32 * 64 * 64
    moved = 4 * (32 * 64 + 64 * 64 + 32 * 64)
    slow = pipelane.profile(made, x, method="estimate", peak_flops=1e6, memory_bandwidth=1e15)
    assert slow.layers[0].forward_seconds == pytest.approx(work / 1e6)
    assert slow.layers[0].input_grad_seconds == pytest.approx(work / 1e6)
    assert slow.layers[0].weight_grad_seconds == pytest.approx(work / 1e6)
    assert slow.layers[0].backward_seconds == pytest.approx(2 * work / 1e6)
    narrow = pipelane.profile(made, x, method="estimate", peak_flops=1e15, memory_bandwidth=1e6)
    assert narrow.layers[0].forward_seconds == pytest.approx(moved / 1e6, rel=0.01)


def test_a_model_that_fits_nowhere() -> None:
    with torch.device("meta"):
        made = nn.Sequential(nn.Embedding(10**6, 8192), nn.Linear(8192, 10**6))
        x = torch.zeros(8, 128, dtype=torch.int64)
    found = pipelane.profile(made, x, method="estimate", peak_flops=1e15, memory_bandwidth=1e12)
    assert found.layers[1].parameter_bytes == 4 * (8192 * 10**6 + 10**6)
    assert found.layers[1].flops == 2 * 8 * 128 * 8192 * 10**6
    assert pipelane.partition(found, 2).sizes == (1, 1)
    with pytest.raises(ProfileError, match='use method="estimate"'):
        pipelane.profile(made, x)


def test_what_cannot_be_estimated() -> None:
    class Counts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * int(x.sum())

    with pytest.raises(ProfileError, match=r"layer '0' .*without data"):
        pipelane.profile(nn.Sequential(Counts()), torch.ones(2), method="estimate")
    made, x = nn.Sequential(nn.ReLU()), torch.ones(2)
    for wrong in ({"method": "guess"}, {"method": "estimate", "peak_flops": 0.0}):
        with pytest.raises(ProfileError, match=r"method|peak_flops"):
            pipelane.profile(made, x, **wrong)  # type: ignore[arg-type]


def test_only_one_layer_at_a_time_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    moved: list[tuple[str, bool]] = []
    real = nn.Module.to

    def to(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        moved.extend((name, True) for name, layer in layers_of(made) if layer is self)
        return real(self, *arguments, **options)

    monkeypatch.setattr(nn.Module, "to", to)
    pipelane.profile(made, torch.randn(2, 4), repeats=1)
    assert [name for name, _ in moved] == ["0", "1", "2"]
