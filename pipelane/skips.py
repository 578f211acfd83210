"""Skip connections: a value that one layer stashes and a later layer, of any stage, pops.

A layer says which names it stashes or pops, so that routes are known before anything runs::

    @pipelane.skippable(stash=["fine"])
    class Down(nn.Module):
        def forward(self, x):
            pipelane.stash("fine", x)
            return self.pool(x)

In a pipeline the value goes straight from the producer's rank to the consumer's. Outside of one,
``model(x)`` works as well. The idea is that of torchgpipe's ``@skippable`` (arXiv 2004.09910,
section 3.2).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pipelane.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["Route", "carrying", "pop", "routes", "skippable", "skips_of", "stash"]

_T = TypeVar("_T")


class Route(NamedTuple):
    """The way of one value: stashed in layer ``source``, popped in layer ``target`` (indices)."""

    name: str
    source: int
    target: int


class _Carried(threading.local):
    """Values between their stash and their pop, and who is allowed to do which."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.layer: str | None = None  # None: outside of a pipeline, where nothing is declared
        self.stashes: frozenset[str] = frozenset()
        self.pops: frozenset[str] = frozenset()


_carried = _Carried()


def stash(name: str, value: Any) -> None:
    """Keep a value (a tensor, or a tree of tensors) for the layer that pops it.

    Raises:
        ModelError: in a pipeline, if the layer is not declared to stash this name.
    """
    if _carried.layer is not None and name not in _carried.stashes:
        raise ModelError(
            f"layer {_carried.layer!r} stashes {name!r}, which it does not declare; decorate it "
            f"with @pipelane.skippable(stash=[{name!r}])"
        )
    _carried.values[name] = value


def pop(name: str) -> Any:
    """Take the value that an earlier layer stashed; each value can be taken once.

    Raises:
        ModelError: there is none, or the layer is not declared to pop this name.
    """
    if _carried.layer is not None and name not in _carried.pops:
        raise ModelError(
            f"layer {_carried.layer!r} pops {name!r}, which it does not declare; decorate it with "
            f"@pipelane.skippable(pop=[{name!r}])"
        )
    if name not in _carried.values:
        raise ModelError(f"nothing is stashed under {name!r}: a layer before must stash it")
    return _carried.values.pop(name)


def skippable(*, stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[_T], _T]:
    """Say which names a layer stashes and pops: for a class (a decorator) or for one instance.

    An instance's own names replace those of its class:
    ``down = pipelane.skippable(stash=["level 1"])(Down("level 1"))``.
    """
    stashes, pops = tuple(stash), tuple(pop)
    for names in (stash, pop):
        if isinstance(names, str):
            raise ModelError(f"skippable takes lists of names, got the text {names!r}")

    def declare(layer: _T) -> _T:
        # Past nn.Module's own __setattr__ nothing is gained: plain attributes of either.
        layer.pipelane_stash = stashes  # type: ignore[attr-defined]
        layer.pipelane_pop = pops  # type: ignore[attr-defined]
        return layer

    return declare


def skips_of(layer: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names that a layer, or a module inside of it, stashes and pops."""
    stashes: dict[str, None] = {}
    pops: dict[str, None] = {}
    for module in layer.modules():
        stashes.update(dict.fromkeys(getattr(module, "pipelane_stash", ())))
        pops.update(dict.fromkeys(getattr(module, "pipelane_pop", ())))
    return tuple(stashes), tuple(pops)


def routes(layers: Sequence[tuple[str, nn.Module]]) -> tuple[Route, ...]:
    """Where each value comes from and goes to, in the order of the pops.

    Args:
        layers: (name, layer), in order.

    Raises:
        ModelError: a name is stashed or popped twice, never popped, or popped before its stash.
    """
    waiting: dict[str, int] = {}
    gone: dict[str, int] = {}
    found = []
    for index, (layer, module) in enumerate(layers):
        stashes, pops = skips_of(module)
        for name in pops:
            if name in stashes:
                continue  # within one layer: nobody else sees it
            if name not in waiting:
                why = (
                    f"layer {layers[gone[name]][0]!r} popped it already; give each value a name of "
                    "its own"
                    if name in gone
                    else "no layer before it stashes that"
                )
                raise ModelError(f"layer {layer!r} pops {name!r}, but {why}")
            gone[name] = index
            found.append(Route(name, waiting.pop(name), index))
        for name in stashes:
            if name in pops:
                continue
            if name in waiting or name in gone:
                raise ModelError(
                    f"layers {layers[waiting.get(name, gone.get(name, 0))][0]!r} and {layer!r} "
                    f"both stash or use {name!r}; give each value a name of its own"
                )
            waiting[name] = index
    if waiting:
        name, index = next(iter(waiting.items()))
        raise ModelError(
            f"layer {layers[index][0]!r} stashes {name!r}, which no later layer pops; declare the "
            f"layer that does with @pipelane.skippable(pop=[{name!r}]), or do not stash it"
        )
    return tuple(found)


@contextmanager
def carrying(values: dict[str, Any]) -> Iterator[_Carried]:
    """Within it, stash and pop use ``values``; set ``layer``, ``stashes`` and ``pops`` on it."""
    before = dict(vars(_carried))
    _carried.values = values
    try:
        yield _carried
    finally:
        vars(_carried).update(before)
