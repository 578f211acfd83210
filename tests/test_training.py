"""Weights and values that stages share, recomputation, precision, and what optimizers need."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from models import batch, classifier
from test_runtime import compare
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import pipelane
from pipelane import errors

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("zb-h2", 1), ("interleaved", 2), ("zbv", 2)]


def sizes_for(layers: int, stages: int) -> list[int]:
    return [layers // stages + (s < layers % stages) for s in range(stages)]


def refusal(work: Any) -> str:
    try:
        work()
    except errors.PipelaneError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# -- skips ---------------------------------------------------------------------------------------


class Out(nn.Module):
    """Stashes a value, or a nesting of some."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.names = names
        pipelane.skippable(stash=names)(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).tanh()
        for number, name in enumerate(self.names):
            pipelane.stash(name, {"value": y * (number + 1), "flag": x > 0, "text": name})
        return y


class In(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.names = names
        pipelane.skippable(pop=names)(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            kept = pipelane.pop(name)
            assert kept["text"] == name
            x = x + kept["value"] * kept["flag"]
        return self.linear(x)  # type: ignore[no-any-return]


@pipelane.skippable(stash=["inner"], pop=["inner"])
class Both(nn.Module):
    """Stashes and pops within itself: nobody else's business."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pipelane.stash("inner", x)
        result: torch.Tensor = pipelane.pop("inner").relu()
        return result


def skipping() -> nn.Sequential:
    """Skips of every length, several between one pair of layers, one next to another."""
    torch.manual_seed(0)
    return nn.Sequential(
        Out("a", "b"), Out("c"), In("b"), Both(), Out("d"), In("c"), nn.Linear(8, 8), In("d", "a"),
        nn.Linear(8, 8),
    )  # fmt: skip


def skips() -> list[str]:
    ranks = torch.distributed.get_world_size()
    wrong = []
    for name, chunks in SCHEDULES:
        for recompute in ("none", "full", "layer"):
            model = skipping()
            pipe = pipelane.Pipeline(
                copy.deepcopy(model), schedule=name, microbatches=4, chunks=chunks,
                loss_fn=cross_entropy, partition=sizes_for(9, ranks * chunks), recompute=recompute,
            )  # fmt: skip
            for step, rows in enumerate((9, 9, 5)):
                x, y = batch(rows)
                found = compare(pipe, model, x, y, step=step)
                wrong += [f"{name} {recompute} step {step}: {text}" for text in found]
            if pipe._train_engine.held():
                wrong.append(f"{name} {recompute}: {pipe._train_engine.held()} kept")
            pipe.eval()
            if not torch.allclose(pipe(x, gather=True), model(x), atol=1e-6):
                wrong.append(f"{name} {recompute}: outputs")
            pipe.close()
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_skips_between_any_stages(ranks: int) -> None:
    for wrong in pipelane.launch(skips, ranks):
        assert wrong == []


class Forgets(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def bad_skips() -> dict[str, str]:
    x, y = batch(6)

    def make(*layers: nn.Module) -> pipelane.Pipeline:
        return pipelane.Pipeline(
            nn.Sequential(*layers), microbatches=2, loss_fn=cross_entropy, timeout=20,
            partition=[2, len(layers) - 2],
        )  # fmt: skip

    twice = Out("a")
    found = {
        "never popped": refusal(lambda: make(Out("a"), Forgets(), Forgets())),
        "never stashed": refusal(lambda: make(Out("b"), Forgets(), In("b"), In("a"))),
        "popped twice": refusal(lambda: make(Out("a"), Forgets(), In("a"), In("a"))),
        "stashed twice": refusal(lambda: make(Out("a"), twice, In("a"))),
        "too early": refusal(lambda: make(In("a"), Forgets(), Out("a"))),
    }
    forgets = pipelane.skippable(stash=["a"])(Forgets())
    found["forgets"] = refusal(lambda: make(forgets, Forgets(), In("a")).step(x, y))
    undeclared = Out("a")
    undeclared.names = ("a", "b")
    found["undeclared"] = refusal(lambda: make(undeclared, Forgets(), In("a")).step(x, y))
    return found


def test_bad_skips_are_refused() -> None:
    for found in pipelane.launch(bad_skips, 2):
        assert "'0' stashes 'a', which no later layer pops" in found["never popped"]
        assert "'3' pops 'a', but no layer before it" in found["never stashed"]
        assert "'2' popped it already" in found["popped twice"]
        assert "'0' and '1' both" in found["stashed twice"]
        assert "'0' pops 'a', but no layer before it" in found["too early"]
        assert "declares that it stashes 'a', but its forward did not" in found["forgets"]
        assert "'0' stashes 'b', which it does not declare" in found["undeclared"]
        assert all(text.startswith(("ModelError", "PipelineFailure")) for text in found.values())


# -- tied weights --------------------------------------------------------------------------------


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


def tied_model() -> nn.Sequential:
    """One weight in three layers, another in two."""
    torch.manual_seed(0)
    embedding = nn.Embedding(8, 8)
    model = nn.Sequential(
        embedding, nn.Linear(8, 8), nn.Tanh(), Head(embedding.weight), nn.LayerNorm(8),
        nn.Linear(8, 8), nn.GELU(), Head(embedding.weight),
    )  # fmt: skip
    assert isinstance(model[5], nn.Linear)
    model[5].bias = model[1].bias
    return model


def tied() -> list[str]:
    ranks = torch.distributed.get_world_size()
    wrong = []
    for name, chunks in SCHEDULES:
        model = tied_model()
        pipe = pipelane.Pipeline(
            copy.deepcopy(model), schedule=name, microbatches=3, chunks=chunks,
            loss_fn=cross_entropy, partition=sizes_for(8, ranks * chunks),
        )  # fmt: skip
        mine = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        other = torch.optim.AdamW(model.parameters(), lr=0.01)
        g = torch.Generator().manual_seed(3)
        for step in range(4):
            parts = []
            mine.zero_grad()
            other.zero_grad()
            for part in range(2):  # gradients accumulate over two steps
                x, y = (torch.randint(0, 8, (7,), generator=g) for _ in range(2))
                if part == 0 and step % 2:
                    with pipe.no_sync():
                        loss = pipe.step(x, y, scale=0.5)
                else:
                    loss = pipe.step(x, y, scale=0.5)
                expected = pipelane.reference(
                    model, x, y, loss_fn=cross_entropy, microbatches=3, step=2 * step + part,
                    scale=0.5,
                )  # fmt: skip
                parts.append((loss, expected))
            if not all(torch.allclose(a, b, rtol=1e-4) for a, b in parts):
                wrong.append(f"{name} step {step}: {parts}")
            norm = pipe.clip_grad_norm_(0.5)
            one = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if not torch.allclose(norm, one, rtol=1e-5):
                wrong.append(f"{name} step {step}: norm {norm} != {one}")
            whole = dict(model.named_parameters(remove_duplicate=False))
            for key, parameter in pipe.named_parameters():
                if not torch.allclose(parameter.grad, whole[key].grad, rtol=1e-3, atol=1e-6):
                    wrong.append(f"{name} step {step}: gradient of {key}")
            mine.step()
            other.step()
        states = pipe.gather(pipe.state_dict())
        tied_names = ("0.weight", "3.weight", "7.weight")
        copies = [v for part in states for k, v in part.items() if k in tied_names]
        if len(copies) != 3 or not all(torch.equal(copies[0], c) for c in copies):
            wrong.append(f"{name}: {len(copies)} copies differ")
        names = [k for part in pipe.gather([k for k, _ in pipe.named_parameters()]) for k in part]
        if len(names) != len(set(names)):
            wrong.append(f"{name}: {names}")
        every = {k: v for part in states for k, v in part.items()}
        model.load_state_dict(every)  # the names are the model's own
        del every["7.weight"]  # what was saved without the second name of one tensor
        pipe.load_state_dict(every)
        pipe.close()
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tied_weights_stay_equal_bit_for_bit(ranks: int) -> None:
    for wrong in pipelane.launch(tied, ranks):
        assert wrong == []


# -- recomputation, batch normalisation, dropout ------------------------------------------------


def convolutional() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.3),
        nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * 36, 8), nn.BatchNorm1d(8, affine=False), nn.Dropout(0.1), nn.Linear(8, 8),
    )  # fmt: skip


def statistics() -> list[str]:
    ranks = torch.distributed.get_world_size()
    wrong = []
    g = torch.Generator().manual_seed(1)
    for recompute in ("none", "full", "layer", ["1", "4", "9", "10"]):
        for batch_norm in ("micro-batch", "whole batch"):
            for name, chunks in SCHEDULES if recompute == "full" else SCHEDULES[1:3]:
                model = convolutional()
                pipe = pipelane.Pipeline(
                    copy.deepcopy(model), schedule=name, microbatches=3, chunks=chunks, seed=7,
                    loss_fn=cross_entropy, partition=sizes_for(12, ranks * chunks),
                    recompute=recompute, batch_norm=batch_norm,
                )  # fmt: skip
                label = f"{name} {recompute} {batch_norm}"
                for step in range(3):
                    x = torch.randn(8, 3, 6, 6, generator=g)
                    y = torch.randint(0, 8, (8,), generator=g)
                    found = compare(pipe, model, x, y, step=step, seed=7, batch_norm=batch_norm)
                    wrong += [f"{label} step {step}: {text}" for text in found]
                held = dict(model.named_buffers())
                for key, value in pipe.state_dict().items():
                    if key in held and not torch.equal(value, held[key]):
                        wrong.append(f"{label}: {key} {value} != {held[key]}")
                pipe.close()
    if batch_norm == "whole batch":
        whole = convolutional()
        whole[1].momentum = None  # a plain average over the steps
        layer = copy.deepcopy(whole)[:2]
        pipelane.reference(
            layer, x, x[:, :1].repeat(1, 4, 1, 1), loss_fn=mse_loss, microbatches=4,
            batch_norm="whole batch",
        )  # fmt: skip
        plain = copy.deepcopy(whole)[:2]
        plain(x)
        for key, value in plain.named_buffers():
            if not torch.allclose(value, dict(layer.named_buffers())[key], rtol=1e-5, atol=1e-6):
                wrong.append(f"whole batch: {key} is not that of one batch in one piece")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2])
def test_dropout_and_running_statistics_under_recomputation(ranks: int) -> None:
    for wrong in pipelane.launch(statistics, ranks):
        assert wrong == []


# -- precision -----------------------------------------------------------------------------------


def half(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    assert output.dtype is torch.bfloat16
    return cross_entropy(output.float(), target)


def mixed() -> list[str]:
    wrong = []
    for name, recompute in (("1f1b", "none"), ("zb-h1", "none"), ("gpipe", "full")):
        model = classifier(6)
        model.append(nn.Linear(8, 8))
        pipe = pipelane.Pipeline(
            copy.deepcopy(model), schedule=name, microbatches=3, loss_fn=half, partition=[1, 6],
            autocast=torch.bfloat16, recompute=recompute,
        )  # fmt: skip
        for step in range(2):
            x, y = batch(7)
            found = compare(pipe, model, x, y, step=step, loss_fn=half, autocast=torch.bfloat16)
            wrong += [f"{name} step {step}: {text}" for text in found]
        (known, *_) = pipe._train_engine._tables[0].values()
        if known.specs[0].dtype is not torch.bfloat16:
            wrong.append(f"{known}: the boundary is not bfloat16")
        pipe.close()
    return wrong


def test_autocast_equals_one_process_and_halves_the_messages() -> None:
    for wrong in pipelane.launch(mixed, 2):
        assert wrong == []


class Explodes(nn.Module):
    """Its gradient overflows when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        return y + (y * self.factor - (y * self.factor).detach())


def scaled() -> list[str]:
    """Overflow on rank 0 only: every rank skips that step and halves its scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Explodes(), nn.Linear(8, 8), nn.Linear(8, 8))
    pipe = pipelane.Pipeline(
        copy.deepcopy(model), microbatches=2, loss_fn=cross_entropy, partition=[2, 1, 1]
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler = pipelane.GradScaler(pipe, init_scale=1024.0, growth_interval=2)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    wrong = []
    for step in range(6):
        for one in (model, *(s.modules[-1] for s in pipe._stages.values())):
            for module in one.modules():
                if isinstance(module, Explodes):
                    module.factor = math.inf if step == 2 else 1.0
        x, y = batch(6)
        pipe.zero_grad()
        other.zero_grad()
        pipe.step(x, y, scale=scaler)
        scale = whole.scale(torch.ones(())).item()
        pipelane.reference(
            model, x, y, loss_fn=cross_entropy, microbatches=2, step=step, scale=scale
        )
        if step % 2:
            scaler.unscale_(optimizer)
            whole.unscale_(other)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if not torch.equal(pipe.clip_grad_norm_(0.1), norm):
                wrong.append(f"norm in step {step}")
        scaler.step(optimizer)
        scaler.update()
        whole.step(other)
        whole.update()
        if scaler.get_scale() != whole.get_scale():
            wrong.append(f"step {step}: scale {scaler.get_scale()} != {whole.get_scale()}")
        expected = dict(model.named_parameters())
        wrong += [
            f"step {step}: {key}"
            for key, parameter in pipe.named_parameters()
            if not torch.equal(parameter, expected[key])
        ]
    return wrong


def test_the_gradient_scaler_agrees_across_ranks() -> None:
    for wrong in pipelane.launch(scaled, 3):
        assert wrong == []


def clipped() -> list[str]:
    wrong = []
    for norm_type in (2.0, 1.0, math.inf):
        model = classifier(6)
        pipe = pipelane.Pipeline(
            copy.deepcopy(model), microbatches=2, loss_fn=cross_entropy, partition=[2, 2, 2]
        )
        x, y = batch(6)
        wrong += compare(pipe, model, x, y)
        found = pipe.clip_grad_norm_(0.05, norm_type)
        expected = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type)
        if not torch.equal(found, expected):
            wrong.append(f"{norm_type}: {found} != {expected}")
        gradients = {name: p.grad for name, p in model.named_parameters()}
        wrong += [
            name for name, p in pipe.named_parameters() if not torch.equal(p.grad, gradients[name])
        ]
        for parameter in pipe.parameters():
            if parameter.grad is not None and pipe.rank == 1:
                parameter.grad.fill_(math.nan)
        text = refusal(lambda p=pipe: p.clip_grad_norm_(1.0, error_if_nonfinite=True))
        if "AnomalyError: the norm of the gradients is nan" not in text:
            wrong.append(text)
        pipe.close()
    return wrong


def test_clipping_equals_one_process_bit_for_bit() -> None:
    for wrong in pipelane.launch(clipped, 3):
        assert wrong == []


# -- values that are not finite -----------------------------------------------------------------


class Breaks(nn.Module):
    """NaN forward, or backward only, in one micro-batch."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bad = (x[:, :1] > 50).float()
        if self.where == "forward":
            return x * self.weight / (1 - bad)
        if self.where == "backward":
            return x * self.weight + (x * self.weight * 0 + 1 - bad).sqrt() * bad
        return x * self.weight


def anomalies(where: str, schedule: str, recompute: str) -> str:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Identity(), nn.Identity(), Breaks(where), nn.Linear(8, 8)]
    pipe = pipelane.Pipeline(
        nn.Sequential(*layers), schedule=schedule, microbatches=3, loss_fn=cross_entropy,
        partition=[1, 2, 1], detect_anomaly=True, timeout=20, recompute=recompute,
    )  # fmt: skip
    x, y = batch(6)
    pipe.step(x, y)
    x[2, 0] = 100.0  # in micro-batch 1

    def steps() -> None:
        for _ in range(2):  # a rank whose own work was over hears of it in its next step
            pipe.step(x, y)

    return refusal(steps)


@pytest.mark.parametrize(
    ("where", "schedule", "recompute"),
    [("forward", "1f1b", "none"), ("backward", "1f1b", "none"), ("backward", "zb-h1", "none"),
     ("backward", "gpipe", "full")],
)  # fmt: skip
def test_the_first_value_that_is_not_finite_is_named(
    where: str, schedule: str, recompute: str
) -> None:
    found = pipelane.launch(anomalies, 3, where, schedule, recompute)
    for rank, message in enumerate(found):
        assert message.startswith("AnomalyError" if rank == 1 else "PipelineFailure"), message
        assert "layer '2' (Breaks)" in message
        assert "micro-batch 1" in message
        if rank != 1:
            assert "stage 1" in message
    if where == "backward":
        assert "backward" in found[1]


def silent_nan() -> list[str]:
    model = nn.Sequential(nn.Identity(), nn.Linear(8, 8), nn.Linear(8, 8))
    pipe = pipelane.Pipeline(model, microbatches=3, loss_fn=cross_entropy, partition=[2, 1])
    x, y = batch(6)
    x[5] = math.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            pipe.step(x, y)
    return [str(w.message) for w in caught]


def test_a_loss_that_is_not_finite_warns_once() -> None:
    first, last = pipelane.launch(silent_nan, 2)
    assert first == []
    (message,) = last
    assert "step 0 is nan (micro-batch 2)" in message
    assert "detect_anomaly=True" in message


# -- compiled stages -----------------------------------------------------------------------------


def compiled() -> list[str]:
    wrong = []
    for name, chunks in (("1f1b", 1), ("interleaved", 2)):
        model = convolutional() if chunks == 1 else classifier(6)
        layers = len(model)
        pipe = pipelane.Pipeline(
            copy.deepcopy(model), schedule=name, microbatches=2, chunks=chunks, seed=3,
            loss_fn=cross_entropy, partition=sizes_for(layers, 2 * chunks),
            compile={"backend": "aot_eager"},
        )  # fmt: skip
        for step in range(2):
            g = torch.Generator().manual_seed(step)
            x = torch.randn(6, 3, 6, 6, generator=g) if chunks == 1 else batch(6)[0]
            y = torch.randint(0, 8, (6,), generator=g)
            for parameter in (*pipe.parameters(), *model.parameters()):
                parameter.grad = None
            loss = pipe.step(x, y)
            expected = pipelane.reference(
                model, x, y, loss_fn=cross_entropy, microbatches=2, seed=3, step=step
            )
            if not torch.allclose(loss, expected, rtol=1e-5):
                wrong.append(f"{name}: {loss} != {expected}")
            gradients = {key: p.grad for key, p in model.named_parameters()}
            for key, parameter in pipe.named_parameters():
                if not torch.allclose(parameter.grad, gradients[key], rtol=1e-4, atol=1e-6):
                    wrong.append(f"{name}: {key}")
        ran = sum(len(s._segments[0].runner._steps) for s in pipe._stages.values())
        if ran >= sum(len(s.modules) for s in pipe._stages.values()):
            wrong.append("nothing was compiled together")
        pipe.close()
    return wrong


def test_compiled_stages() -> None:
    for wrong in pipelane.launch(compiled, 2):
        assert wrong == []


# -- optimizers and schedules of the learning rate ----------------------------------------------


class Unused(nn.Module):
    """A parameter that gets no gradient, next to a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.frozen  # type: ignore[no-any-return]


def optimizers() -> list[str]:
    wrong = []
    kinds: dict[str, Any] = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
        "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
        "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    }
    for label, kind in kinds.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), Unused(), nn.Tanh(), Unused(), nn.ReLU())
        pipe = pipelane.Pipeline(
            copy.deepcopy(model), microbatches=3, loss_fn=cross_entropy, partition=[2, 1, 2],
            schedule="zb-h1",
        )  # fmt: skip
        mine, other = kind(pipe.parameters()), kind(model.parameters())
        rates = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 10) for o in (mine, other)]
        for step in range(5):
            x, y = batch(7, seed=step)
            wrong += [f"{label} {step}: {t}" for t in compare(pipe, model, x, y, step=step)]
            mine.step()
            other.step()
            for rate in rates:
                rate.step()
        expected = dict(model.named_parameters())
        wrong += [
            f"{label}: {name}"
            for name, parameter in pipe.named_parameters()
            if not torch.equal(parameter, expected[name])
        ]
        pipe.close()
    return wrong


def test_any_optimizer_and_learning_rate_schedule() -> None:
    for wrong in pipelane.launch(optimizers, 3):
        assert wrong == []
