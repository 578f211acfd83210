"""Nested values as a flat list of tensors and the structure around them.

A value between two layers, a batch or a target may be a tensor or any nesting of tuples, named
tuples, lists, dicts and dataclasses with tensors, None and other plain values in them. Tensors
travel; the structure, with everything in it that is no tensor, is known on both sides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from pipelane.errors import InputError

__all__ = [
    "LEAF",
    "Inputs",
    "Rows",
    "Shared",
    "Structure",
    "flatten",
    "paths",
    "rebuild",
    "split_rows",
]


@dataclass(frozen=True)
class Shared:
    """In a batch or a target: a value that every micro-batch gets whole, such as a mask.

    Without it every tensor is taken to have one row per row of the batch.
    """

    value: Any


class Inputs:
    """Several arguments for the first layer: ``Inputs(ids, mask=mask)``.

    ``Pipeline.step(ids, target=y, mask=mask)`` makes one of its arguments; as ``example=`` it has
    to be written out.
    """

    __slots__ = ("args", "kwargs")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args: tuple[Any, ...] = args
        self.kwargs: dict[str, Any] = kwargs

    def __repr__(self) -> str:
        parts = [*map(repr, self.args), *(f"{key}={value!r}" for key, value in self.kwargs.items())]
        return f"Inputs({', '.join(parts)})"


class Structure:
    """What is around the tensors of a value; it can be compared and pickled.

    Attributes:
        kind: "leaf" (a tensor), "constant", "tuple", "list", "dict", "fields", "inputs" or
            "shared".
        type: of the container, or the constant itself.
        keys: of a dict, or names of fields.
        children: structures within.
        count: tensors within.
    """

    __slots__ = ("_hash", "children", "count", "keys", "kind", "type")

    def __init__(
        self,
        kind: str,
        type_: Any = None,
        keys: tuple[Any, ...] = (),
        children: tuple[Any, ...] = (),
    ) -> None:
        self.kind, self.type, self.keys, self.children = kind, type_, keys, children
        self.count: int = 1 if kind == "leaf" else sum(child.count for child in children)
        # Of constants only the type: not all of them can be hashed.
        what = type(type_) if kind == "constant" else type_
        self._hash = hash((kind, what, len(keys), children))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Structure) or self._hash != other._hash or self.kind != other.kind:
            return False
        if self.kind == "constant":
            return _same(self.type, other.type)
        return (
            self.type is other.type and self.keys == other.keys and self.children == other.children
        )

    def __reduce__(self) -> Any:
        # LEAF is compared by identity on hot paths.
        if self.kind == "leaf":
            return _leaf, ()
        return Structure, (self.kind, self.type, self.keys, self.children)

    def __str__(self) -> str:
        inner = list(map(str, self.children))
        if self.kind == "leaf":
            return "tensor"
        if self.kind == "constant":
            return repr(self.type)
        if self.kind == "shared":
            return f"Shared({inner[0]})"
        if self.kind in ("dict", "fields"):
            pairs = [f"{key}: {one}" for key, one in zip(self.keys, inner, strict=True)]
            return f"{self.type.__name__}({', '.join(pairs)})"
        return f"{self.type.__name__}({', '.join(inner)})"


def _leaf() -> Structure:
    return LEAF


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    try:
        return bool(a == b) or (isinstance(a, float) and repr(a) == repr(b))
    except (TypeError, ValueError, RuntimeError):
        return False  # what cannot say whether it is equal counts as another value


LEAF = Structure("leaf")


def flatten(value: Any) -> tuple[list[Tensor], Structure]:
    """The tensors of a value, in order, and what is around them."""
    if isinstance(value, Tensor):
        return [value], LEAF
    leaves: list[Tensor] = []
    return leaves, _flatten(value, leaves)


def _flatten(value: Any, leaves: list[Tensor]) -> Structure:
    if isinstance(value, Tensor):
        leaves.append(value)
        return LEAF
    kind = type(value)
    if kind is tuple or isinstance(value, tuple):
        return Structure("tuple", kind, (), tuple([_flatten(one, leaves) for one in value]))
    if isinstance(value, list):
        return Structure("list", kind, (), tuple([_flatten(one, leaves) for one in value]))
    if kind is Inputs:
        both = (_flatten(value.args, leaves), _flatten(value.kwargs, leaves))
        return Structure("inputs", kind, ("args", "kwargs"), both)
    if kind is Shared:
        return Structure("shared", kind, (), (_flatten(value.value, leaves),))
    if isinstance(value, Mapping):
        # A defaultdict takes its factory first; what comes of it is a dict all the same.
        made = dict if kind is defaultdict else kind
        inner = tuple([_flatten(one, leaves) for one in value.values()])
        return Structure("dict", made, tuple(value), inner)
    if is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in fields(value))
        inner = tuple([_flatten(getattr(value, name, None), leaves) for name in names])
        return Structure("fields", kind, names, inner)
    return Structure("constant", value)


def rebuild(structure: Structure, leaves: Sequence[Any]) -> Any:
    """The value again; :class:`Shared` is taken off."""
    if structure is LEAF:
        return leaves[0]
    return _rebuild(structure, iter(leaves))


def _rebuild(structure: Structure, leaves: Iterator[Any]) -> Any:
    kind, made = structure.kind, structure.type
    if kind == "leaf":
        return next(leaves)
    if kind == "constant":
        return made
    inner = [_rebuild(child, leaves) for child in structure.children]
    if kind == "tuple":
        return made(*inner) if hasattr(made, "_fields") else made(inner)
    if kind == "list":
        return made(inner)
    if kind == "shared":
        return inner[0]
    if kind == "inputs":
        return made(*inner[0], **inner[1])
    if kind == "dict":
        return made(zip(structure.keys, inner, strict=True))
    # Not through its constructor, which may compute, or not take what it has made of its arguments.
    value = object.__new__(made)
    for name, one in zip(structure.keys, inner, strict=True):
        object.__setattr__(value, name, one)
    return value


def paths(structure: Structure, root: str = "") -> list[str]:
    """Where each tensor is, such as ``[0]['mask']``; for messages."""
    if structure.kind == "leaf":
        return [root]
    if structure.kind == "shared":
        return paths(structure.children[0], root)
    keys: Iterable[str]
    if structure.kind == "dict":
        keys = [f"[{key!r}]" for key in structure.keys]
    elif structure.kind == "fields":
        keys = [f".{key}" for key in structure.keys]
    else:
        keys = [f"[{index}]" for index in range(len(structure.children))]
    inner = zip(keys, structure.children, strict=True)
    return [path for key, child in inner for path in paths(child, root + key)]


def _whole(structure: Structure, shared: bool = False) -> list[bool]:
    """Per tensor, whether it is inside of a Shared."""
    if structure.kind == "leaf":
        return [shared]
    inside = shared or structure.kind == "shared"
    return [flag for child in structure.children for flag in _whole(child, inside)]


@dataclass(frozen=True)
class Rows:
    """A batch, ready to be split.

    Attributes:
        leaves: its tensors.
        structure: what is around them.
        count: rows.
        split: per tensor, whether it is split by rows.
    """

    leaves: list[Tensor]
    structure: Structure
    count: int
    split: list[bool]

    def parts(self, sizes: Sequence[int]) -> list[list[Tensor]]:
        """Per micro-batch, its tensors: views of the batch's rows."""
        columns = [
            torch.split(leaf, list(sizes)) if split else (leaf,) * len(sizes)
            for leaf, split in zip(self.leaves, self.split, strict=True)
        ]
        return [list(column) for column in zip(*columns, strict=True)] or [[] for _ in sizes]

    def moved(self, device: torch.device) -> Rows:
        """On another device."""
        if all(leaf.device == device for leaf in self.leaves):
            return self
        move: Callable[[Tensor], Tensor] = lambda leaf: leaf.to(device, non_blocking=True)  # noqa: E731
        return Rows(list(map(move, self.leaves)), self.structure, self.count, self.split)


