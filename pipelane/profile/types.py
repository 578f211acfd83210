"""What a profile holds, and its JSON form."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from pipelane.errors import ConfigError
from pipelane.files import read_text, write_text

__all__ = ["LayerProfile", "Profile", "SharedParameter", "Skip"]

#: 1: the whole backward only. 2: I and W apart, gradients and optimizer state, shared parameters.
SCHEMA = 2
_KIND = "pipelane.profile"


@dataclass(frozen=True)
class LayerProfile:
    """One layer, for one micro-batch.

    What is not given follows from the rest, as in files of older versions: I and W are halves of
    the backward, the gradient is as large as the parameters, and an optimizer with two states
    (Adam) is taken.

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
        input_grad_seconds: median seconds of the input gradient alone (I), of a backward that is
            split; of the whole backward where the layer's operations cannot be split.
        weight_grad_seconds: of the weight gradient alone (W).
        forward_spread: interquartile range of the forward's seconds over their median.
        backward_spread: the same of the whole backward.
        gradient_bytes: bytes of the gradients of its parameters.
        optimizer_bytes: bytes of the optimizer's state for its parameters.
        weight_grad_bytes: bytes held from I to W, arrived gradients included.
        temporary_bytes: most bytes alive in the midst of forward or backward beyond what is alive
            at its ends; workspace inside of kernels is not seen.
        flops: floating-point operations of the forward, as torch.utils.flop_counter counts them.
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
    input_grad_seconds: float = math.nan
    weight_grad_seconds: float = math.nan
    forward_spread: float = 0.0
    backward_spread: float = 0.0
    gradient_bytes: int = -1
    optimizer_bytes: int = -1
    weight_grad_bytes: int = -1
    temporary_bytes: int = 0
    flops: int = 0

    def __post_init__(self) -> None:
        half = self.backward_seconds / 2
        for name, unknown, value in (
            ("input_grad_seconds", math.isnan(self.input_grad_seconds), half),
            ("weight_grad_seconds", math.isnan(self.weight_grad_seconds), half),
            ("gradient_bytes", self.gradient_bytes < 0, self.parameter_bytes),
            ("optimizer_bytes", self.optimizer_bytes < 0, 2 * self.parameter_bytes),
            ("weight_grad_bytes", self.weight_grad_bytes < 0, self.activation_bytes),
        ):
            if unknown:
                object.__setattr__(self, name, value)

    @property
    def seconds(self) -> float:
        """Forward and whole backward together."""
        return self.forward_seconds + self.backward_seconds

    @property
    def static_bytes(self) -> int:
        """What is held all the time: parameters, their gradients, and the optimizer's state."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True)
class SharedParameter:
    """A parameter of several layers (tied weights).

    Attributes:
        name: its first name in the model.
        layers: indices of the layers that have it.
        bytes: of the parameter; in each of the layers' ``parameter_bytes``.
        static_bytes: of the parameter, its gradient and its optimizer state; in each of the layers'
            ``static_bytes``. Four times ``bytes`` if not given.
    """

    name: str
    layers: tuple[int, ...]
    bytes: int
    static_bytes: int = -1

    def __post_init__(self) -> None:
        if self.static_bytes < 0:
            object.__setattr__(self, "static_bytes", 4 * self.bytes)


@dataclass(frozen=True)
class Skip:
    """A value that goes past layers; see :func:`pipelane.skippable`.

    Attributes:
        name: of the value.
        source, target: indices of the layers that stash and pop it.
        bytes: of its tensors.
    """

    name: str
    source: int
    target: int
    bytes: int


@dataclass(frozen=True)
class Profile:
    """All layers of a chain, in order.

    Attributes:
        layers: one entry per layer.
        input_bytes: bytes of the example.
        device: where it was measured, such as "cpu" or "cuda:0".
        batch: rows of the example, that is the size of the micro-batch.
        repeats: least number of measurements behind each median.
        dtype: of the example, such as "float32".
        optimizer: whose state ``optimizer_bytes`` counts.
        method: "measured", or "estimated" from operations and bytes.
        shared: parameters that several layers have.
        skips: values that go past layers.
    """

    layers: tuple[LayerProfile, ...]
    input_bytes: int
    device: str
    batch: int
    repeats: int
    dtype: str = ""
    optimizer: str = "adam"
    method: Literal["measured", "estimated"] = "measured"
    shared: tuple[SharedParameter, ...] = ()
    skips: tuple[Skip, ...] = ()

    def to_json(self) -> str:
        """A JSON object with a schema number; the reverse of :meth:`from_json`."""
        return json.dumps({"schema": SCHEMA, "kind": _KIND, **asdict(self)})

    @classmethod
    def from_json(cls, text: str, where: str = "") -> Profile:
        """Read what :meth:`to_json` wrote, also in older versions.

        Args:
            text: the JSON object.
            where: what to call it in messages, such as its file.

        Raises:
            ConfigError: not such an object, or written by a newer schema; names the layer.
        """
        prefix = f"{where}: " if where else ""
        try:
            data: dict[str, Any] = json.loads(text)
            if data["kind"] != _KIND or not 1 <= data["schema"] <= SCHEMA:
                raise ConfigError(
                    f"{prefix}not a profile that this version reads: kind {data['kind']!r}, schema "
                    f"{data['schema']}; expected {_KIND!r}, schema <= {SCHEMA}"
                )
            if data.get("method", "measured") not in ("measured", "estimated"):
                raise ConfigError(f"{prefix}unknown method {data['method']!r}")
            layers = tuple(
                _layer_from(prefix, number, entry) for number, entry in enumerate(data["layers"])
            )
            return cls(
                layers=layers,
                input_bytes=int(data["input_bytes"]),
                device=str(data["device"]),
                batch=int(data["batch"]),
                repeats=int(data["repeats"]),
                dtype=str(data.get("dtype", "")),
                optimizer=str(data.get("optimizer", "adam")),
                method="estimated" if data.get("method") == "estimated" else "measured",
                shared=tuple(
                    _shared_from(prefix, entry, len(layers)) for entry in data.get("shared", ())
                ),
                skips=tuple(
                    _skip_from(prefix, entry, len(layers)) for entry in data.get("skips", ())
                ),
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{prefix}not a profile in JSON: {error!r}; write one with Profile.to_json()"
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the profile to a file, whole or not at all.

        Raises:
            ConfigError: the file cannot be written.
        """
        write_text(Path(path), self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile from a file.

        Raises:
            ConfigError: the file cannot be read, or is no profile.
        """
        return cls.from_json(read_text(Path(path), "the profile "), str(path))


def _layer_from(prefix: str, number: int, entry: Mapping[str, Any]) -> LayerProfile:
    known = {field.name for field in fields(LayerProfile)}
    if unknown := [key for key in entry if key not in known]:
        raise ConfigError(f"{prefix}layer {number}: unknown {unknown[0]!r}")
    values: dict[str, Any] = {}
    for field in fields(LayerProfile):
        if field.name in entry:
            values[field.name] = entry[field.name]
        elif field.default is MISSING:
            raise ConfigError(f"{prefix}layer {number}: {field.name} is missing")
    values["output_shape"] = tuple(map(int, values["output_shape"]))
    for key, value in values.items():
        if not key.endswith(("_seconds", "_bytes", "_spread", "flops")):
            continue
        number_like = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (number_like and math.isfinite(value) and value >= 0):
            raise ConfigError(
                f"{prefix}layer {number} ({values['name']!r}): {key} must be finite and >= 0, got "
                f"{value!r}"
            )
    return LayerProfile(**values)


def _skip_from(prefix: str, entry: Mapping[str, Any], layers: int) -> Skip:
    found = Skip(
        str(entry["name"]), int(entry["source"]), int(entry["target"]), int(entry["bytes"])
    )
    if not 0 <= found.source < found.target < layers or found.bytes < 0:
        raise ConfigError(
            f"{prefix}skip {found.name!r}: from layer {found.source} to layer {found.target} of "
            f"{layers}, {found.bytes} bytes"
        )
    return found


def _shared_from(prefix: str, entry: Mapping[str, Any], layers: int) -> SharedParameter:
    found = SharedParameter(
        str(entry["name"]),
        tuple(map(int, entry["layers"])),
        int(entry["bytes"]),
        int(entry.get("static_bytes", -1)),
    )
    if not all(0 <= layer < layers for layer in found.layers) or found.bytes < 0:
        raise ConfigError(
            f"{prefix}shared parameter {found.name!r}: layers {list(found.layers)} of {layers}, "
            f"{found.bytes} bytes"
        )
    return found
