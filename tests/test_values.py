"""What may go in, between stages and out: nested values, other dtypes, other sizes."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from models import batch, classifier
from test_runtime import compare
from torch import nn
from torch.nn.functional import cross_entropy

import pipelane
from pipelane import errors
from pipelane.trees import Inputs, Shared

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zbv", 2)]


@dataclass
class State:
    hidden: torch.Tensor
    label: str
    count: torch.Tensor


class Pair(NamedTuple):
    ids: torch.Tensor
    flag: torch.Tensor


class Enter(nn.Module):
    """Positional and keyword arguments in; all kinds of containers out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 8)

    def forward(self, ids: torch.Tensor, *, weight: torch.Tensor, table: Any, power: int) -> Any:
        hidden = self.embedding(ids) * weight[:, None] ** power + table["bias"]
        return {
            "state": State(hidden, "some text", ids.sum()),
            "pair": Pair(ids, ids > 3),
            "x": None,
        }


class Step(nn.Module):
    """Uses and changes some of it; passes the rest on as it came."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, value: Any) -> Any:
        state, pair = value["state"], value["pair"]
        assert (state.label, value["x"], type(pair)) == ("some text", None, Pair)
        assert pair.flag.dtype == torch.bool
        hidden = torch.where(pair.flag[:, None], self.linear(state.hidden).tanh(), state.hidden)
        # The text, the integers and the flags go on; the hidden state is in twice, once as a view.
        twice = hidden.view(-1, 2, 4)
        return {"state": State(hidden, "some text", state.count + 1), "pair": pair, "x": None,
                "more": [twice, (0.5, hidden)]}  # fmt: skip


class Leave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, value: Any) -> Any:
        twice, (half, hidden) = value["more"]
        whole = value["state"].hidden + twice.reshape(-1, 8) * half + hidden
        return self.linear(whole), (whole**2).mean()


def nested(layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Enter(), *[Step() for _ in range(layers - 2)], Leave())


def nested_loss(output: Any, target: Any) -> dict[str, torch.Tensor]:
    logits, penalty = output
    entropy = cross_entropy(logits, target["label"])
    right = (logits.argmax(-1) == target["label"]).sum() / len(logits)
    return {"loss": entropy + 0.1 * penalty, "entropy": entropy, "right": right}


def nested_batch(rows: int) -> tuple[Inputs, Any]:
    g = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, 8, (rows,), generator=g)
    inputs = Inputs(ids, weight=torch.rand(rows, generator=g), power=2,
                    table=Shared({"bias": torch.rand(8, generator=g)}))  # fmt: skip
    return inputs, {"label": torch.randint(0, 8, (rows,), generator=g), "unused": None}


def nested_values() -> list[str]:
    ranks = torch.distributed.get_world_size()
    wrong = []
    for name, chunks in SCHEDULES:
        model = nested(9)
        stages = ranks * chunks
        pipe = pipelane.Pipeline(
            copy.deepcopy(model), schedule=name, microbatches=3, loss_fn=nested_loss,
            chunks=chunks, partition=[9 // stages + (s < 9 % stages) for s in range(stages)],
        )  # fmt: skip
        for step, rows in enumerate((7, 7, 3, 8)):  # 7 rows: 3, 2, 2; and other sizes later
            x, y = nested_batch(rows)
            found = compare(pipe, model, x, y, step=step, loss_fn=nested_loss)
            wrong += [f"{name} step {step}: {text}" for text in found]
        whole = nested_loss(model_output(model, nested_batch(8)[0]), nested_batch(8)[1])
        if set(pipe.metrics) != {"entropy", "right"}:
            wrong.append(f"{name}: metrics {pipe.metrics}")
        for key, value in pipe.metrics.items():
            if not torch.allclose(value, whole[key], rtol=1e-5):
                wrong.append(f"{name}: metric {key} {value} != {whole[key]}")
        plain = {key: value.item() for key, value in pipe.metrics.items()}
        if any(one != plain for one in pipe.gather(plain)):
            wrong.append(f"{name}: metrics differ between ranks")
        # The documented forms of the call, also with other arguments of the same batch.
        inputs, y = nested_batch(8)
        (ids,) = inputs.args
        one = pipe.step(ids, y, **inputs.kwargs)
        two = pipe.step(ids, target=y, **inputs.kwargs)
        if not torch.equal(one, two):
            wrong.append("two forms of one call")
        pipe.eval()
        model.eval()
        logits, penalty = pipe(*inputs.args, **inputs.kwargs, gather=True)
        with torch.no_grad():
            expected = model_output(model, inputs)
        if not torch.allclose(logits, expected[0], atol=1e-6) or penalty.shape != (3,):
            wrong.append(f"{name}: outputs")
        pipe.close()
    return wrong


def model_output(model: nn.Sequential, inputs: Inputs) -> Any:
    value = model[0](*inputs.args, **{k: getattr(v, "value", v) for k, v in inputs.kwargs.items()})
    for layer in list(model)[1:]:
        value = layer(value)
    return value


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_nested_values_between_stages(ranks: int) -> None:
    for wrong in pipelane.launch(nested_values, ranks):
        assert wrong == []


class Twice(nn.Module):
    """The same tensor twice, a view of it, the input itself, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x: torch.Tensor) -> Any:
        y = x * self.weight
        return y, y, y.t(), x, self.weight.expand(len(x), 8)


