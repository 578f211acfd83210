"""What crosses from stage to stage: a value as tensors and a structure, and how it is described."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from pipelane.errors import BoundaryError
from pipelane.trees import Structure, paths

__all__ = ["DTYPES", "Boundary", "Message", "Spec", "describe", "differs", "returning"]

#: What can be sent.
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
_SENDABLE = frozenset(DTYPES)


class Message:
    """A value on its way from one stage to another.

    Attributes:
        structure: what is around the tensors.
        leaves: the tensors, without a graph.
        grads: per tensor, whether its producer wants its gradient.
    """

    __slots__ = ("grads", "leaves", "structure")

    def __init__(self, structure: Structure, leaves: list[Tensor], grads: Sequence[bool]) -> None:
        self.structure, self.leaves, self.grads = structure, leaves, grads


class Spec(NamedTuple):
    """One tensor of a message: shape, dtype, and whether its gradient goes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool = False

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class Boundary:
    """All that a receiver must know of a message before it comes.

    Attributes:
        structure: what is around the tensors.
        specs: the tensors.
        grads: per tensor, whether its gradient goes back.
    """

    structure: Structure
    specs: tuple[Spec, ...]
    grads: tuple[bool, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # Read for every message, so it is not a property.
        object.__setattr__(self, "grads", tuple(spec.grad for spec in self.specs))

    def __str__(self) -> str:
        if len(self.specs) == 1 and self.structure.kind == "leaf":
            return str(self.specs[0])
        return f"{self.structure} of {', '.join(map(str, self.specs)) or 'no tensors'}"


def describe(message: Message, device: torch.device, where: str) -> Boundary:
    """The boundary of a message that is to be sent.

    Raises:
        BoundaryError: one of its tensors cannot be sent.
    """
    specs = []
    for index, (leaf, grad) in enumerate(zip(message.leaves, message.grads, strict=True)):
        if leaf.dtype not in _SENDABLE or leaf.layout is not torch.strided or leaf.is_quantized:
            raise BoundaryError(
                f"{where} returned a tensor of dtype {leaf.dtype} and layout {leaf.layout}"
                f"{_place(message, index)}; dense tensors of torch's plain dtypes can be sent to "
                "another stage: convert it, or cut the model elsewhere with partition=[layers per "
                "stage]"
            )
        if leaf.device != device:
            raise BoundaryError(
                f"{where} returned a tensor on {leaf.device}{_place(message, index)}; the pipeline "
                f"runs on {device}: move it there in the layer"
            )
        specs.append(Spec(tuple(leaf.shape), leaf.dtype, bool(grad)))
    return Boundary(message.structure, tuple(specs))


def differs(message: Message, known: Boundary, device: torch.device) -> str | None:
    """How a message differs from what its receiver expects, or None.

    A tensor that needs no gradient any more is no difference: what comes back is dropped.
    """
    structure, specs = known.structure, known.specs
    if message.structure is not structure and message.structure != structure:
        return f"{message.structure}, but {structure}"
    for index, leaf in enumerate(message.leaves):
        spec = specs[index]
        if leaf.shape != spec.shape or leaf.dtype != spec.dtype or leaf.device != device:
            found = Spec(tuple(leaf.shape), leaf.dtype)
            on = "" if leaf.device == device else f" on {leaf.device}"
            return f"{found}{on}{_place(message, index)}, but {spec}"
        if message.grads[index] and not spec.grad:
            return f"{spec}{_place(message, index)} that needs a gradient, but one that did not"
    return None


def returning(gradients: Sequence[Tensor | None]) -> tuple[Spec, ...]:
    """Specs of the gradients that go back along an edge; ``grad`` says which there are."""
    return tuple(
        Spec((), torch.float32) if g is None else Spec(tuple(g.shape), g.dtype, True)
        for g in gradients
    )


def _place(message: Message, index: int) -> str:
    path = paths(message.structure)[index]
    return f" at {path}" if path else ""
