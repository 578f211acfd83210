"""DeepSpeed's pipeline engine as a contender, where it is installed.

DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

__all__ = ["deepspeed_step", "installed"]


def installed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def deepspeed_step(
    model: nn.Sequential, microbatches: int, loss_fn: Callable[..., Any], x: Tensor, y: Tensor
) -> Callable[[], Any]:
    """One step of its 1F1B on these layers, one per rank, in the default group on the CPU.

    Its engine has an optimizer of its own, here SGD with a learning rate of 0, and needs all
    micro-batches to be of one size.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed  # type: ignore[import-not-found]
    from deepspeed.pipe import PipelineModule  # type: ignore[import-not-found]

    deepspeed.logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo", verbose=False)
    net = PipelineModule(
        list(model), num_stages=len(model), loss_fn=loss_fn, partition_method="uniform"
    )
    rows = len(x) // microbatches
    engine, *_ = deepspeed.initialize(
        model=net,
        model_parameters=list(net.parameters()),
        config={
            "train_batch_size": len(x),
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": microbatches,
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "steps_per_print": 10**9,
        },
    )

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        return zip(x.split(rows), y.split(rows), strict=True)

    return lambda: engine.train_batch(data_iter=batches())
