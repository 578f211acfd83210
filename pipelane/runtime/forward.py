"""Run consecutive layers, in the one way that the pipeline and the reference share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipelane.errors import AnomalyError, ModelError
from pipelane.runtime.randomness import layer_seed, may_draw, preserved_stream
from pipelane.skips import carrying, skips_of
from pipelane.trees import Inputs, flatten

__all__ = ["Layer", "Policy", "Runner", "check_finite"]


class Layer(NamedTuple):
    """A layer of the model: its place in it, name and module."""

    place: int
    name: str
    module: nn.Module


class Policy(NamedTuple):
    """How layers are run.

    Attributes:
        seed: random draws depend on it; see :mod:`pipelane.runtime.randomness`.
        device: where they run.
        autocast: dtype of torch.autocast around every layer and the loss; None for none.
        detect_anomaly: look at every output and gradient, and raise at the first that is not
            finite.
    """

    seed: int
    device: torch.device
    autocast: torch.dtype | None = None
    detect_anomaly: bool = False

    def precision(self) -> AbstractContextManager[Any]:
        """The context for layers and loss."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)


class _Step(NamedTuple):
    """One call: a layer, or several that were compiled together."""

    run: Callable[..., Any]
    layer: Layer
    draws: bool
    stashes: tuple[str, ...]
    pops: tuple[str, ...]
    declared: tuple[frozenset[str], frozenset[str]]


class Runner:
    """Some consecutive layers.

    Args:
        layers: in order.
        policy: how to run them.
        compiler: makes a faster callable from a module; see ``Pipeline(compile=)``.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        policy: Policy,
        compiler: Callable[[nn.Module], Callable[..., Any]] | None = None,
    ) -> None:
        self.layers = list(layers)
        self.policy = policy
        self._steps = [self._step(layer) for layer in layers]
        stashes = [name for step in self._steps for name in step.stashes]
        pops = [name for step in self._steps for name in step.pops]
        # What comes from before these layers, and what is for after them.
        self.pops = [name for name in pops if name not in stashes]
        self.stashes = [name for name in stashes if name not in pops]
        if compiler is not None:
            self._steps = _compiled(self._steps, compiler, policy.detect_anomaly)
        self._modules = [step.run for step in self._steps]
        self._draws = any(step.draws for step in self._steps)
        self._skips = any(any(step.declared) for step in self._steps)
        self._plain = not (
            self._draws or self._skips or policy.autocast is not None or policy.detect_anomaly
        )

    @staticmethod
    def _step(layer: Layer) -> _Step:
        stashes, pops = skips_of(layer.module)
        inner = set(stashes) & set(pops)  # within one layer: nobody else sees it
        return _Step(
            layer.module,
            layer,
            may_draw(layer.module),
            tuple(name for name in stashes if name not in inner),
            tuple(name for name in pops if name not in inner),
            (frozenset(stashes), frozenset(pops)),
        )

    def __call__(self, value: Any, skips: dict[str, Any], step: int, microbatch: int) -> Any:
        """The value behind the last layer.

        Args:
            value: what the first layer takes.
            skips: values that these layers pop; afterwards those that they stashed.
            step, microbatch: numbers, on which random draws depend.
        """
        if self._plain and type(value) is not Inputs:
            for module in self._modules:
                value = module(value)
            return value
        with ExitStack() as stack:
            generator = None
            if self._draws:
                generator = stack.enter_context(preserved_stream(self.policy.device))
            scope = stack.enter_context(carrying(skips)) if self._skips else None
            stack.enter_context(self.policy.precision())
            for run, layer, draws, stashes, pops, declared in self._steps:
                if draws and generator is not None:
                    generator.manual_seed(
                        layer_seed(self.policy.seed, step, microbatch, layer.place)
                    )
                if scope is not None:
                    scope.layer, (scope.stashes, scope.pops) = layer.name, declared
                several = type(value) is Inputs
                value = run(*value.args, **value.kwargs) if several else run(value)
                if stashes or pops:
                    _check_skips(layer, stashes, pops, skips)
                if self.policy.detect_anomaly:
                    self._watch(value, layer, microbatch)
        return value

    def _watch(self, value: Any, layer: Layer, microbatch: int) -> None:
        """Check a layer's output now, and its gradient when that arrives."""
        name = f"layer {layer.name!r} ({type(layer.module).__name__})"
        following = next((x for x in self.layers if x.place == layer.place + 1), None)
        later = (
            "what follows it (the next stage or the loss)"
            if following is None
            else f"layer {following.name!r} ({type(following.module).__name__})"
        )
        for leaf in flatten(value)[0]:
            check_finite(leaf, f"{name} returned", f"for micro-batch {microbatch}")
            if leaf.requires_grad:
                where = f"for the output of {name}, micro-batch {microbatch}"
                leaf.register_hook(  # type: ignore[no-untyped-call]
                    partial(check_finite, what=f"the backward of {later} made", where=where)
                )


def _check_skips(
    layer: Layer, stashes: Sequence[str], pops: Sequence[str], skips: dict[str, Any]
) -> None:
    for name in stashes:
        if name not in skips:
            raise ModelError(
                f"layer {layer.name!r} declares that it stashes {name!r}, but its forward did not; "
                f"call pipelane.stash({name!r}, value) there, or leave it out of skippable()"
            )
    for name in pops:
        if name in skips:
            raise ModelError(
                f"layer {layer.name!r} declares that it pops {name!r}, but its forward did not; "
                f"call pipelane.pop({name!r}) there, or leave it out of skippable()"
            )


def check_finite(tensor: Tensor, what: str, where: str) -> None:
    """Raise AnomalyError if a tensor has a value that is not finite."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return
    finite = torch.isfinite(tensor)
    if finite.all():
        return
    wrong = tensor[~finite]
    nans = int(torch.isnan(wrong).sum())
    raise AnomalyError(
        f"{what} {nans} NaN and {wrong.numel() - nans} infinite of {tensor.numel()} values {where}"
    )


def _compiled(
    steps: Sequence[_Step], compiler: Callable[[nn.Module], Callable[..., Any]], apart: bool
) -> list[_Step]:
    """Compile neighbours together, as far as nothing has to happen between them."""
    made: list[_Step] = []
    group: list[_Step] = []

    def finish() -> None:
        if group:
            modules = [step.layer.module for step in group]
            whole = modules[0] if len(modules) == 1 else nn.Sequential(*modules)
            made.append(group[0]._replace(run=compiler(whole)))
            group.clear()

    for step in steps:
        talks = any(step.declared)  # it stashes or pops, from within
        # A layer that draws is seeded just before; those behind it may follow in one piece.
        if step.draws or apart or talks:
            finish()
        if talks:
            made.append(step)
        else:
            group.append(step)
    finish()
    return made
