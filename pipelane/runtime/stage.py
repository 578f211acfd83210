"""One stage on its device: forward and backward of one micro-batch at a time.

A stage is a chain of segments. Usually it is one; where layers are recomputed, each piece with one
rule is a segment of its own. Within a stage segments hand each other tensors cut from the graph, as
stages do, so a backward goes through them one by one, last to first, whole or in two halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipelane.backward import edge_of, split_backward
from pipelane.errors import ModelError
from pipelane.runtime.boundary import Message
from pipelane.runtime.forward import Layer, Policy, Runner, check_finite
from pipelane.skips import Route
from pipelane.trees import LEAF, Structure, flatten, rebuild

__all__ = ["Ends", "StageModule", "backward_from", "stage_ends"]

Finish = Callable[[Any], Tensor]

_LEAF_OVERWRITTEN = "leaf Variable that requires grad"


class Ends(NamedTuple):
    """What comes into a stage, or goes out of it.

    Attributes:
        stages: the stages at the other ends; the neighbour in the chain first, if there is one.
        names: per message, the skip values in it; the neighbour's also has the chain's value.
    """

    stages: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]


class _Bundle(NamedTuple):
    """A value inside of a stage: tensors with their structure."""

    structure: Structure
    leaves: list[Tensor]


class _Record:
    """What one segment keeps from forward to backward of one micro-batch.

    Attributes:
        inputs: tensors that went in; those that need a gradient are leaves of the graph.
        edges: where the outputs hang in the graph; None for those that need no gradient.
        takers: per output, who has its gradient: the tensor that went on, or (message, place).
        again: runs the forward once more and gives the edges; None if they are here already.
    """

    __slots__ = ("again", "edges", "inputs", "takers")

    def __init__(
        self,
        inputs: list[Tensor],
        edges: list[Any],
        takers: list[Any],
        again: Callable[[], list[Any]] | None = None,
    ) -> None:
        self.inputs, self.edges, self.takers, self.again = inputs, edges, takers, again


class _Segment:
    """Layers that are either kept or recomputed together."""

    def __init__(
        self,
        layers: Sequence[Layer],
        policy: Policy,
        recompute: bool,
        compiler: Callable[[nn.Module], Callable[..., Any]] | None,
    ) -> None:
        self.runner = Runner(layers, policy, compiler)
        self.recompute = recompute
        self.modules = [layer.module for layer in layers]
        self._fresh = True
        # Autograd refuses to overwrite a leaf, and what comes into a segment is one; and what a
        # recomputation starts from must not be overwritten either.
        self._copies = any(
            getattr(m, "inplace", False) is True for layer in self.modules for m in layer.modules()
        )
        # Buffers that a forward changes: a recomputation must find them as they were.
        self._changing: list[tuple[nn.Module, str]] = []

    def infer(
        self, value: _Bundle, skips: dict[str, _Bundle], step: int, microbatch: int
    ) -> tuple[Any, dict[str, Any]]:
        """The output, and the values that were stashed; without gradients."""
        values = {name: self._whole(skips[name]) for name in skips} if skips else {}
        result = self.runner(self._whole(value), values, step, microbatch)
        return result, values

    def run(
        self, value: _Bundle, skips: dict[str, _Bundle], step: int, microbatch: int
    ) -> tuple[Any, dict[str, Any]]:
        """The same, to be followed by a backward."""
        if self._fresh:
            return self._learn(value, skips, step, microbatch)
        if self._copies:
            value, skips = self._copied(value), {n: self._copied(one) for n, one in skips.items()}
        if not self.recompute:
            return self.infer(value, skips, step, microbatch)
        given = _leaves(value, skips)
        before = [leaf._version for leaf in given]
        result = self.infer(value, skips, step, microbatch)
        if not self._copies and [leaf._version for leaf in given] != before:
            raise ModelError(
                f"layers {self.runner.layers[0].name!r} to {self.runner.layers[-1].name!r} "
                "overwrote their input, which they did not in the first step, so they cannot be "
                "recomputed; leave them out of recompute=, or copy the input in the layer"
            )
        return result

    def _learn(
        self, value: _Bundle, skips: dict[str, _Bundle], step: int, microbatch: int
    ) -> tuple[Any, dict[str, Any]]:
        """Run once, and see whether the input is overwritten and which buffers are changed."""
        buffers = self.state()
        always = self._copies

        def attempt() -> tuple[Any, dict[str, Any]]:
            if not (self._copies or self.recompute):
                return self.infer(value, skips, step, microbatch)
            copy, copies = self._copied(value), {n: self._copied(one) for n, one in skips.items()}
            made = [
                (leaf, leaf._version)
                for leaf, own in zip(_leaves(copy, copies), _leaves(value, skips), strict=True)
                if leaf is not own
            ]
            result = self.infer(copy, copies, step, microbatch)
            self._copies = always or any(leaf._version != before for leaf, before in made)
            return result

        try:
            result = attempt()
        except RuntimeError as error:
            if _LEAF_OVERWRITTEN not in str(error) or self._copies:
                raise
            self._copies = always = True
            with torch.no_grad():
                for module, name, before in buffers:
                    buffer = module._buffers[name]
                    assert buffer is not None
                    buffer.copy_(before)
            result = attempt()
        self._fresh = False
        self._changing = [
            (module, name)
            for module, name, before in buffers
            if not _equal(module._buffers.get(name), before)
        ]
        return result

    def _copied(self, bundle: _Bundle) -> _Bundle:
        return _Bundle(
            bundle.structure,
            [
                leaf.clone() if leaf.requires_grad or self.recompute else leaf
                for leaf in bundle.leaves
            ],
        )

    @staticmethod
    def _whole(bundle: _Bundle) -> Any:
        structure, leaves = bundle
        return leaves[0] if structure is LEAF else rebuild(structure, leaves)

    def may_need_gradient(self, inputs: Sequence[Tensor]) -> bool:
        return any(leaf.requires_grad for leaf in inputs) or any(
            p.requires_grad for layer in self.modules for p in layer.parameters()
        )

    def state(self) -> list[tuple[nn.Module, str, Tensor]]:
        """Copies of the buffers that forwards change; of all, before that is known."""
        changing: Iterable[tuple[nn.Module, str]] = self._changing
        if self._fresh:
            changing = (
                (module, name)
                for layer in self.modules
                for module in layer.modules()
                for name in module._buffers
            )
        return [
            (module, name, buffer.detach().clone())
            for module, name in changing
            if (buffer := module._buffers.get(name)) is not None
        ]


class StageModule:
    """A stage's layers and what running them needs.

    Args:
        index: number of the stage.
        layers: its layers, in order.
        policy: how to run them.
        ends: what comes in and what goes out.
        recompute: names of layers whose forward is run again in the backward, one by one; or
            "full": all of them, from the stage's input.
        compiler: see ``Pipeline(compile=)``.
        microbatches: m.
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[Layer],
        policy: Policy,
        ends: tuple[Ends, Ends],
        recompute: frozenset[str] | str,
        compiler: Callable[[nn.Module], Callable[..., Any]] | None,
        microbatches: int,
    ) -> None:
        self.index = index
        self.names = [layer.name for layer in layers]
        self.modules = [layer.module for layer in layers]
        self.device = policy.device
        self.policy = policy
        self.coming, self.going = ends
        self._compiler = compiler
        self._layers = list(layers)
        self._segments = [
            _Segment(part, policy, again, compiler) for part, again in _pieces(layers, recompute)
        ]
        skips = any(self.coming.names) or any(self.going.names)
        self._simple = len(self._segments) == 1 and not skips
        self._inputs: list[list[Message] | None] = [None] * microbatches
        self._records: list[list[_Record] | None] = [None] * microbatches
        self._rest: list[list[Any] | None] = [None] * microbatches  # between I and W
        self.early: dict[str, None] = {}

    @property
    def where(self) -> str:
        """The stage and its last layer, for messages about its output."""
        return (
            f"stage {self.index} (last layer {self.names[-1]!r}, {type(self.modules[-1]).__name__})"
        )

    def held(self) -> int:
        """How many micro-batches have something kept here."""
        tables: tuple[list[Any], ...] = (self._inputs, self._records, self._rest)
        return sum(one is not None for table in tables for one in table)

    # -- forward -----------------------------------------------------------------------------

    def infer(self, i: int, step: int, messages: list[Message]) -> list[Message]:
        """Without gradients: the outgoing messages; the last stage's has its output."""
        value, skips = self._received(messages)
        del messages
        for segment in self._segments:
            given = {name: skips.pop(name) for name in segment.runner.pops}
            result, stashed = segment.infer(value, given, step, i)
            del given
            value = _bundle(result)
            skips.update({name: _bundle(one) for name, one in stashed.items()})
        return self._sent(value, skips, {})

    def forward(
        self, i: int, step: int, messages: list[Message], finish: Finish | None = None
    ) -> list[Message]:
        """The outgoing messages; keeps what the backward needs.

        Args:
            i: micro-batch.
            step: number of the step.
            messages: what came in, in the order of ``coming``.
            finish: for the last stage: from its output to the loss.
        """
        for message in messages:
            for leaf, grad in zip(message.leaves, message.grads, strict=True):
                if grad:
                    leaf.requires_grad_()
        self._inputs[i] = messages
        if self._simple:
            return self._forward_simple(i, step, messages[0], finish)
        value, skips = self._received(messages)
        records: list[_Record] = []
        grads: dict[int, bool] = {}  # by the identity of tensors in outgoing messages
        last = len(self._segments) - 1
        for number, segment in enumerate(self._segments):
            given = {name: skips.pop(name) for name in segment.runner.pops}
            inputs = _leaves(value, given)
            ending = finish if number == last else None
            edges, result, stashed, again = self._once(
                segment, value, given, inputs, step, i, ending
            )
            del given
            value = result
            skips.update(stashed)
            outputs = _leaves(value, stashed)
            if ending is None:
                for edge, leaf in zip(edges, outputs, strict=True):
                    grads[id(leaf)] = edge is not None
                    if edge is not None and number < last:
                        leaf.requires_grad_()
            records.append(_Record(inputs, [] if again else edges, list(outputs), again))
        out = self._sent(value, skips, grads) if finish is None else []
        # A tensor that was sent must not be kept: its place in the messages stands for it.
        places = {
            id(leaf): (k, j)
            for k, message in enumerate(out)
            for j, leaf in enumerate(message.leaves)
        }
        for record in records:
            record.takers = [places.get(id(leaf), leaf) for leaf in record.takers]
        if finish is not None:
            records[-1].takers = []
            out = [Message(LEAF, value.leaves, (False,))]
        self._records[i] = records
        return out

    def _forward_simple(
        self, i: int, step: int, message: Message, finish: Finish | None
    ) -> list[Message]:
        segment = self._segments[0]
        value = _Bundle(message.structure, message.leaves)
        edges, result, _, again = self._once(segment, value, {}, message.leaves, step, i, finish)
        count = len(edges)
        takers: list[Any] = [] if finish is not None else [(0, j) for j in range(count)]
        self._records[i] = [_Record(message.leaves, [] if again else edges, takers, again)]
        grads = [edge is not None for edge in edges] if finish is None else (False,)
        return [Message(result.structure, result.leaves, grads)]

    def _once(
        self,
        segment: _Segment,
        value: _Bundle,
        given: dict[str, _Bundle],
        inputs: list[Tensor],
        step: int,
        i: int,
        finish: Finish | None,
    ) -> tuple[list[Any], _Bundle, dict[str, _Bundle], Callable[[], list[Any]] | None]:
        """Run a segment: edges of its outputs, outputs cut from the graph, how to run it again."""
        if not segment.recompute:
            result, stashed = segment.run(value, given, step, i)
            if finish is not None:
                loss = finish(result)
                return [loss], _Bundle(LEAF, [loss.detach()]), {}, None
            if isinstance(result, Tensor) and not stashed:
                edge = edge_of(result) if result.requires_grad else None
                return [edge], _Bundle(LEAF, [result.detach()]), {}, None
            cut, edges = _cut(_bundle(result))
            rest = {}
            for name, one in stashed.items():
                rest[name], more = _cut(_bundle(one))
                edges += more
            return edges, cut, rest, None
        before = segment.state()
        with torch.no_grad():
            result, stashed = segment.run(value, given, step, i)
            if finish is not None:
                loss = finish(result)
                cut, kept = _Bundle(LEAF, [loss.detach()]), {}
            else:
                cut = _detached(_bundle(result))
                kept = {name: _detached(_bundle(one)) for name, one in stashed.items()}
        needs = segment.may_need_gradient(inputs)
        outputs = _leaves(cut, kept)
        edges = [
            True if needs and (leaf.is_floating_point() or leaf.is_complex()) else None
            for leaf in outputs
        ]

        def again() -> list[Any]:
            found = _swapped(before, lambda: segment.run(value, given, step, i))
            if finish is not None:
                return [finish(found[0])]
            leaves = flatten(found[0])[0]
            for name in kept:
                leaves += flatten(found[1][name])[0]
            return [edge_of(leaf) if leaf.requires_grad else None for leaf in leaves]

        return edges, cut, kept, again

    def _received(self, messages: Sequence[Message]) -> tuple[_Bundle, dict[str, _Bundle]]:
        """The chain's value and the skip values in what came in."""
        skips: dict[str, _Bundle] = {}
        first = messages[0]
        value = _Bundle(first.structure, first.leaves)
        for place, (names, message) in enumerate(zip(self.coming.names, messages, strict=True)):
            if not names:
                continue
            structure, leaves = message.structure, message.leaves
            if place == 0:  # (value, {name: value})
                own = structure.children[0].count
                value = _Bundle(structure.children[0], leaves[:own])
                structure, leaves = structure.children[1], leaves[own:]
            begin = 0
            for name, child in zip(structure.keys, structure.children, strict=True):
                skips[name] = _Bundle(child, leaves[begin : begin + child.count])
                begin += child.count
        return value, skips

    def _sent(
        self, value: _Bundle, skips: dict[str, _Bundle], grads: dict[int, bool]
    ) -> list[Message]:
        """The outgoing messages."""
        out = []
        for place, names in enumerate(self.going.names):
            bundles = [skips.pop(name) for name in names]
            leaves = [leaf for one in bundles for leaf in one.leaves]
            around = Structure("dict", dict, names, tuple(one.structure for one in bundles))
            if place == 0:
                structure = value.structure
                if names:
                    structure = Structure("tuple", tuple, (), (value.structure, around))
                leaves = [*value.leaves, *leaves]
            else:
                structure = around
            out.append(Message(structure, leaves, [grads.get(id(leaf), False) for leaf in leaves]))
        return out or [Message(value.structure, value.leaves, [False] * len(value.leaves))]

    # -- backward ----------------------------------------------------------------------------

    def backward(self, i: int, gradients: Sequence[Sequence[Tensor | None]]) -> list[list[Any]]:
        """The whole backward.

        Args:
            i: micro-batch.
            gradients: per outgoing message and tensor, its gradient; None where none is wanted.
                For the last stage one of the loss, or None for 1.

        Returns:
            Per incoming message and tensor, the gradient of the input; None where none is wanted,
            and where no output depends on it.
        """
        records, self._records[i] = self._records[i], None
        assert records is not None
        while records:
            # Nothing of a segment outlives its backward, nor do gradients inside of the stage.
            edges, given = self._roots(records.pop(), gradients)
            if edges:
                backward_from(edges, given)
            del edges, given
        return self._input_gradients(i)

    def input_grad(self, i: int, gradients: Sequence[Sequence[Tensor | None]]) -> list[list[Any]]:
        """I: as :meth:`backward`, but the gradients of the parameters are left to W."""
        records, self._records[i] = self._records[i], None
        assert records is not None
        rests = []
        while records:
            record = records.pop()
            edges, given = self._roots(record, gradients)
            inputs = [leaf for leaf in record.inputs if leaf.requires_grad]
            del record
            if not edges:
                continue
            found, rest = split_backward(edges, given, inputs)
            self.early.update(dict.fromkeys(rest.early))
            rests.append(rest)
            for leaf, gradient in zip(inputs, found, strict=True):
                leaf.grad = gradient
        self._rest[i] = rests
        return self._input_gradients(i)

    def weight_grad(self, i: int) -> None:
        """W: the gradients of the stage's parameters, what I left of them."""
        rests, self._rest[i] = self._rest[i], None
        for rest in rests or ():
            rest.run()
        if self.policy.detect_anomaly:
            self._check_parameters(i)

    def _roots(
        self, record: _Record, gradients: Sequence[Sequence[Tensor | None]]
    ) -> tuple[list[Any], list[Any]]:
        """Where a segment's backward starts, and with which gradients."""
        if record.again is not None:
            record.edges = record.again()
            record.again = None
        edges, record.edges = record.edges, []
        if not record.takers:  # the loss
            return edges, [gradients[0][0] if gradients else None]
        roots, given = [], []
        for edge, taker in zip(edges, record.takers, strict=True):
            if edge is None:
                continue
            gradient = gradients[taker[0]][taker[1]] if type(taker) is tuple else taker.grad
            if gradient is not None:
                roots.append(edge)
                given.append(gradient)
        return roots, given

    def _input_gradients(self, i: int) -> list[list[Any]]:
        messages, self._inputs[i] = self._inputs[i], None
        assert messages is not None
        found: list[list[Any]] = []
        for message in messages:
            found.append(
                [
                    leaf.grad.contiguous() if wanted and leaf.grad is not None else None
                    for leaf, wanted in zip(message.leaves, message.grads, strict=True)
                ]
            )
        if self.policy.detect_anomaly:
            for row in found:
                for gradient in row:
                    if gradient is not None:
                        first = f"layer {self.names[0]!r} ({type(self.modules[0]).__name__})"
                        check_finite(
                            gradient,
                            f"the backward of {first} made",
                            f"for its input, micro-batch {i}",
                        )
            self._check_parameters(i)
        return found

    def _check_parameters(self, i: int) -> None:
        for name, module in zip(self.names, self.modules, strict=True):
            for key, parameter in module.named_parameters(prefix=name):
                if parameter.grad is not None:
                    check_finite(
                        parameter.grad,
                        f"the backward of layer {name!r} ({type(module).__name__}) left",
                        f"in the gradient of {key} after micro-batch {i}",
                    )