class Together(nn.Module):
    def forward(self, value: Any) -> torch.Tensor:
        a, b, c, x, w = value
        result: torch.Tensor = a * 2 + b * 3 + c.t() * 5 + x + w
        return result


class InPlace(nn.Module):
    """Overwrites its input, in a way that no attribute tells."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x += 1
        x.mul_(0.5)
        return self.linear(x).mul_(2)  # type: ignore[no-any-return]


class Drops(nn.Module):
    """An output that does not depend on the input, next to one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x: torch.Tensor) -> Any:
        return self.weight.expand(len(x), 8), x * 2


class First(nn.Module):
    def forward(self, value: Any) -> torch.Tensor:
        result: torch.Tensor = value[0] * 3
        return result


def edges() -> list[str]:
    wrong = []
    ways = (("1f1b", "none"), ("zb-h1", "none"), ("gpipe", "full"), ("zb-h2", "layer"))
    models: dict[str, list[nn.Module]] = {
        "twice": [nn.Linear(8, 8), Twice(), Together(), Twice(), Together(), nn.Linear(8, 8)],
        "in place": [nn.Linear(8, 8), InPlace(), nn.Identity(), InPlace(), InPlace(), InPlace()],
        "identity": [
            nn.Linear(8, 8), nn.Identity(), nn.Identity(), nn.Identity(), nn.ReLU(inplace=True),
            nn.Linear(8, 8),
        ],
        "drops": [nn.Linear(8, 8), Drops(), First(), nn.Linear(8, 8), Drops(), First()],
    }  # fmt: skip
    for label, layers in models.items():
        torch.manual_seed(0)
        for layer in layers:
            for parameter in layer.parameters():
                nn.init.uniform_(parameter, -0.5, 0.5)
        model = nn.Sequential(*layers)
        for name, recompute in ways:
            for sizes in ([1, 1, 4], [2, 2, 2]):
                own = copy.deepcopy(model)
                pipe = pipelane.Pipeline(
                    copy.deepcopy(model), schedule=name, microbatches=3, loss_fn=cross_entropy,
                    partition=sizes, recompute=recompute,
                )  # fmt: skip
                for step in range(2):
                    x, y = batch(7)
                    found = compare(pipe, own, x.clone(), y, step=step)
                    wrong += [
                        f"{label} {name} {recompute} {sizes} {step}: {text}" for text in found
                    ]
                held = dict(own.named_buffers())
                for key, value in pipe.state_dict().items():
                    if key in held and not torch.equal(value, held[key]):
                        wrong.append(f"{label} {name} {recompute}: {key} {value} != {held[key]}")
                pipe.close()
    return wrong


def test_views_in_place_operations_and_tensors_used_twice_at_the_edges() -> None:
    for wrong in pipelane.launch(edges, 3):
        assert wrong == []


def no_gradient_wanted() -> list[Any]:
    """Frozen stages first: their boundaries carry no gradient, until they are trainable."""
    model = classifier(6)
    for layer in model[:4]:
        layer.requires_grad_(False)
    pipe = pipelane.Pipeline(
        copy.deepcopy(model), microbatches=3, loss_fn=cross_entropy, partition=[2, 2, 2]
    )
    x, y = batch(6)
    found: list[Any] = [compare(pipe, model, x, y), compare(pipe, model, x, y, step=1)]
    found.append(
        {edge: known.grads for edge, known in pipe._train_engine._tables[0].items() if edge[1]}
    )
    for parameter in (*pipe.parameters(), *model.parameters()):
        parameter.requires_grad_(True)
    pipe.relearn()
    found.append(compare(pipe, model, x, y, step=2))
    found.append(
        {edge: known.grads for edge, known in pipe._train_engine._tables[0].items() if edge[1]}
    )
    return found


def test_a_stage_whose_input_needs_no_gradient_sends_none_back() -> None:
    for first, second, frozen, third, free in pipelane.launch(no_gradient_wanted, 3):
        assert first == second == third == []
        assert set(frozen.values()) == {(False,)}
        assert set(free.values()) == {(True,)}


