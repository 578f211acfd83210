"""The layers of a model that is a chain."""

from __future__ import annotations

from torch import nn

from pipelane.errors import ModelError

__all__ = ["layers_of"]


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The direct children of an ``nn.Sequential`` with their names, in order.

    A layer that appears twice is listed twice (``named_children`` would drop the second).

    Raises:
        ModelError: the model is not a plain chain of layers, or has none.
    """
    kind = type(model).__name__
    if not isinstance(model, nn.Sequential):
        raise ModelError(
            f"the model is {kind}, not an nn.Sequential; this version cuts chains of layers only "
            "(tracing arbitrary modules will come): rewrite it as "
            "nn.Sequential(embedding, block, ..., head)"
        )
    if type(model).forward is not nn.Sequential.forward or "forward" in vars(model):
        raise ModelError(
            f"{kind} is an nn.Sequential with its own forward, so it may not be a chain; "
            "put what forward does into layers of a plain nn.Sequential"
        )
    layers = [(name, layer) for name, layer in model._modules.items() if layer is not None]
    if not layers:
        raise ModelError(
            "the model has no layers; add some, as in nn.Sequential(nn.Linear(8, 8), nn.ReLU())"
        )
    return layers