def _pieces(
    layers: Sequence[Layer], recompute: frozenset[str] | str
) -> list[tuple[list[Layer], bool]]:
    """Neighbours that are kept, as one; each that is recomputed by itself, or all as one."""
    if isinstance(recompute, str):
        return [(list(layers), True)]
    pieces: list[tuple[list[Layer], bool]] = []
    for layer in layers:
        again = layer.name in recompute
        if pieces and not again and not pieces[-1][1]:
            pieces[-1][0].append(layer)
        else:
            pieces.append(([layer], again))
    return pieces


def _leaves(value: _Bundle, skips: dict[str, _Bundle]) -> list[Tensor]:
    return [*value.leaves, *(leaf for one in skips.values() for leaf in one.leaves)]


def _bundle(value: Any) -> _Bundle:
    leaves, structure = flatten(value)
    return _Bundle(structure, leaves)


def _cut(bundle: _Bundle) -> tuple[_Bundle, list[Any]]:
    """The same without a graph, and where each tensor hung in it."""
    return _detached(bundle), [edge_of(x) if x.requires_grad else None for x in bundle.leaves]


def _detached(bundle: _Bundle) -> _Bundle:
    return _Bundle(bundle.structure, [leaf.detach() for leaf in bundle.leaves])


def _equal(buffer: Tensor | None, before: Tensor) -> bool:
    return (
        buffer is not None
        and buffer.shape == before.shape
        and buffer.device == before.device
        and torch.equal(buffer, before)
    )


