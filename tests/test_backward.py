"""The two halves of a backward, operation by operation, against the whole one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from pipelane.backward import edge_of, split_backward
from pipelane.errors import ConfigError


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(self.linear(x)))


class Transposed(nn.Module):
    """Views of weights, a weight made from weights, and one that the input does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        self.c = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = (self.a @ self.b.T).tanh()
        return x @ made.T + self.a[0] * self.c


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.unsqueeze(0)
        return self.inner(rows, rows, rows, need_weights=False)[0].squeeze(0)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.inner = kind(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x.unsqueeze(0))[0].squeeze(0)


class Images(nn.Module):
    """Rows of 8 as images of 2 x 2 x 2."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.view(-1, 2, 2, 2)).flatten(1)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).mul_(2).relu_()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "linear without bias": lambda: nn.Linear(8, 8, bias=False),
    "layer norm": lambda: nn.LayerNorm(8),
    "group norm": lambda: nn.GroupNorm(2, 8),
    "batch norm": lambda: nn.BatchNorm1d(8),
    "convolution": lambda: Images(nn.Conv2d(2, 2, 3, padding=1)),
    "convolution, in groups": lambda: Images(nn.Conv2d(2, 2, 1, groups=2, bias=False)),
    "transposed convolution": lambda: Images(nn.ConvTranspose2d(2, 2, 1)),
    "prelu": lambda: nn.PReLU(8),
    "bilinear": lambda: Residual(nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 8))),
    "attention": Attention,
    "used twice": UsedTwice,
    "weights made from weights": Transposed,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "in place": InPlace,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "frozen": lambda: nn.Linear(8, 8).requires_grad_(False),
    "half frozen": lambda: nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)),
    "no parameters": nn.GELU,
    "deep": lambda: nn.Sequential(*[Residual(nn.Linear(8, 8)) for _ in range(5)]),
}


def assert_halves_equal_whole(layer: nn.Module, rows: int = 6, *, first: bool = False) -> Any:
    """Returns the weight half, after it has run."""
    twin = copy.deepcopy(layer)
    x = torch.randn(rows, 8)
    one = x.clone().requires_grad_(not first)
    other = x.clone().requires_grad_(not first)
    expected, output = twin(one), layer(other)
    gradient = torch.randn_like(output)
    rest: Any = None
    if output.requires_grad:
        expected.backward(gradient)
        edge = edge_of(output)
        del output
        found, rest = split_backward([edge], [gradient], [] if first else [other])
        if not first:
            assert found[0] is not None
            assert torch.equal(found[0], one.grad)  # type: ignore[arg-type]
        assert other.grad is None
        if not rest.early:
            assert all(p.grad is None for p in layer.parameters())
        rest.run()
        rest.run()  # nothing is added twice
    for p, q in zip(twin.parameters(), layer.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None and q.grad is not None:
            assert torch.equal(p.grad, q.grad)
    return rest


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_halves_equal_the_whole_bit_for_bit(name: str, first: bool) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]()
    for _ in range(2):  # gradients add up
        assert_halves_equal_whole(layer, first=first)
        layer.zero_grad()


@settings(max_examples=40, deadline=None)
@given(names=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=5), seed=st.integers())
def test_stacks_of_layers(names: list[str], seed: int) -> None:
    torch.manual_seed(seed % 2**31)
    assert_halves_equal_whole(nn.Sequential(*(LAYERS[name]() for name in names)))


def flops(run: Callable[[], object]) -> int:
    counter = FlopCounterMode(display=False)
    with counter:
        run()
    return int(counter.get_total_flops())


@pytest.mark.parametrize(
    "name", ["linear", "linear without bias", "convolution", "used twice", "deep", "bilinear"]
)
def test_neither_half_does_the_work_of_the_other(name: str) -> None:
    layer = LAYERS[name]()
    x = torch.randn(6, 8, requires_grad=True)
    whole = layer(x)
    all_of_it = flops(lambda: whole.backward(torch.ones_like(whole)))
    output = layer(x)
    rest: list[Any] = []
    first = flops(lambda: rest.append(split_backward([output], [torch.ones_like(output)], [x])[1]))
    second = flops(rest[0].run)
    assert first + second == all_of_it
    assert first == second > 0  # each half of a product is as much as the other


def test_what_the_weight_half_does_not_need_is_free() -> None:
    held: list[StorageWeakRef] = []

    class Watch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            held.append(StorageWeakRef(x.untyped_storage()))
            return x

    layer = nn.Sequential(
        nn.Linear(8, 8), Watch(), nn.GELU(), nn.Softmax(-1), Watch(), nn.Linear(8, 8)
    )
    x = torch.randn(4, 8, requires_grad=True)
    edge = edge_of(layer(x))
    _, rest = split_backward([edge], [torch.ones(4, 8)], [x])
    into_gelu, into_linear = held
    assert into_gelu.expired()  # only the input half needed it
    assert not into_linear.expired()
    rest.run()
    del edge
    assert into_linear.expired()


def test_a_loss_several_outputs_and_inputs() -> None:
    a, b = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    linear = nn.Linear(8, 8)
    outputs = [linear(a) * b, linear(b).sum()]
    found, rest = split_backward(outputs, [torch.ones(3, 8), None], [a, b, torch.ones(3)])
    rest.run()
    expected = torch.autograd.grad(
        [linear(a) * b, linear(b).sum()], [a, b, linear.weight], [torch.ones(3, 8), torch.ones(())]
    )
    assert found[2] is None
    for one, other in zip([*found[:2], linear.weight.grad], expected, strict=True):
        assert one is not None
        assert torch.allclose(one, other)


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] * weight, (grads[0] * x).sum(0)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> Any:
        return OwnFunction.apply(x, self.weight)


def test_what_cannot_be_split_is_named() -> None:
    layer = nn.Sequential(nn.Linear(8, 8), Own(), nn.Linear(8, 8))
    rest = assert_halves_equal_whole(layer)
    assert rest.early == ("OwnFunctionBackward",)


def test_bad_arguments() -> None:
    linear, x = nn.Linear(8, 8), torch.randn(2, 8, requires_grad=True)
    y = linear(x)
    with pytest.raises(ConfigError, match="1 outputs and 2 gradients"):
        split_backward([y], [None, None], [x])
    with pytest.raises(ConfigError, match="is no scalar"):
        split_backward([y], [None], [x])
    with pytest.raises(ConfigError, match="has shape"):
        split_backward([y], [torch.ones(3, 8)], [x])
    with pytest.raises(ConfigError, match="input 0 was computed"):
        split_backward([y], [torch.ones(2, 8)], [x * 2])
