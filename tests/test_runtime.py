"""Gradients and losses over real gloo processes, against one process."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from models import batch, classifier
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy

import pipelane
from pipelane.actions import Kind

SIZES = [1, 2, 3, 4, 8]


def compare(
    pipe: pipelane.Pipeline,
    model: nn.Sequential,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    step: int = 0,
    **options: Any,
) -> list[str]:
    """Run one step in the pipeline and in this process; the names of what is not equal."""
    for parameter in pipe.parameters():
        parameter.grad = None
    model.zero_grad(set_to_none=True)
    m = pipe.schedule.shape.microbatches
    loss = pipe.step(x, y)
    options.setdefault("loss_fn", cross_entropy)
    expected = pipelane.reference(model, x, y, microbatches=m, step=step, **options)
    wrong = [] if torch.equal(loss, expected) else [f"loss {loss} != {expected}"]
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in pipe.named_parameters():
        one, other = parameter.grad, gradients[name]
        if one is None or other is None:
            if one is not other:
                wrong.append(f"{name}: {one} != {other}")
        elif not torch.equal(one, other):
            wrong.append(f"{name}: off by {(one - other).abs().max()}")
    return wrong


def every_schedule(schedules: list[str]) -> list[str]:
    wrong = []
    for name in schedules:
        for m in SIZES:
            model = classifier()
            x, y = batch(2 * m + 1)  # uneven micro-batches unless m is 1
            pipe = pipelane.Pipeline(
                copy.deepcopy(model),
                schedule=name,
                microbatches=m,
                loss_fn=cross_entropy,
                example=x[:2],
            )
            wrong += [f"{name} m={m}: {text}" for text in compare(pipe, model, x, y)]
            held = {id(p) for p in pipe.parameters()}
            if pipe.ranks > 1 and len(held) >= len(list(model.parameters())):
                wrong.append(f"{name} m={m}: rank {pipe.rank} holds every parameter")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_equals_one_process_bit_for_bit(ranks: int) -> None:
    for wrong in pipelane.launch(every_schedule, ranks, ["gpipe", "1f1b", "naive"]):
        assert wrong == []


def two_pipelines() -> list[str]:
    """Ranks 0, 1 and ranks 2, 3 each have a pipeline; the second pair builds one more."""
    rank = torch.distributed.get_rank()
    groups = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    mine = groups[rank // 2]
    model = classifier()
    x, y = batch(6, seed=rank // 2)
    wrong = []
    for _ in range(1 + rank // 2):
        pipe = pipelane.Pipeline(
            copy.deepcopy(model), microbatches=2, loss_fn=cross_entropy, partition=[3, 3],
            group=mine, timeout=20,
        )  # fmt: skip
        if (pipe.rank, pipe.ranks) != (rank % 2, 2):
            wrong.append(f"rank {pipe.rank} of {pipe.ranks}")
        wrong += compare(pipe, model, x, y)
        if len(pipe.gather(rank)) != 2:
            wrong.append("gather")
    return wrong


def test_pipelines_on_a_part_of_the_processes() -> None:
    for wrong in pipelane.launch(two_pipelines, 4):
        assert wrong == []


def masked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output, target, ignore_index=-1)


def counted(target: torch.Tensor) -> int:
    return int((target != -1).sum())


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output, target, reduction="sum")


def whole_batch_losses() -> list[str]:
    """Mean, sum and weighted losses equal those of the whole batch in one piece."""
    x, y = batch(11)
    y[:5] = -1  # the first of four micro-batches counts nothing at all
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("mean", cross_entropy, {}),
        ("sum", summed, {"loss_reduction": "sum"}),
        ("weighted", masked, {"loss_weight": counted}),
    ]
    wrong = []
    for name, loss_fn, options in cases:
        target = y if name == "weighted" else y.clamp(min=0)
        model = classifier()
        pipe = pipelane.Pipeline(
            copy.deepcopy(model), microbatches=4, loss_fn=loss_fn, partition=[3, 3], **options
        )
        wrong += compare(pipe, model, x, target, loss_fn=loss_fn, **options)
        model.zero_grad(set_to_none=True)
        whole = loss_fn(model(x.clone()), target)
        whole.backward()
        loss = pipe.step(x, target)  # gradients add up: twice those of one step
        if not torch.allclose(loss, whole, rtol=1e-5):
            wrong.append(f"{name}: {loss} != {whole}")
        gradients = {key: p.grad for key, p in model.named_parameters()}
        for key, parameter in pipe.named_parameters():
            if not torch.allclose(parameter.grad / 2, gradients[key], rtol=1e-4, atol=1e-6):
                wrong.append(f"{name}: gradient of {key}")
        pipe.close()
    return wrong


def test_the_loss_is_that_of_the_whole_batch() -> None:
    for wrong in pipelane.launch(whole_batch_losses, 2):
        assert wrong == []


def custom_schedules(csv: str) -> list[str]:
    """Two chunks per rank, V placement, a CSV file: the runtime runs whatever is valid."""
    from fake import random_schedule

    rng = random.Random(7)
    model = classifier(9)
    x, y = batch(12)
    wrong = []
    pipe = pipelane.Pipeline(
        copy.deepcopy(model), schedule=csv, microbatches=3, loss_fn=cross_entropy,
        partition=[3, 2, 2, 2],
    )  # fmt: skip
    wrong += compare(pipe, model, x, y)
    tried = 0
    while tried < 25:
        schedule = random_schedule(rng)
        shape = schedule.shape
        if shape.ranks != 2 or shape.stages > 9 or schedule.splits_backward:
            continue
        tried += 1
        sizes = [1] * shape.stages
        sizes[0] += 9 - shape.stages
        pipe = pipelane.Pipeline(
            copy.deepcopy(model), schedule=schedule, microbatches=shape.microbatches,
            loss_fn=cross_entropy, partition=sizes, timeout=30,
        )  # fmt: skip
        for parameter in pipe.parameters():
            parameter.grad = None
        model.zero_grad(set_to_none=True)
        for step in range(2):
            loss = pipe.step(x, y)
            expected = pipelane.reference(
                model, x, y, loss_fn=cross_entropy, microbatches=shape.microbatches, step=step
            )
            if not torch.allclose(loss, expected):
                wrong.append(f"{schedule.orders}: {loss} != {expected}")
        gradients = {name: p.grad for name, p in model.named_parameters()}
        for name, parameter in pipe.named_parameters():
            if not torch.allclose(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6):
                wrong.append(f"{schedule.orders}: {name}")
        peaks = pipe.timeline().peak_activations
        if peaks != pipelane.check(schedule).peak_activations:
            wrong.append(f"{schedule.orders}: peaks {peaks}")
        pipe.close()
    return wrong


def test_random_custom_schedules_run(tmp_path: Path) -> None:
    file = tmp_path / "looped.csv"
    rows = [
        [
            f"{s}{k}{i}"
            for i in range(3)
            for k, s in (("F", r), ("F", r + 2), ("B", r + 2), ("B", r))
        ]
        for r in range(2)
    ]
    file.write_text("\n".join(",".join(row) for row in rows))
    for wrong in pipelane.launch(custom_schedules, 2, str(file)):
        assert wrong == []


class Watched(nn.Linear):
    """Counts how many of its outputs have memory, each time it makes one."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.alive: list[Any] = []
        self.most = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.alive = [ref for ref in self.alive if not ref.expired()]
        self.alive.append(StorageWeakRef(y.untyped_storage()))
        self.most = max(self.most, len(self.alive))
        return y


