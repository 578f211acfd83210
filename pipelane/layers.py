"""The layers of a model that is a chain."""

from __future__ import annotations

from torch import nn

from pipelane.errors import ModelError

__all__ = ["layers_of"]


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The direct children of an ``nn.Sequential`` with their names, in order.

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
    if type(model).forward is not nn.Sequential.forward:
        raise ModelError(
            f"{kind} derives from nn.Sequential but has its own forward, so it may not be a chain; "
            "put what forward does into layers of a plain nn.Sequential"
        )
    layers = [(name, layer) for name, layer in model._modules.items() if layer is not None]
    if not layers:
        raise ModelError("the model has no layers")
    return layers