def _swapped(buffers: Sequence[tuple[nn.Module, str, Tensor]], run: Callable[[], Any]) -> Any:
    """Run with other buffers in their places, so that what they hold now is not touched."""
    now = [(module, name, module._buffers[name]) for module, name, _ in buffers]
    for module, name, before in buffers:
        module._buffers[name] = before
    try:
        return run()
    finally:
        for module, name, buffer in now:
            module._buffers[name] = buffer


def stage_ends(sizes: Sequence[int], routes: Sequence[Route]) -> list[tuple[Ends, Ends]]:
    """Per stage, what comes in and what goes out; values of one pair of stages go together.

    Args:
        sizes: layers per stage.
        routes: skips between layers, see :func:`pipelane.skips.routes`.
    """
    home = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    names: dict[tuple[int, int], list[str]] = {(s, s + 1): [] for s in range(len(sizes) - 1)}
    for route in routes:
        pair = home[route.source], home[route.target]
        if pair[0] != pair[1]:
            names.setdefault(pair, []).append(route.name)
    ends = []
    for s in range(len(sizes)):
        coming = sorted((pair for pair in names if pair[1] == s), key=lambda pair: -pair[0])
        going = sorted(pair for pair in names if pair[0] == s)
        ends.append(
            (
                # Nothing comes before the first stage but the batch.
                Ends(tuple(a for a, _ in coming), tuple(tuple(names[p]) for p in coming))
                if s
                else Ends((-1,), ((),)),
                Ends(tuple(b for _, b in going), tuple(tuple(names[p]) for p in going)),
            )
        )
    return ends


_EDGES_IN_BACKWARD = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)


def backward_from(edges: Sequence[Any], gradients: Sequence[Tensor | None]) -> None:
    """Backward from graph edges whose tensors are gone; gradients accumulate into the leaves.

    Keeping the edge instead of the output lets the output's storage go once it was sent.
    """
    if _EDGES_IN_BACKWARD:
        torch.autograd.backward(tuple(edges), tuple(gradients))
        return
    # Up to torch 2.7 the public function takes tensors only; its engine takes edges.
    roots = tuple(edges)
    given = tuple(
        torch.ones_like(root) if gradient is None else gradient
        for root, gradient in zip(roots, gradients, strict=True)
    )
    torch.autograd.Variable._execution_engine.run_backward(
        roots, given, False, False, (), allow_unreachable=True, accumulate_grad=True
    )