def outputs_in_memory() -> int:
    """The most outputs of stage 0 in memory at once, 1 MiB each, in a step of known shapes."""
    width = 512
    model = nn.Sequential(Watched(width), nn.Linear(width, width))
    pipe = pipelane.Pipeline(
        model, schedule="gpipe", microbatches=12, loss_fn=torch.nn.functional.mse_loss,
        partition=[1, 1],
    )  # fmt: skip
    x = torch.randn(12 * 512, width)
    pipe.step(x, x)
    (stage,) = pipe._stages.values()
    (layer,) = stage.modules
    if isinstance(layer, Watched):
        layer.most = 0
        pipe.step(x, x)
        return layer.most
    pipe.step(x, x)
    return 0


def test_an_output_that_was_sent_keeps_no_memory() -> None:
    most = pipelane.launch(outputs_in_memory, 2)[0]
    assert 0 < most <= 4  # two on their way, the one just sent, and the one being made


def unknown_key(pipe: pipelane.Pipeline, state: dict[str, Any]) -> dict[str, Any]:
    first = next(iter(pipe.state_dict()), None) or "0.weight"
    return {**state, first.split(".")[0] + ".more": torch.zeros(1)}


def refusal(pipe: pipelane.Pipeline, state: dict[str, Any]) -> str:
    try:
        pipe.load_state_dict(state)
    except pipelane.errors.ModelError as error:
        return str(error)
    return ""


