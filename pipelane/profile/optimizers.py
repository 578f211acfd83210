"""How many bytes an optimizer keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pipelane.errors import ProfileError

__all__ = ["Optimizer", "optimizer_name", "state_bytes"]

#: A name, or a function from parameters to an optimizer, such as ``torch.optim.Adagrad``.
Optimizer = str | Callable[[Any], torch.optim.Optimizer]

#: Copies of a parameter that the state holds.
_COPIES = {"adam": 2, "adamw": 2, "momentum": 1, "sgd": 0}


def optimizer_name(optimizer: Optimizer) -> str:
    """What it is called.

    Raises:
        ProfileError: an unknown name.
    """
    if not isinstance(optimizer, str):
        return str(getattr(optimizer, "__name__", type(optimizer).__name__))
    if optimizer.lower() not in _COPIES:
        raise ProfileError(
            f"unknown optimizer {optimizer!r}; one of {', '.join(_COPIES)}, or a function that "
            "makes one from parameters"
        )
    return optimizer.lower()


def state_bytes(parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> int:
    """Bytes of the state for these parameters, of those that need a gradient."""
    trained = [p for p in parameters if p.requires_grad]
    if isinstance(optimizer, str):
        return _COPIES[optimizer.lower()] * sum(p.nbytes for p in trained)
    if not trained:
        return 0
    # One step without data: "meta" tensors have shapes only.
    copies = [nn.Parameter(torch.empty_like(p, device="meta")) for p in trained]
    for copy in copies:
        copy.grad = torch.empty_like(copy)
    try:
        made = optimizer(copies)
        made.step()
    except Exception as error:
        raise ProfileError(
            f"the optimizer {optimizer_name(optimizer)} failed on parameters without data: "
            f"{type(error).__name__}: {error}; name one of {', '.join(_COPIES)} instead"
        ) from error
    return sum(
        value.nbytes
        for state in made.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