def split_rows(value: Any, what: str, rows: int | None = None) -> Rows:
    """Find the rows of a batch or a target.

    Every tensor with at least one dimension has one entry per row, unless it is in a
    :class:`Shared`. Others are given whole to every micro-batch.

    Args:
        value: the batch or target.
        what: what to call it in messages.
        rows: how many it must have; that of its first tensor if not given.

    Raises:
        InputError: there is no tensor with rows, or tensors differ in their number.
    """
    leaves, structure = flatten(value)
    shared = [False] if structure is LEAF else _whole(structure)
    split = [leaf.dim() > 0 and not flag for leaf, flag in zip(leaves, shared, strict=True)]
    if rows is None:
        counts = [len(leaf) for leaf, flag in zip(leaves, split, strict=True) if flag]
        if not counts:
            found = "only tensors without dimensions" if leaves else "no tensor"
            raise InputError(
                f"{what} has {found} ({structure}), so it cannot be split into micro-batches; pass "
                "at least one tensor, rows first"
            )
        rows = counts[0]
    for index, (leaf, flag) in enumerate(zip(leaves, split, strict=True)):
        if flag and len(leaf) != rows:
            where = paths(structure)[index]
            raise InputError(
                f"{what}{where} has shape {list(leaf.shape)}, but the batch has {rows} rows; they "
                "must have the same number of rows. Wrap what every micro-batch needs whole: "
                "pipelane.Shared(tensor)"
            )
    return Rows(leaves, structure, rows, split)
