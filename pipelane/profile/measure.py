"""Measure or estimate each layer of a chain, one after another."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipelane.backward import edge_of, split_backward
from pipelane.errors import InputError, ProfileError
from pipelane.layers import layers_of
from pipelane.profile.meters import LiveBytes, Roofline, flops_of, storage_of
from pipelane.profile.optimizers import Optimizer, optimizer_name, state_bytes
from pipelane.profile.types import LayerProfile, Profile, SharedParameter, Skip
from pipelane.skips import carrying, routes, skips_of
from pipelane.trees import Inputs, Rows, Structure, flatten, rebuild, split_rows

__all__ = ["profile"]

#: A layer is measured for at least so many seconds ...
_LEAST_SECONDS = 0.03
#: ... but at most so many times as often as asked.
_MOST_FACTOR = 40

#: Called before each layer as ``progress(layers done, layers, name of the next)``.
Progress = Callable[[int, int, str], None]


def profile(
    model: nn.Module,
    example: Any,
    *,
    repeats: int = 5,
    warmup: int = 2,
    device: torch.device | str | None = None,
    progress: Progress | bool | None = None,
    optimizer: Optimizer = "adam",
    method: Literal["measure", "estimate"] = "measure",
    peak_flops: float | None = None,
    memory_bandwidth: float | None = None,
) -> Profile:
    """Measure forward and backward of each layer of an ``nn.Sequential``.

    Layers are measured one after another, each on the output of the one before, and only the one
    that is measured has to be on ``device``. Afterwards the model is as it was: gradients, buffers
    (running statistics), training mode, device of each layer, and torch's random streams.

    Every floating-point input is taken to need a gradient, but for the example itself, unless its
    ``requires_grad`` is set.

    With ``method="estimate"`` nothing is computed: shapes go through the model without data, and
    seconds follow from operations and bytes (see :class:`pipelane.profile.meters.Roofline`). So a
    model that fits nowhere, or was built under ``torch.device("meta")``, gets a profile too. Bytes
    are the same as measured.

    Args:
        model: a chain of layers; see :func:`pipelane.layers.layers_of`.
        example: a typical micro-batch, rows first: a tensor, or a nesting of tensors and other
            values; several arguments of the first layer as :class:`pipelane.Inputs`.
        repeats: least number of measurements per layer, of which the median is taken; at least 1.
            Layers of microseconds are measured more often.
        warmup: runs before them.
        device: where to measure; the example's device if not given.
        progress: True for a bar on standard error, or a function (see :data:`Progress`).
        optimizer: whose state is counted: "adam", "adamw", "momentum", "sgd", or a function from
            parameters to an optimizer.
        method: "measure" or "estimate".
        peak_flops: operations per second of the device, for estimates; measured if not given.
        memory_bandwidth: bytes per second of its memory, for estimates; measured if not given.

    Returns:
        Seconds and bytes per layer.

    Raises:
        ModelError: the model is not a chain.
        ProfileError: bad example, or a layer fails; names the layer.
    """
    layers = layers_of(model)
    ways = routes(layers)
    batch = _check_arguments(example, repeats, warmup, method)
    name_of_optimizer = optimizer_name(optimizer)
    place = torch.device(device) if device is not None else batch.leaves[0].device
    sizes: dict[str, int] = {}
    estimate = method == "estimate"
    measured: list[LayerProfile] = []
    # Ordinary tensors and a graph are needed even if the caller runs without gradients.
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        _same_random_stream(place),
        _progress(progress) as tell,
    ):
        rates = (0.0, 0.0)
        if estimate:
            rates = _rates(place, peak_flops, memory_bandwidth)
        elif place.type == "meta" or any(leaf.is_meta for leaf in batch.leaves):
            raise ProfileError(
                'there is no data on "meta", so nothing can be measured; use method="estimate"'
            )
        # A clone is no inference tensor.
        where = "meta" if estimate else place
        # As in a pipeline: the batch itself needs no gradient unless it says so.
        value = _Value(
            batch.structure,
            [leaf.detach().clone().to(where) for leaf in batch.leaves],
            [leaf.requires_grad for leaf in batch.leaves],
        )
        stashed: dict[str, _Value] = {}
        for index, (name, layer) in enumerate(layers):
            tell(index, len(layers), name)
            pops = {route.name: stashed.pop(route.name) for route in ways if route.target == index}
            task = _Task(name, layer, value, pops, warmup, repeats, optimizer)
            found, value, kept = _layer(task, rates if estimate else None)
            stashed.update(kept)
            sizes.update({one: kept[one].bytes for one in kept})
            measured.append(found)
    first = batch.leaves[batch.split.index(True)]
    return Profile(
        tuple(measured),
        sum(leaf.nbytes for leaf in batch.leaves),
        str(place),
        batch.count,
        0 if estimate else repeats,
        _dtype(first),
        name_of_optimizer,
        "estimated" if estimate else "measured",
        _shared(layers, optimizer),
        tuple(Skip(way.name, way.source, way.target, sizes.get(way.name, 0)) for way in ways),
    )


def _check_arguments(example: object, repeats: int, warmup: int, method: str) -> Rows:
    """The example, with at least one row."""
    if repeats < 1 or warmup < 0:
        raise ProfileError(f"repeats must be >= 1 and warmup >= 0, got {repeats} and {warmup}")
    if method not in ("measure", "estimate"):
        raise ProfileError(f"method must be 'measure' or 'estimate', got {method!r}")
    try:
        batch = split_rows(example, "the example")
    except InputError as error:
        raise ProfileError(f"{error} (got {type(example).__name__})") from None
    for leaf, split in zip(batch.leaves, batch.split, strict=True):
        if split and leaf.numel() == 0:
            raise ProfileError(
                f"the example has shape {list(leaf.shape)}; pass a typical micro-batch with at "
                "least one row"
            )
    return batch


def _shared(
    layers: Sequence[tuple[str, nn.Module]], optimizer: Optimizer
) -> tuple[SharedParameter, ...]:
    """Parameters, or the same piece of memory as parameters, that several layers have."""
    owners: dict[tuple[int, int, int], tuple[str, nn.Parameter, list[int]]] = {}
    for index, (name, layer) in enumerate(layers):
        seen = set()
        for own, parameter in layer.named_parameters():
            # Parts of one flat storage that do not overlap are not shared.
            key = (storage_of(parameter)[0], int(parameter.storage_offset()), parameter.numel())
            if key in seen or parameter.numel() == 0:
                continue
            seen.add(key)
            owners.setdefault(key, (f"{name}.{own}", parameter, []))[2].append(index)
    found = []
    for name, parameter, where in owners.values():
        if len(where) > 1:
            gradient = parameter.nbytes if parameter.requires_grad else 0
            static = parameter.nbytes + gradient + state_bytes([parameter], optimizer)
            found.append(SharedParameter(name, tuple(where), parameter.nbytes, static))
    return tuple(found)


@dataclass(frozen=True)
class _Value:
    """What goes into a layer: tensors, what is around them, and which need a gradient."""

    structure: Structure
    leaves: list[torch.Tensor]
    needs: list[bool]

    @property
    def bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)


def _value_of(result: Any) -> _Value:
    """A layer's result for the next layer.

    Copied: a view or a parameter must not be handed on, for the next layer may overwrite it.
    """
    leaves, structure = flatten(result)
    needs = [leaf.is_floating_point() or leaf.is_complex() for leaf in leaves]
    return _Value(structure, [leaf.detach().clone() for leaf in leaves], needs)


@dataclass(frozen=True)
class _Task:
    """A layer and what it is measured on: its input, and the skip values that it pops."""

    name: str
    layer: nn.Module
    value: _Value
    pops: dict[str, _Value]
    warmup: int
    repeats: int
    optimizer: Optimizer

    @property
    def where(self) -> str:
        return f"layer {self.name!r} ({type(self.layer).__name__})"

    @property
    def device(self) -> torch.device:
        """Where it is measured; a value without tensors is with the parameters."""
        for one in (*self.value.leaves, *self.layer.parameters()):
            return one.device
        return torch.device("cpu")

    @property
    def inputs(self) -> list[torch.Tensor]:
        """All tensors that come in."""
        return [leaf for one in (self.value, *self.pops.values()) for leaf in one.leaves]

    def input(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Copies of the tensors that may be overwritten, and leaves whose gradients are wanted."""
        given, leaves = [], []
        for one in (self.value, *self.pops.values()):
            for value, needs in zip(one.leaves, one.needs, strict=True):
                if needs:
                    # Autograd lets no layer overwrite a leaf, so it is given a copy of one.
                    leaf = value.detach().requires_grad_()
                    leaves.append(leaf)
                    given.append(leaf.clone())
                else:
                    given.append(value.clone())
        return given, leaves

    def call(self, given: list[torch.Tensor]) -> tuple[Any, dict[str, Any]]:
        """Run the layer: what it returns, and what it stashes. Empties ``given``."""
        count = self.value.structure.count
        value = rebuild(self.value.structure, given[:count])
        values = {}
        for name, one in self.pops.items():
            values[name] = rebuild(one.structure, given[count : count + one.structure.count])
            count += one.structure.count
        given.clear()
        stashes, pops = skips_of(self.layer)
        with carrying(values) as scope:
            scope.layer, scope.stashes, scope.pops = self.name, frozenset(stashes), frozenset(pops)
            if isinstance(value, Inputs):
                return self.layer(*value.args, **value.kwargs), values
            return self.layer(value), values

    def run(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the layer: the tensors that come out and need a gradient."""
        result, stashed = self.call(given)
        return [leaf for leaf in flatten((result, stashed))[0] if leaf.requires_grad]


@dataclass(frozen=True)
class _Times:
    """Seconds, and spreads of the first two."""

    forward: float
    backward: float
    input_grad: float
    weight_grad: float
    forward_spread: float = 0.0
    backward_spread: float = 0.0


def _layer(
    task: _Task, rates: tuple[float, float] | None
) -> tuple[LayerProfile, _Value, dict[str, _Value]]:
    """The layer's profile, measured or (with rates) estimated; its output, and what it stashed."""
    layer = task.layer
    parameters = list(layer.parameters())
    if any(is_lazy(p) for p in (*parameters, *layer.buffers())):
        raise ProfileError(
            f"{task.where} has no sizes yet; call the model once on the example before"
        )
    try:
        if rates is not None:
            task = _Task(**{**vars(task), "layer": _without_data(layer)})
            found = _bytes(task)
            times = _estimated(task, *rates)
        else:
            with _unchanged(layer, task.device):
                found = _bytes(task)
                times = _timed(task)
    except ProfileError:
        raise
    except Exception as error:
        how = "cannot be estimated without data" if rates is not None else "failed"
        inputs = ", ".join(f"{_dtype(one)} {list(one.shape)}" for one in task.inputs)
        raise ProfileError(
            f"{task.where} {how} on an input of shape {inputs}, on {task.device}: "
            f"{type(error).__name__}: {error}"
        ) from error
    output = found.output
    first = output.leaves[0] if output.leaves else torch.empty(0)
    profiled = LayerProfile(
        name=task.name,
        kind=type(layer).__name__,
        forward_seconds=times.forward,
        backward_seconds=times.backward,
        parameter_bytes=sum(p.nbytes for p in parameters),
        activation_bytes=found.kept,
        output_bytes=output.bytes,
        output_shape=tuple(first.shape),
        output_dtype=_dtype(first),
        input_grad_seconds=times.input_grad,
        weight_grad_seconds=times.weight_grad,
        forward_spread=times.forward_spread,
        backward_spread=times.backward_spread,
        gradient_bytes=sum(p.nbytes for p in parameters if p.requires_grad),
        optimizer_bytes=state_bytes(parameters, task.optimizer),
        weight_grad_bytes=found.held,
        temporary_bytes=found.temporary,
        flops=found.flops,
    )
    return profiled, output, found.stashed


@dataclass(frozen=True)
class _Bytes:
    """What a run without a clock shows."""

    output: _Value
    stashed: dict[str, _Value]
    kept: int
    held: int
    temporary: int
    flops: int


def _bytes(task: _Task) -> _Bytes:
    output, stashed, kept = _saved(task)
    held, temporary = _live(task)
    given, _ = task.input()
    flops = flops_of(lambda: task.call(given))
    return _Bytes(output, stashed, kept, held, temporary, flops)


def _saved(task: _Task) -> tuple[_Value, dict[str, _Value], int]:
    """The output, what was stashed, and the bytes that autograd saved for the backward.

    Each storage counts once: views and in-place results share one with their base. A separate run,
    because the hooks cost time.
    """
    layer = task.layer
    own = {storage_of(t)[0] for t in (*layer.parameters(), *layer.buffers())}
    saved: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        key, size = storage_of(tensor)
        if key not in own:
            saved[key] = size, tensor  # held, so that no other storage gets its place
        return tensor

    given, _ = task.input()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output, stashed = task.call(given)
    kept = {name: _value_of(one) for name, one in stashed.items()}
    return _value_of(output), kept, sum(size for size, _ in saved.values())


def _live(task: _Task) -> tuple[int, int]:
    """Bytes held from I to W, and most temporary bytes of forward and whole backward."""
    layer = task.layer
    # The input itself is the output of the layer before; its copy here stands for it.
    own = (*layer.parameters(), *layer.buffers(), *task.inputs)
    _clear(layer)
    with LiveBytes(own) as live:
        given, leaves = task.input()
        outputs = task.run(given)
        temporary = live.peak - live.now()
        if not outputs:
            return 0, temporary
        edges, gradients = list(map(edge_of, outputs)), list(map(torch.ones_like, outputs))
        del outputs
        inputs, rest = split_backward(edges, gradients, leaves)
        del inputs, leaves, gradients, edges
        held = live.now()
        rest.run()
        del rest
    _clear(layer)
    with LiveBytes(own) as live:
        given, leaves = task.input()
        outputs = task.run(given)
        gradients = list(map(torch.ones_like, outputs))
        live.restart()
        before = live.now()
        torch.autograd.backward(outputs, gradients)
        del outputs, gradients
        temporary = max(temporary, live.peak - max(before, live.now()))
        del leaves
    _clear(layer)
    return held, max(0, temporary)


def _clear(layer: nn.Module) -> None:
    for parameter in layer.parameters():
        parameter.grad = None


def _timed(task: _Task) -> _Times:
    """Median seconds of forward, of the whole backward, and of its two halves.

    Quick layers are measured more often than asked: a few runs of microseconds would all fall into
    one moment in which the system was busy with something else.
    """
    whole: list[tuple[float, float]] = []
    halves: list[tuple[float, float]] = []
    ends = perf_counter() + _LEAST_SECONDS
    for run in range(task.warmup + _MOST_FACTOR * task.repeats):
        if len(whole) >= task.repeats and perf_counter() > ends:
            break
        found = _run_whole(task)
        split = _run_halves(task) if found[1] else (0.0, 0.0)
        if run >= task.warmup:
            whole.append(found)
            halves.append(split)
    forward, backward = ([entry[i] for entry in whole] for i in (0, 1))
    input_grad, weight_grad = (median(entry[i] for entry in halves) for i in (0, 1))
    spreads = _spread(forward), _spread(backward)
    return _Times(median(forward), median(backward), input_grad, weight_grad, *spreads)


def _run_whole(task: _Task) -> tuple[float, float]:
    """Seconds of forward and of backward, 0 if nothing needs a gradient."""
    place = task.device
    given, _ = task.input()
    _synchronize(place)
    began = perf_counter()
    outputs = task.run(given)
    _synchronize(place)
    forward = perf_counter() - began
    if not outputs:
        return forward, 0.0
    gradients = list(map(torch.ones_like, outputs))
    return forward, _seconds(place, lambda: torch.autograd.backward(outputs, gradients))


def _run_halves(task: _Task) -> tuple[float, float]:
    """Seconds of I and of W; 0 for what there is not."""
    place = task.device
    given, leaves = task.input()
    outputs = task.run(given)
    edges, gradients = list(map(edge_of, outputs)), list(map(torch.ones_like, outputs))
    del outputs
    rest: list[Callable[[], None]] = []
    first = _seconds(place, lambda: rest.append(split_backward(edges, gradients, leaves)[1].run))
    second = _seconds(place, rest[0])
    trains = any(p.requires_grad for p in task.layer.parameters())
    return first if leaves else 0.0, second if trains else 0.0


def _seconds(place: torch.device, run: Callable[[], object]) -> float:
    _synchronize(place)
    began = perf_counter()
    run()
    _synchronize(place)
    return perf_counter() - began


def _spread(values: Sequence[float]) -> float:
    """Interquartile range over median."""
    middle = median(values)
    if len(values) < 2 or not middle:
        return 0.0
    low, _, high = quantiles(values, n=4)
    return max(0.0, (high - low) / middle)


# -- estimates -----------------------------------------------------------------------------------


def _without_data(layer: nn.Module) -> nn.Module:
    """A copy of a layer whose tensors have shapes only; the layer is not copied on the way."""
    memo: dict[int, object] = {}
    for parameter in layer.parameters():
        empty = torch.empty_like(parameter, device="meta", requires_grad=False)
        memo[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    for buffer in layer.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(layer, memo)


def _estimated(task: _Task, flops: float, bandwidth: float) -> _Times:
    def roof(run: Callable[[], object]) -> float:
        with Roofline(flops, bandwidth) as mode:
            run()
        seconds: float = mode.seconds
        return seconds

    _clear(task.layer)
    given, leaves = task.input()
    outputs: list[torch.Tensor] = []
    forward = roof(lambda: outputs.extend(task.run(given)))
    if not outputs:
        return _Times(forward, 0.0, 0.0, 0.0)
    gradients = list(map(torch.ones_like, outputs))
    halves: list[Callable[[], None]] = []

    def first_half() -> None:
        halves.append(split_backward(outputs, gradients, leaves)[1].run)

    input_grad = roof(first_half)
    weight_grad = roof(halves[0])
    _clear(task.layer)
    again = task.run(task.input()[0])
    whole = roof(lambda: torch.autograd.backward(again, gradients))
    return _Times(forward, whole, input_grad, weight_grad)


def _rates(
    place: torch.device, flops: float | None, bandwidth: float | None
) -> tuple[float, float]:
    """Of the device, from a matrix product and a copy, unless given."""
    for what, value in (("peak_flops", flops), ("memory_bandwidth", bandwidth)):
        if value is not None and not value > 0:
            raise ProfileError(f"{what} must be above 0, got {value}")
    where = torch.device("cpu") if place.type == "meta" else place
    if flops is None:
        a = torch.randn(768, 768, device=where)
        flops = 2.0 * 768**3 / _fastest(where, lambda: a @ a)
    if bandwidth is None:
        source = torch.randn(2**22, device=where)
        target = torch.empty_like(source)
        bandwidth = 2 * source.nbytes / _fastest(where, lambda: target.copy_(source))
    return float(flops), float(bandwidth)


def _fastest(place: torch.device, run: Callable[[], object]) -> float:
    return min(_seconds(place, run) for _ in range(8))


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