def forgot_to_relearn() -> str:
    model = classifier(6)
    model[0].requires_grad_(False)
    pipe = pipelane.Pipeline(
        model, microbatches=2, loss_fn=cross_entropy, partition=[3, 3], timeout=20
    )
    for layer in model[:3]:
        layer.requires_grad_(False)
    x, y = batch(6)
    pipe.step(x, y)
    for parameter in pipe.parameters():
        parameter.requires_grad_(True)
    try:
        pipe.step(x, y)
    except errors.PipelaneError as error:
        return str(error)
    return "nothing"


def test_a_gradient_that_is_wanted_now_is_not_silently_left_out() -> None:
    for message in pipelane.launch(forgot_to_relearn, 2):
        assert "relearn()" in message
        assert "stage 0" in message


class Elsewhere(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to("meta")


class Ragged(nn.Module):
    """How many rows come out depends on the values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x[x[:, 0] > 0])  # type: ignore[no-any-return]


def ragged_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output**2).sum()


def odd_outputs() -> list[str]:
    x, y = batch(9)
    found = []
    for layer, dynamic in ((Elsewhere(), False), (Ragged(), False), (Ragged(), True)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 8))
        for p in model.parameters():
            nn.init.uniform_(p, -0.5, 0.5)
        pipe = pipelane.Pipeline(
            copy.deepcopy(model), microbatches=3, loss_fn=ragged_loss, partition=[2, 1],
            loss_reduction="sum", dynamic=dynamic, timeout=20,
        )  # fmt: skip
        try:
            wrong = []
            for step in range(3):
                options = {"loss_fn": ragged_loss, "loss_reduction": "sum", "step": step}
                wrong += compare(pipe, model, x.roll(step, 0), y, **options)
            found.append(f"fine {wrong}")
        except errors.PipelaneError as error:
            found.append(str(error))
    return found


def test_another_device_and_sizes_that_depend_on_values() -> None:
    for meta, ragged, dynamic in pipelane.launch(odd_outputs, 2):
        assert "on meta" in meta
        assert "stage 0 (last layer '1'" in meta
        assert "dynamic=True" in ragged
        assert "stage 0" in ragged
        assert dynamic == "fine []"


def gradient_of_the_batch() -> list[str]:
    model = classifier(4)
    wrong = []
    for name, recompute in (("1f1b", "none"), ("zb-h1", "none"), ("gpipe", "full")):
        pipe = pipelane.Pipeline(
            copy.deepcopy(model), schedule=name, microbatches=3, loss_fn=cross_entropy,
            partition=[2, 2], recompute=recompute,
        )  # fmt: skip
        x, y = batch(7)
        mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        wrong += compare(pipe, model, mine, y)
        mine.grad = None
        pipe.step(mine * 2, y)  # also through what made the batch
        split = torch.split(other * 2, [3, 2, 2])
        total = sum(
            cross_entropy(model(part), target) * len(part) / 7
            for part, target in zip(split, torch.split(y, [3, 2, 2]), strict=True)
        )
        total.backward()  # type: ignore[union-attr]
        if pipe.rank == 0 and not torch.allclose(mine.grad, other.grad, atol=1e-7):  # type: ignore[arg-type]
            wrong.append(f"{name}: {mine.grad} != {other.grad}")
        if pipe.rank != 0 and mine.grad is not None:
            wrong.append("a gradient where the batch is not read")
        pipe.close()
    return wrong


def test_a_batch_that_wants_a_gradient_gets_it() -> None:
    for wrong in pipelane.launch(gradient_of_the_batch, 2):
        assert wrong == []


def inference() -> list[str]:
    model = classifier(6)
    pipe = pipelane.Pipeline(
        copy.deepcopy(model), microbatches=3, loss_fn=cross_entropy, partition=[2, 2, 2]
    ).eval()
    model.eval()
    wrong = []
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            x, y = batch(8)
            out = pipe(x, gather=True)
            if not torch.allclose(out, model(x), atol=1e-6) or out.requires_grad:
                wrong.append(f"{context.__name__}")
            if context is torch.inference_mode:
                try:
                    pipe.step(x, y)
                    wrong.append("step in inference mode")
                except errors.ConfigError:
                    made = x
    pipe.train()
    model.train()
    wrong += compare(pipe, model, made.clone(), batch(8)[1])
    pipe.step(made, y)  # a batch that was made in inference mode can be trained on
    if pipe._train_engine.held() or any(e.held() for e in pipe._forward_engines.values()):
        wrong.append("something is kept")
    return wrong


def test_evaluation_under_every_gradient_mode() -> None:
    for wrong in pipelane.launch(inference, 3):
        assert wrong == []
