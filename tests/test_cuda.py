"""The same over NCCL; runs where there are GPUs."""

from __future__ import annotations

import copy

import pytest
import torch
from models import batch, classifier
from torch.nn.functional import cross_entropy

import pipelane

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_gpu(schedule: str) -> list[str]:
    model = classifier()
    pipe = pipelane.Pipeline(
        copy.deepcopy(model),
        schedule=schedule,
        microbatches=4,
        loss_fn=cross_entropy,
        example=batch(2)[0],
    )
    model = model.to(pipe.device)
    wrong = [] if pipe.device.type == "cuda" else [f"ran on {pipe.device}"]
    for rows in (8, 9, 4):
        x, y = (value.to(pipe.device) for value in batch(rows))
        model.zero_grad()
        for parameter in pipe.parameters():
            parameter.grad = None
        loss = pipe.step(x, y)
        expected = pipelane.reference(model, x, y, loss_fn=cross_entropy, microbatches=4)
        if not torch.allclose(loss, expected):
            wrong.append(f"loss {loss} != {expected}")
        gradients = {name: p.grad for name, p in model.named_parameters()}
        wrong += [
            name
            for name, p in pipe.named_parameters()
            if not torch.allclose(p.grad, gradients[name], atol=1e-6)
        ]
    measured = pipe.timeline()
    if not measured.makespan > 0:
        wrong.append("no timeline")
    return wrong


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_one_gpu_per_rank(schedule: str) -> None:
    for wrong in pipelane.launch(on_gpu, min(4, torch.cuda.device_count()), schedule):
        assert wrong == []