def everything_else() -> list[str]:
    """Timelines, state dicts, modes, names, memory, and the plan."""
    model = classifier(8)
    whole = copy.deepcopy(model)
    x, y = batch(8)
    pipe = pipelane.Pipeline(model, microbatches=4, loss_fn=cross_entropy, example=x[:2])
    wrong = []
    for _ in range(3):
        pipe.step(x, y)
    timeline = pipe.timeline()
    plan = pipe.plan
    assert plan is not None
    if [[s.action for s in row] for row in timeline.spans] != [
        [s.action for s in row] for row in plan.timeline.spans
    ]:
        wrong.append("the measured actions are not the planned ones")
    for row in timeline.spans:
        ends = [t for s in row for t in (s.start, s.end)]
        if ends != sorted(ends) or ends[0] < 0:
            wrong.append("spans overlap or run backwards")
    # A gradient is used on rank 0 only after the last rank has made it.
    made = {s.action.microbatch: s.end for s in timeline.spans[-1] if s.action.kind is Kind.B}
    used = {s.action.microbatch: s.start for s in timeline.spans[0] if s.action.kind is Kind.B}
    if any(used[number] < made[number] for number in made):
        wrong.append("a gradient was used before it was there")
    # Only the own layers are in memory, under their own names.
    names = {name for stage in pipe.partition.stages for name in stage}
    state = pipe.state_dict()
    held = {key for key, value in model.state_dict().items() if value.device.type != "meta"}
    if held != set(state) or len(names) != 8:
        wrong.append(f"held {held}, expected {set(state)}")
    every = {key: value for part in pipe.gather(state) for key, value in part.items()}
    if set(every) != set(whole.state_dict()):
        wrong.append("the ranks' state dicts do not make the model")
    whole.load_state_dict(every)
    pipe.load_state_dict({key: value + 1 for key, value in every.items()})
    if not all(torch.equal(value, every[key] + 1) for key, value in pipe.state_dict().items()):
        wrong.append("load_state_dict")
    before = {key: value.clone() for key, value in pipe.state_dict().items()}
    for bad in ({}, {key: value[:1] for key, value in every.items()}, unknown_key(pipe, every)):
        if refusal(pipe, bad) == "":
            wrong.append("a bad state dict was loaded")
    if not all(torch.equal(value, pipe.state_dict()[key]) for key, value in before.items()):
        wrong.append("a refused state dict was partly loaded")
    pipe.eval()
    if pipe.training or any(m.training for s in pipe._stages.values() for m in s.modules):
        wrong.append("eval")
    return wrong


def test_timeline_state_dict_and_memory() -> None:
    for wrong in pipelane.launch(everything_else, 3):
        assert wrong == []


def changing_sizes() -> list[str]:
    """Other batch sizes and other lengths from step to step, forwards in between."""
    model = nn.Sequential(
        nn.Embedding(11, 8), nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Linear(8, 11)
    )
    torch.manual_seed(0)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output.flatten(0, 1), target.flatten())

    pipe = pipelane.Pipeline(
        copy.deepcopy(model), microbatches=3, loss_fn=loss_fn, partition=[2, 3], seed=5
    )
    for name, value in model.named_parameters():  # every rank drew its own: make them one
        torch.distributed.broadcast(value.data, 0)
        own = dict(pipe.named_parameters())
        if name in own:
            own[name].data.copy_(value.data)
    wrong = []
    shapes = [(6, 4), (7, 4), (3, 9), (6, 4), (11, 2), (7, 4), (3, 1)]
    for number, shape in enumerate(shapes):
        x = torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(number))
        own_x = x if pipe.rank == 0 else None
        own_y = x if pipe.rank == pipe.ranks - 1 else None
        found = compare_with_none(pipe, model, own_x, own_y, x, number, loss_fn)
        wrong += [f"step {number} {shape}: {text}" for text in found]
        for rows in (1, 5):
            z = torch.randint(0, 11, (rows, 3 + number))
            torch.distributed.broadcast(z, 0)
            pipe.eval()
            model.eval()
            out = pipe(z)
            if pipe.rank == pipe.ranks - 1:
                with torch.no_grad():
                    if not torch.allclose(out, model(z), atol=1e-6):
                        wrong.append(f"forward {rows} rows after step {number}")
            elif out is not None:
                wrong.append("a rank without the last stage got an output")
            pipe.train()
            model.train()
    return wrong


def compare_with_none(
    pipe: Any, model: Any, own_x: Any, own_y: Any, x: Any, number: int, loss_fn: Any
) -> list[str]:
    for parameter in pipe.parameters():
        parameter.grad = None
    model.zero_grad(set_to_none=True)
    loss = pipe.step(own_x, own_y)
    expected = pipelane.reference(model, x, x, loss_fn=loss_fn, microbatches=3, seed=5, step=number)
    wrong = [] if torch.equal(loss, expected) else [f"loss {loss} != {expected}"]
    gradients = {name: p.grad for name, p in model.named_parameters()}
    wrong += [
        name for name, p in pipe.named_parameters() if not torch.equal(p.grad, gradients[name])
    ]
    return wrong


def test_sizes_change_from_step_to_step_and_dropout_is_the_same() -> None:
    for wrong in pipelane.launch(changing_sizes, 2):
        assert wrong == []
