"""Measure each layer of a chain: seconds and bytes, for one micro-batch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipelane.errors import ConfigError, ProfileError
from pipelane.layers import layers_of

__all__ = ["LayerProfile", "Profile", "profile"]

SCHEMA = 1
#: Bytes per byte of parameters: the parameter, its gradient, and two optimizer states (Adam).
STATIC_COPIES = 4
_KIND = "pipelane.profile"

#: A layer is measured for at least so many seconds ...
_LEAST_SECONDS = 0.03
#: ... but at most so many times as often as asked.
_MOST_FACTOR = 40

#: Called before each layer as ``progress(layers done, layers, name of the next)``.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class LayerProfile:
    """One layer, for one micro-batch.

    Attributes:
        name: its name in the model.
        kind: its class.
        forward_seconds: median seconds of the forward.
        backward_seconds: median seconds of the whole backward (input and weight gradients);
            0 where nothing needs a gradient.
        parameter_bytes: bytes of its parameters, each once.
        activation_bytes: bytes that autograd keeps from forward to backward, each storage once;
            the layer's own parameters and buffers are left out, its input counts if it is kept.
        output_bytes: bytes of its output: what crosses a stage boundary behind it.
        output_shape: shape of its output.
        output_dtype: dtype of its output, such as "float32".
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
    def static_bytes(self) -> int:
        """What is held all the time: parameters, gradients, and two optimizer states (Adam)."""
        return STATIC_COPIES * self.parameter_bytes

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class Profile:
    """All layers of a chain, in order.

    Attributes:
        layers: one entry per layer.
        input_bytes: bytes of the example.
        device: where it was measured, such as "cpu" or "cuda:0".
        batch: rows of the example, that is the size of the micro-batch.
        repeats: least number of measurements behind each median.
    """

    layers: tuple[LayerProfile, ...]
    input_bytes: int
    device: str
    batch: int
    repeats: int

    def to_json(self) -> str:
        """A JSON object with a schema number; the reverse of :meth:`from_json`."""
        return json.dumps({"schema": SCHEMA, "kind": _KIND, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read what :meth:`to_json` wrote.

        Raises:
            ConfigError: not such an object, or written by a newer schema.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            if data["kind"] != _KIND or not 1 <= data["schema"] <= SCHEMA:
                raise ConfigError(
                    f"not a profile that this version reads: kind {data['kind']!r}, schema "
                    f"{data['schema']}; expected {_KIND!r}, schema <= {SCHEMA}"
                )
            return cls(
                layers=tuple(
                    _layer_from(number, entry) for number, entry in enumerate(data["layers"])
                ),
                input_bytes=int(data["input_bytes"]),
                device=str(data["device"]),
                batch=int(data["batch"]),
                repeats=int(data["repeats"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"not a profile in JSON: {error!r}; write one with Profile.to_json()"
            ) from error


def _layer_from(number: int, entry: dict[str, Any]) -> LayerProfile:
    values = {field.name: entry[field.name] for field in fields(LayerProfile)}
    values["output_shape"] = tuple(map(int, values["output_shape"]))
    for key, value in values.items():
        if key.endswith(("_seconds", "_bytes")) and not (math.isfinite(value) and value >= 0):
            raise ConfigError(
                f"layer {number} ({values['name']!r}): {key} must be finite and >= 0, got {value}"
            )
    return LayerProfile(**values)


def profile(
    model: nn.Module,
    example: torch.Tensor,
    *,
    repeats: int = 5,
    warmup: int = 2,
    device: torch.device | str | None = None,
    progress: Progress | bool | None = None,
) -> Profile:
    """Measure forward and backward of each layer of an ``nn.Sequential``.

    Layers are measured one after another, each on the output of the one before, and only the one
    that is measured has to be on ``device``. Afterwards the model is as it was: gradients, buffers
    (running statistics), training mode, device of each layer, and torch's random streams.

    Every floating-point input is taken to need a gradient, but for the example itself, unless its
    ``requires_grad`` is set.

    Args:
        model: a chain of layers; see :func:`pipelane.layers.layers_of`.
        example: a typical micro-batch, rows first.
        repeats: least number of measurements per layer, of which the median is taken; at least 1.
            Layers of microseconds are measured more often.
        warmup: runs before them.
        device: where to measure; the example's device if not given.
        progress: True for a bar on standard error, or a function (see :data:`Progress`).

    Returns:
        Seconds and bytes per layer.

    Raises:
        ModelError: the model is not a chain.
        ProfileError: bad example, or a layer fails or does not return one tensor; names the layer.
    """
    layers = layers_of(model)
    _check_arguments(example, repeats, warmup)
    place = torch.device(device) if device is not None else example.device
    measured: list[LayerProfile] = []
    # Ordinary tensors and a graph are needed even if the caller runs without gradients.
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        _same_random_stream(place),
        _progress(progress) as tell,
    ):
        value = example.detach().clone().to(place)  # a clone is no inference tensor
        for index, (name, layer) in enumerate(layers):
            tell(index, len(layers), name)
            # As in a pipeline: the batch itself needs no gradient unless it says so.
            needs_gradient = index > 0 or example.requires_grad
            found, value = _measure(name, layer, value, needs_gradient, warmup, repeats)
            measured.append(found)
    return Profile(tuple(measured), example.nbytes, str(place), len(example), repeats)


def _check_arguments(example: object, repeats: int, warmup: int) -> None:
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


def _measure(
    name: str,
    layer: nn.Module,
    value: torch.Tensor,
    needs_gradient: bool,
    warmup: int,
    repeats: int,
) -> tuple[LayerProfile, torch.Tensor]:
    """The layer's profile, and its output for the next layer."""
    where = f"layer {name!r} ({type(layer).__name__})"
    if any(is_lazy(p) for p in (*layer.parameters(), *layer.buffers())):
        raise ProfileError(f"{where} has no sizes yet; call the model once on the example before")
    try:
        with _unchanged(layer, value.device):
            output, kept = _run_with_memory(layer, value, needs_gradient, where)
            forward, backward = _run_timed(layer, value, needs_gradient, warmup, repeats)
            parameter_bytes = sum(p.nbytes for p in layer.parameters())
    except ProfileError:
        raise
    except Exception as error:
        raise ProfileError(
            f"{where} failed on an input of shape {list(value.shape)}, {_dtype(value)}, on "
            f"{value.device}: {type(error).__name__}: {error}"
        ) from error
    result = LayerProfile(
        name=name,
        kind=type(layer).__name__,
        forward_seconds=forward,
        backward_seconds=backward,
        parameter_bytes=parameter_bytes,
        activation_bytes=kept,
        output_bytes=output.nbytes,
        output_shape=tuple(output.shape),
        output_dtype=_dtype(output),
    )
    return result, output


def _run_timed(
    layer: nn.Module, value: torch.Tensor, needs_gradient: bool, warmup: int, repeats: int
) -> tuple[float, float]:
    """Median seconds of forward and of backward.

    Quick layers are measured more often than asked: a few runs of microseconds would all fall into
    one moment in which the system was busy with something else.
    """
    forward: list[float] = []
    backward: list[float] = []
    ends = perf_counter() + _LEAST_SECONDS
    for run in range(warmup + _MOST_FACTOR * repeats):
        if len(forward) >= repeats and perf_counter() > ends:
            break
        given = _input(value, needs_gradient)
        _synchronize(value.device)
        began = perf_counter()
        output = layer(given)
        _synchronize(value.device)
        forward_seconds = perf_counter() - began
        backward_seconds = 0.0
        if output.requires_grad:
            gradient = torch.ones_like(output)
            _synchronize(value.device)
            began = perf_counter()
            torch.autograd.backward((output,), (gradient,))
            _synchronize(value.device)
            backward_seconds = perf_counter() - began
        if run >= warmup:
            forward.append(forward_seconds)
            backward.append(backward_seconds)
        # Held any longer, this run's graph would be in memory together with the next one's.
        del given, output
    return median(forward), median(backward)


def _run_with_memory(
    layer: nn.Module, value: torch.Tensor, needs_gradient: bool, where: str
) -> tuple[torch.Tensor, int]:
    """The output, and the bytes that autograd saved for the backward.

    Each storage counts once: views and in-place results share one with their base. A separate run,
    because the hooks cost time.
    """
    own = {_storage(t)[0] for t in (*layer.parameters(), *layer.buffers())}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        key, size = _storage(tensor)
        if key not in own:
            saved[key] = size
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(_input(value, needs_gradient))
    if not isinstance(output, torch.Tensor):
        raise ProfileError(
            f"{where} returned {type(output).__name__}; in this version each layer must return "
            "exactly one tensor"
        )
    # Copied: a view or a parameter must not be handed to the next layer, which may overwrite it.
    return output.detach().clone(), sum(saved.values())


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """What identifies the memory behind a tensor, and its bytes."""
    if tensor.layout is not torch.strided:
        return id(tensor), tensor.nbytes
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _input(value: torch.Tensor, needs_gradient: bool) -> torch.Tensor:
    """A copy of the layer's input that may be overwritten, and needs a gradient where it can."""
    if needs_gradient and (value.is_floating_point() or value.is_complex()):
        # Autograd lets no layer overwrite a leaf, so it is given a copy of one.
        return value.detach().requires_grad_().clone()
    return value.clone()


@contextmanager
def _unchanged(layer: nn.Module, device: torch.device) -> Iterator[None]:
    """Have the layer on ``device``; then put its tensors, values and gradients back."""
    # Also where they hang: a move to another device may replace them, and a layer may assign.
    places = [
        (table, key, tensor)
        for owner in layer.modules()
        for table in (owner._parameters, owner._buffers)
        for key, tensor in table.items()
    ]
    parameters = [(p, p.data, p.grad) for p in layer.parameters()]
    buffers = [(b, b.detach().clone()) for b in layer.buffers()]
    for parameter, _, _ in parameters:
        parameter.grad = None
    try:
        layer.to(device)
        yield
    finally:
        for table, key, tensor in places:
            table[key] = tensor  # type: ignore[assignment]
        for parameter, data, gradient in parameters:
            parameter.grad = None
            if parameter.device != data.device:
                parameter.data = data
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


@contextmanager
def _same_random_stream(device: torch.device) -> Iterator[None]:
    """Put torch's random streams, of the CPU and of the device, back at the end."""
    if device.type in ("cpu", "meta"):
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        with torch.random.fork_rng(devices=[device], device_type=device.type):
            yield


@contextmanager
def _progress(wanted: Progress | bool | None) -> Iterator[Progress]:
    """The function to tell about progress."""
    if wanted is None or wanted is False:
        yield lambda done, layers, name: None
    elif wanted is True:
        with _bar() as tell:
            yield tell
    else:
        yield wanted


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("profile"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[name]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", name="")

        def tell(done: int, layers: int, name: str) -> None:
            # Layer names are a user's text, not rich's markup.
            bar.update(task, completed=done, total=layers, name=name.replace("[", r"\["))

        yield tell


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _synchronize(device: torch.device) -> None:
    """Wait for what was queued on the device, so that the clock reads its end."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)
