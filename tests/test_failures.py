"""Bad input and failures: a clear error on every rank, and nobody hangs."""

from __future__ import annotations

import copy
import os
import time
from typing import Any

import pytest
import torch
from models import batch, classifier
from torch import nn
from torch.nn.functional import cross_entropy

import pipelane
from pipelane import errors


def caught(work: Any) -> tuple[str, str]:
    """Class name and message of the pipelane error that the work raises."""
    try:
        work()
    except (errors.PipelaneError, ZeroDivisionError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def make(model: nn.Module | None = None, **options: Any) -> pipelane.Pipeline:
    options = {"microbatches": 2, "loss_fn": cross_entropy, "partition": [3, 3], **options}
    options.setdefault("timeout", 20.0)
    return pipelane.Pipeline(classifier() if model is None else model, **options)


class NotASequential(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class SparseOut(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x, x.to_sparse()


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such thing")


class Fickle(nn.Module):
    """Returns another shape when told to, for an input of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = False
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, :4] if self.odd else x) * self.weight


def same_memory() -> nn.Sequential:
    model = classifier()
    model[3].weight = nn.Parameter(model[0].weight.data)
    return model


def refused_arguments() -> list[tuple[str, tuple[str, str]]]:
    rank = torch.distributed.get_rank()
    cases: dict[str, Any] = {
        "no microbatches": lambda: make(microbatches=0),
        "negative": lambda: make(microbatches=-3),
        "not sequential": lambda: make(NotASequential()),
        "not sequential on one rank": lambda: make(NotASequential() if rank else classifier()),
        "more stages than layers": lambda: make(nn.Sequential(nn.Linear(8, 8)), partition=None),
        "partition sum": lambda: make(partition=[3, 4]),
        "partition zero": lambda: make(partition=[6, 0]),
        "partition length": lambda: make(partition=[2, 2, 2]),
        "unknown schedule": lambda: make(schedule="zigzag"),
        "chunks": lambda: make(chunks=2),
        "disagree m": lambda: make(microbatches=2 + rank),
        "disagree schedule": lambda: make(schedule="gpipe" if rank else "1f1b"),
        "disagree model": lambda: make(classifier(6 + rank), partition=[3, 3]),
        "disagree reduction": lambda: make(loss_reduction="sum" if rank else "mean"),
        "reduction": lambda: make(loss_reduction="max"),
        "recompute": lambda: make(recompute="some"),
        "recompute no layer": lambda: make(recompute=["0", "seventh"]),
        "autocast": lambda: make(autocast=torch.float64),
        "batch norm": lambda: make(batch_norm="none"),
        "disagree recompute": lambda: make(recompute="full" if rank else "none"),
        "disagree autocast": lambda: make(autocast=torch.bfloat16 if rank else None),
        "compiled and split": lambda: make(schedule="zb-h1", compile=True),
        "loss not callable": lambda: make(loss_fn=3),
        "no example": lambda: make(partition=None),
        "broken example": lambda: make(partition=None, example=torch.randn(2, 3)),
        "same memory": lambda: make(same_memory()),
        "timeout": lambda: make(timeout=0),
        "missing csv": lambda: make(schedule="nowhere.csv"),
    }
    found = [(name, caught(work)) for name, work in cases.items()]
    # The ranks are still in step with each other: a good pipeline works.
    x, y = batch(4)
    make().step(x, y)
    return found


REFUSED = {
    "no microbatches": ("ScheduleError", "microbatches must be at least 1"),
    "negative": ("ScheduleError", "microbatches must be at least 1"),
    "not sequential": ("ModelError", "Sequential"),
    "not sequential on one rank": ("ModelError", "rank 1"),
    "more stages than layers": ("PartitionError", "2 stages for 1 layer"),
    "partition sum": ("PartitionError", "7"),
    "partition zero": ("PartitionError", "0"),
    "partition length": ("PartitionError", "3"),
    "unknown schedule": ("ScheduleError", "zigzag"),
    "chunks": ("ScheduleError", "one chunk per rank"),
    "disagree m": ("ConfigError", "different arguments: schedule"),
    "disagree schedule": ("ConfigError", "different arguments: schedule"),
    "disagree model": ("PartitionError", "rank 1"),
    "disagree reduction": ("ConfigError", "loss_reduction"),
    "reduction": ("ConfigError", "'mean' or 'sum'"),
    "recompute": ("ConfigError", "'some'"),
    "recompute no layer": ("ConfigError", "'seventh'"),
    "autocast": ("ConfigError", "float64"),
    "batch norm": ("ConfigError", "batch_norm"),
    "disagree recompute": ("ConfigError", "recompute is"),
    "disagree autocast": ("ConfigError", "autocast is"),
    "compiled and split": ("ConfigError", "zb-h1"),
    "loss not callable": ("ConfigError", "loss_fn"),
    "no example": ("ConfigError", "example"),
    "broken example": ("ProfileError", "'0'"),
    "same memory": ("ModelError", "0.weight"),
    "timeout": ("ConfigError", "timeout"),
    "missing csv": ("ScheduleError", "nowhere.csv"),
}


def test_bad_arguments_are_refused_on_every_rank() -> None:
    for found in pipelane.launch(refused_arguments, 2):
        for name, (kind, message) in found:
            assert kind == REFUSED[name][0], (name, kind, message)
            assert REFUSED[name][1] in message, (name, message)


def test_no_process_group() -> None:
    with pytest.raises(errors.ConfigError, match=r"pipelane\.launch"):
        pipelane.Pipeline(classifier(), microbatches=1, loss_fn=cross_entropy)


def refused_batches() -> list[tuple[str, tuple[str, str]]]:
    """Batches that rank 0 refuses: an error on both ranks, and the pipeline goes on."""
    pipe = make(microbatches=3)
    first = pipe.rank == 0
    x, y = batch(6)
    cases: dict[str, Any] = {
        "too small": lambda: pipe.step(x[:2], y[:2]),
        "too small, others have none": lambda: pipe.step(x[:2] if first else None, y[:2]),
        "empty": lambda: pipe.step(x[:0], y[:0]),
        "none": lambda: pipe.step(None, y),
        "not a tensor": lambda: pipe.step([1, 2, 3], y),
        "scalar": lambda: pipe.step(torch.tensor(1.0), y),
        "rows differ": lambda: pipe.step((x, x[:5]), y),
        "forward in training": lambda: pipe(x),
    }
    found = [(name, caught(work)) for name, work in cases.items()]
    pipe.step(x, y)
    pipe.eval()
    found.append(("empty forward", caught(lambda: pipe(x[:0]))))
    assert (pipe(x, gather=True).shape) == (6, 8)
    return found


def test_bad_batches_are_refused_on_every_rank_and_the_pipeline_goes_on() -> None:
    expected = {
        "too small": "2 rows, fewer than microbatches=3",
        "too small, others have none": "2 rows, fewer than microbatches=3",
        "empty": "0 rows",
        "none": "no batch",
        "not a tensor": "no tensor",
        "scalar": "without dimensions",
        "rows differ": "the batch[1] has shape [5, 8], but the batch has 6 rows",
        "forward in training": "eval()",
        "empty forward": "empty",
    }
    for found in pipelane.launch(refused_batches, 2):
        for name, (kind, message) in found:
            wanted = "ConfigError" if name == "forward in training" else "InputError"
            assert kind == wanted, (name, kind, message)
            assert expected[name] in message, (name, message)


def vector_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output, target, reduction="none")


def number_loss(output: torch.Tensor, target: torch.Tensor) -> Any:
    return cross_entropy(output, target).item()


def detached_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.detach(), target)


def kill_me(output: torch.Tensor, target: torch.Tensor) -> Any:
    os.kill(os.getpid(), 9)


def bad_weight(target: torch.Tensor) -> float:
    raise ZeroDivisionError("no weight")


def failing_step(case: str, ranks: int) -> tuple[str, str, float, str]:
    """One failing step in a pipeline of ``ranks``: class, message, seconds, and what comes next."""
    x, y = batch(8)
    layers: list[nn.Module] = [nn.Linear(8, 8) for _ in range(2 * ranks)]
    options: dict[str, Any] = {"partition": [2] * ranks, "microbatches": 4}
    if case == "raises":
        layers[3] = Raises()
    elif case == "sparse":
        layers[3] = SparseOut()
    elif case == "vector loss":
        options["loss_fn"] = vector_loss
    elif case == "number loss":
        options["loss_fn"] = number_loss
    elif case == "detached loss":
        options["loss_fn"] = detached_loss
    elif case == "fickle":
        layers[3] = Fickle()
    elif case == "weight raises":
        options["loss_weight"] = bad_weight
    elif case == "silent":
        options["timeout"] = 2.0
    pipe = make(nn.Sequential(*layers), **options)
    if case == "fickle":
        pipe.step(x, y)
        for stage in pipe._stages.values():
            for module in stage.modules:
                if isinstance(module, Fickle):
                    module.odd = True
    began = time.monotonic()
    if case == "target rows":
        kind, message = caught(lambda: pipe.step(x, y[:5]))
    elif case == "other batch" and pipe.rank == 1:
        kind, message = caught(lambda: pipe.step(x[:4], y))
    elif case == "silent" and pipe.rank == 1:
        time.sleep(4.0)  # a rank that is busy with something else for longer than the timeout
        kind, message = caught(lambda: pipe.step(x, y))
    elif case == "out of step" and pipe.rank == 1:
        pipe.eval()
        kind, message = caught(lambda: pipe(x))
    else:
        kind, message = caught(lambda: pipe.step(x, y))
    seconds = time.monotonic() - began
    return kind, message, seconds, caught(lambda: pipe.step(x, y))[1]


FAILING = {
    "raises": (1, "PipelineFailure", ["stage 1", "'2' to '3'", "1F0", "KeyError", "no such thing"]),
    "sparse": (1, "BoundaryError", ["stage 1", "sparse", "[1]", "'3'"]),
    "vector loss": (2, "LossError", ["[2]", "micro-batch 0", "loss_reduction"]),
    "number loss": (2, "LossError", ["float", "micro-batch 0"]),
    "detached loss": (2, "LossError", ["detached"]),
    "weight raises": (2, "ZeroDivisionError", ["no weight"]),
    "fickle": (1, "BoundaryError", ["stage 1", "float32[2, 4]", "float32[2, 8]"]),
    "target rows": (2, "InputError", ["[5]", "8 rows"]),
    "other batch": (1, "InputError", ["4 rows, float32[rows, 8]", "8 rows"]),
    "out of step": (1, "ConfigError", ["every rank must call step and forward"]),
}


@pytest.mark.parametrize("case", FAILING)
def test_one_failure_one_story(case: str) -> None:
    culprit, kind, words = FAILING[case]
    results = pipelane.launch(failing_step, 3, case, 3)
    for rank, (found, message, seconds, after) in enumerate(results):
        assert found == (kind if rank == culprit else "PipelineFailure"), (rank, found, message)
        for word in [*words, f"rank {culprit}"] if rank != culprit else words:
            assert word in message, (rank, word, message)
        assert seconds < 5
        assert "broken since an earlier failure" in after


def test_a_rank_that_does_not_come_is_noticed_within_the_timeout() -> None:
    results = pipelane.launch(failing_step, 2, "silent", 2)
    kind, message, seconds, _ = results[0]
    assert kind == "PipelineFailure"
    assert "timeout 2 s" in message
    assert "rank 1" in message
    assert seconds < 10


def killed() -> str:
    pipe = make(nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]), loss_fn=kill_me)
    x, y = batch(8)
    return caught(lambda: pipe.step(x, y))[1]


def test_a_killed_rank_ends_all() -> None:
    began = time.monotonic()
    with pytest.raises(errors.LaunchError, match=r"rank 1 failed:\n.*SIGKILL"):
        pipelane.launch(killed, 2)
    assert time.monotonic() - began < 30


def frozen_and_odd() -> list[str]:
    """A frozen stage, a stage without parameters, fewer micro-batches than stages."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8))
    torch.manual_seed(3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model[0].requires_grad_(False)
    model[3].requires_grad_(False)
    x, y = batch(7)
    pipe = pipelane.Pipeline(
        copy.deepcopy(model), microbatches=2, loss_fn=cross_entropy, partition=[1, 2, 1, 1]
    )
    optimizer = torch.optim.AdamW(pipe.parameters())
    loss = pipe.step(x, y)
    expected = pipelane.reference(model, x, y, loss_fn=cross_entropy, microbatches=2)
    optimizer.step()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    wrong = [] if torch.equal(loss, expected) else ["loss"]
    for name, parameter in pipe.named_parameters():
        one, other = parameter.grad, gradients[name]
        if (one is None) != (other is None) or (one is not None and not torch.equal(one, other)):
            wrong.append(name)
    return wrong


def test_frozen_stages_and_stages_without_parameters() -> None:
    for wrong in pipelane.launch(frozen_and_odd, 4):
        assert wrong == []
