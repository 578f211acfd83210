"""Measure each layer of a chain: seconds and bytes, for one micro-batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from pipelane.errors import ConfigError, ProfileError
from pipelane.layers import layers_of

__all__ = ["LayerProfile", "Profile", "profile"]

SCHEMA = 1


@dataclass(frozen=True)
class LayerProfile:
    """One layer, for one micro-batch.

    Attributes:
        name: its name in the model.
        kind: its class.
        forward_seconds, backward_seconds: medians; the backward is 0 where nothing needs one.
        parameter_bytes: bytes of its parameters.
        activation_bytes: bytes that autograd keeps from forward to backward, each storage once,
            the layer's own parameters and buffers left out.
        output_bytes, output_shape, output_dtype: what crosses a stage boundary behind it.
    """

    name: str
    kind: str
    forward_seconds: float
    backward_seconds: float
    parameter_bytes: int
    activation_bytes: int
    output_bytes: int
    output_shape: tuple[int, ...]
    output_dtype: str

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class Profile:
    """All layers of a chain, in order.

    Attributes:
        layers: one entry per layer.
        rows: rows of the example, that is of the micro-batch.
        input_bytes: bytes of the example.
        device: where it was measured.
        repeats: measurements behind each median.
    """

    layers: tuple[LayerProfile, ...]
    rows: int
    input_bytes: int
    device: str
    repeats: int

    def to_json(self) -> str:
        """A JSON object with a schema number; the reverse of :meth:`from_json`."""
        return json.dumps({"schema": SCHEMA, "kind": "pipelane.profile", **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read what :meth:`to_json` wrote.

        Raises:
            ConfigError: not such an object, or written by a newer schema.
        """
        try:
            data = json.loads(text)
            if data.pop("kind") != "pipelane.profile" or data.pop("schema") > SCHEMA:
                raise ConfigError("not a profile that this version reads")
            layers = [
                LayerProfile(**{**layer, "output_shape": tuple(layer["output_shape"])})
                for layer in data.pop("layers")
            ]
            return cls(tuple(layers), **data)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ConfigError(f"not a profile in JSON: {error!r}") from error


def profile(
    model: nn.Module,
    example: torch.Tensor,
    *,
    repeats: int = 5,
    warmup: int = 2,
    device: torch.device | str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Profile:
    """Measure forward and backward of each layer of an ``nn.Sequential``.

    Only one layer at a time is on ``device``. Nothing of the model is changed: gradients, buffers
    (running statistics), modes and the random stream are as before.

    Args:
        model: a chain of layers; see :func:`pipelane.layers.layers_of`.
        example: a typical micro-batch, rows first.
        repeats: measurements per layer, of which the median is taken; at least 1.
        warmup: runs before them.
        device: where to measure; the example's device if not given.
        progress: called as ``progress(layers done, layers, name of the next)``.

    Raises:
        ModelError: the model is not a chain.
        ProfileError: bad example, or a layer fails or does not return one tensor; names the layer.
    """
    layers = layers_of(model)
    if repeats < 1 or warmup < 0:
        raise ProfileError(f"repeats must be >= 1 and warmup >= 0, got {repeats} and {warmup}")
    if not isinstance(example, torch.Tensor):
        raise ProfileError(
            f"the example is {type(example).__name__}; pass one tensor, rows first, as the first "
            "layer takes it"
        )
    if example.dim() == 0 or example.numel() == 0:
        raise ProfileError(
            f"the example has shape {list(example.shape)}; pass a typical micro-batch with at "
            "least one row"
        )
    place = torch.device(device) if device is not None else example.device
    value = example.detach().to(place)
    measured: list[LayerProfile] = []
    with _untouched_stream(place):
        for index, (name, layer) in enumerate(layers):
            if progress is not None:
                progress(index, len(layers), name)
            found, value = _measure(name, layer, value, place, warmup, repeats)
            measured.append(found)
    return Profile(tuple(measured), len(example), example.nbytes, str(place), repeats)


def _measure(
    name: str, layer: nn.Module, value: torch.Tensor, device: torch.device, warmup: int, repeats: int
) -> tuple[LayerProfile, torch.Tensor]:
    """The layer's profile, and its output for the next layer."""
    where = f"layer {name!r} ({type(layer).__name__})"
    home = next((p.device for p in layer.parameters()), device)
    forward: list[float] = []
    backward: list[float] = []
    kept = 0
    output: Any = None
    with _untouched(layer):
        if home != device:
            layer.to(device)
        try:
            for run in range(warmup + repeats):
                _synchronize(device)
                began = perf_counter()
                if run == 0:
                    output, kept = _forward_with_memory(layer, value)
                else:
                    output = _forward(layer, value)
                _synchronize(device)
                between = perf_counter()
                _check_output(output, where)
                needs_backward = output.requires_grad
                gradient = torch.ones_like(output) if needs_backward else None
                _synchronize(device)
                resumed = perf_counter()
                if needs_backward:
                    torch.autograd.backward((output,), (gradient,))
                _synchronize(device)
                if run >= warmup:
                    forward.append(between - began)
                    backward.append(perf_counter() - resumed if needs_backward else 0.0)
        except ProfileError:
            raise
        except Exception as error:
            raise ProfileError(
                f"{where} failed on an input of shape {list(value.shape)}, {value.dtype}: "
                f"{type(error).__name__}: {error}"
            ) from error
        finally:
            if home != device:
                layer.to(home)
    result = LayerProfile(
        name=name,
        kind=type(layer).__name__,
        forward_seconds=median(forward),
        backward_seconds=median(backward),
        parameter_bytes=sum(p.nbytes for p in layer.parameters()),
        activation_bytes=kept,
        output_bytes=output.nbytes,
        output_shape=tuple(output.shape),
        output_dtype=str(output.dtype).removeprefix("torch."),
    )
    return result, output.detach()


def _forward(layer: nn.Module, value: torch.Tensor) -> Any:
    """Run the layer on a copy that needs a gradient and may be overwritten."""
    given = value.clone()
    if given.is_floating_point() or given.is_complex():
        given = given.requires_grad_().clone()
    with torch.enable_grad():
        return layer(given)


def _forward_with_memory(layer: nn.Module, value: torch.Tensor) -> tuple[Any, int]:
    """Also the bytes that autograd saved, each storage once, the layer's own tensors left out."""
    own = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *layer.buffers())}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = _forward(layer, value)
    return output, sum(saved.values())


def _check_output(output: object, where: str) -> None:
    if not isinstance(output, torch.Tensor):
        raise ProfileError(
            f"{where} returned {type(output).__name__}; in this version each layer must return "
            "exactly one tensor"
        )


@contextmanager
def _untouched(layer: nn.Module) -> Iterator[None]:
    """Put gradients and buffers back at the end."""
    gradients = [(p, p.grad) for p in layer.parameters()]
    buffers = [(b, b.detach().clone()) for b in layer.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in zip(layer.buffers(), [b for _, b in buffers], strict=True):
                buffer.copy_(before)


@contextmanager
def _untouched_stream(device: torch.device) -> Iterator[None]:
    devices: Sequence[torch.device] = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
