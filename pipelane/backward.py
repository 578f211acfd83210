"""A backward in two halves: gradients of the inputs now, gradients of the parameters later.

Zero-bubble schedules (arXiv 2401.10241) do the first half (I) as early as they can, because the
stage before waits for it, and fill bubbles with the second (W).

The autograd graph is cut where the way from the outputs to the inputs meets the ways to the
parameters: at an ``AddmmBackward0``, a ``ConvolutionBackward0`` and so on. I runs torch's engine
down to the inputs and notes the gradient that arrives at each such node. W asks each node for its
other results, and runs the engine from there to the parameters. In both, torch's own mask tells a
node which of its results are wanted, so it computes those only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipelane.errors import ConfigError

__all__ = ["WeightGradient", "edge_of", "split_backward"]

Output = Tensor | GradientEdge

# torch's public functions take edges in newer versions only, and check again what we checked.
_run_backward: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward

# Nodes that compute all their results whatever is wanted, at a cost worth knowing of.
_ALL_AT_ONCE = frozenset(
    {
        "CudnnBatchNormBackward0",
        "MiopenBatchNormBackward0",
        "MkldnnRnnLayerBackward0",
        "PreluKernelBackward0",
        # An unknown node from a C++ extension.
        "CppFunction",
    }
)
# It runs a backward of its own and refuses to be a part of one with chosen inputs.
_NESTED = "CheckpointFunctionBackward"

# Weight gradients computed and not yet added to .grad take at most about this many bytes.
_PENDING_BYTES = 1 << 16


_EDGES_OWN_NODES = "ownership_token" in GradientEdge._fields


def edge_of(tensor: Tensor) -> GradientEdge:
    """Where a tensor hangs in the graph; keeps the graph alive, but not the tensor's memory."""
    if not _EDGES_OWN_NODES and isinstance(tensor.grad_fn, torch._C._FunctionBase):
        # Up to torch 2.7 only its outputs keep the node of a user's own function alive; a view's
        # node is kept by its edge, and keeps the one below.
        tensor = tensor.view_as(tensor)
    return get_gradient_edge(tensor)


class _Kind(NamedTuple):
    """What is known about all nodes of one type.

    ``leaf``: it ends at a leaf tensor. ``whole``: it computes all results at once. ``saved``: names
    of the attributes through which its saved tensors can be reached.
    """

    leaf: bool
    whole: bool
    saved: tuple[str, ...]


class _Call(NamedTuple):
    """A node whose weight half is left: which of its results go along which edges.

    The flag of a result says that it goes to a parameter on a way of its own.
    """

    node: Any
    results: tuple[tuple[int, GradientEdge, bool], ...]


class WeightGradient:
    """The weight half of one backward.

    Until :meth:`run` it holds, of the graph, the nodes that have parameters (with the tensors
    that they saved, such as the input of a linear layer), the gradients that arrived at them, and
    the nodes between them and the parameters. It also keeps the input tensors themselves, because
    the graph does. Everything goes with ``run``, or with the object.

    Attributes:
        early: names of the autograd nodes that cannot be split, each once; the gradients of their
            parameters were computed, and added, with the input gradient.
    """

    __slots__ = ("_arrived", "_calls", "_gradients", "_parameters", "_roots", "early")

    def __init__(self, parameters: tuple[Tensor, ...] = ()) -> None:
        self.early: tuple[str, ...] = ()
        self._parameters = parameters
        # Where the weight half starts from with what is known already.
        self._roots: list[Output] = []
        self._gradients: list[Tensor] = []
        # Where it starts from a node on the way to the inputs. The gradients that arrived are by
        # index, in the order of arrival: a dictionary of nodes would be a cycle through their
        # hooks, which Python's collector cannot see.
        self._calls: tuple[_Call, ...] = ()
        self._arrived: dict[int, tuple[Tensor | None, ...]] = {}

    def run(self) -> None:
        """Compute the rest and add it to the ``.grad`` of the parameters; once.

        A second call finds nothing left and does nothing.
        """
        roots, gradients = self._roots, self._gradients
        calls, arrived = self._calls, self._arrived
        self._roots, self._gradients, self._calls, self._arrived = [], [], (), {}
        if arrived:
            edges = [edge for call in calls for _, edge, _ in call.results]
            work = partial(_ask, calls, arrived, roots, gradients, self._parameters)
            _MASKED.run(work, edges)
        if roots:
            _accumulate(roots, gradients, self._parameters)


def split_backward(
    outputs: Sequence[Output],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    parameters: Iterable[Tensor] | None = None,
) -> tuple[list[Tensor | None], WeightGradient]:
    """Do the input half of a backward, and return the weight half to be run later.

    Gradients equal those of the whole backward bit for bit, if ``.grad`` is added to in the same
    order: weights that several operations share are summed as torch's engine sums them.

    If no input needs a gradient, as in the first stage, there is no input half: the weight half is
    the whole backward, and keeps the whole graph until then.

    After the call, what only the input half needed is free: tensors saved by operations without
    parameters, such as the input of a GELU or the weights of an attention. (Tensors saved through
    ``saved_tensors_hooks`` stay until the weight half has run.)

    Some operations cannot be split: custom ``autograd.Function``, compiled modules, and a few
    others compute everything at once. The gradients of the parameters that they lead to are
    computed **and added to** ``.grad`` **here**, and their names are in
    :attr:`WeightGradient.early`. Parameters behind other operations are not affected. The one
    exception is reentrant checkpointing: next to it nothing can be split, and ``parameters`` cannot
    be chosen either.

    Args:
        outputs: tensors of the graph, or their edges if the tensors are gone. Those that do not
            require a gradient are skipped.
        gradients: one for each, with its shape and dtype; None for a scalar loss means 1.
        inputs: leaf tensors, whose gradients are wanted.
        parameters: leaf tensors whose ``.grad`` the weight half adds to; every leaf of the graph
            but the inputs, as in ``backward()``, if not given.

    Returns:
        The gradient of each input (None if it needs none, or no output depends on it; ``.grad`` of
        the inputs is left alone), and the weight half.

    Raises:
        ConfigError: numbers do not match, a gradient is missing, or a tensor is not a leaf.
    """
    given, chosen = _checked(outputs, gradients, inputs, parameters)
    rest = WeightGradient(() if chosen is None else chosen)
    xs = tuple(x for x in inputs if x.requires_grad)
    if not xs:
        if chosen != ():
            rest._roots = [output for output, _ in given]
            rest._gradients = [gradient for _, gradient in given]
        return [None] * len(inputs), rest
    graph = _Graph([_node_of(output) for output, _ in given], xs)
    on_way = graph.above(graph.inputs)
    wanted = None if chosen is None else graph.above(graph.leaves_of(chosen))
    starts = [(output, gradient, _node_of(output) in on_way) for output, gradient in given]
    for output, gradient, to_input in starts:
        if not to_input and (wanted is None or _node_of(output) in wanted):
            rest._roots.append(output)
            rest._gradients.append(gradient)
    roots = tuple(output for output, _, to_input in starts if to_input)
    root_gradients = tuple(gradient for _, gradient, to_input in starts if to_input)
    if not roots:
        return [None] * len(inputs), rest
    if graph.nested:
        rest.early = (_NESTED,)
        rest._roots, rest._gradients = [], []
        everything = tuple(output for output, _ in given), tuple(g for _, g in given)
        found = _backward_to(*everything, xs, ())
        return _in_places(inputs, found), rest
    calls, whole = graph.cut(on_way, wanted)
    early: tuple[Tensor, ...] = ()
    if whole:
        leaves, calls = graph.early(calls, whole)
        early = tuple(leaf.variable for leaf in leaves)
        rest.early = tuple(sorted({_name_of(call.node) for call in whole}))
    hooks = [
        call.node.register_prehook(partial(rest._arrived.__setitem__, index))
        for index, call in enumerate(calls)
    ]
    rest._calls = tuple(calls)
    # Nothing but these nodes is needed again: without them the engine itself can free all.
    keep = bool(calls)
    if early:
        found = _backward_to(roots, root_gradients, xs, (*xs, *early), keep)
    else:
        found = _run_backward(
            roots, root_gradients, keep, False, xs, allow_unreachable=True, accumulate_grad=False
        )
    for hook in hooks:
        hook.remove()
    if keep:
        graph.release(on_way, {call.node for call in calls})
    return _in_places(inputs, found), rest


class _Graph:
    """The nodes below some starts.

    Args:
        starts: nodes.
        inputs: leaf tensors, which require a gradient.
    """

    def __init__(self, starts: Sequence[Any], inputs: Sequence[Tensor]) -> None:
        self.nexts: dict[Any, tuple[tuple[Any, int], ...]] = {}
        self.parents: dict[Any, list[Any]] = {}
        self.leaves: dict[int, Any] = {}
        self.inputs: list[Any] = []
        self.nested = False
        self._starts = frozenset(starts)
        nexts, parents, kinds = self.nexts, self.parents, _KINDS
        wanted = set(map(id, inputs))
        todo = list(starts)
        while todo:
            node = todo.pop()
            if node in nexts:
                continue
            kind = kinds.get(type(node)) or _kind_of(node)
            if kind.leaf:
                nexts[node] = ()
                variable = id(node.variable)
                if variable in wanted:
                    self.inputs.append(node)
                else:
                    self.leaves[variable] = node
                continue
            if kind.whole and _name_of(node) == _NESTED:
                self.nested = True
            following = nexts[node] = node.next_functions
            for child, _ in following:
                if child is None:
                    continue
                if child in parents:
                    parents[child].append(node)
                else:
                    parents[child] = [node]
                    todo.append(child)

    def above(self, nodes: Sequence[Any]) -> set[Any]:
        """The nodes from which one of these can be reached, themselves included."""
        parents, found, todo = self.parents, set(nodes), list(nodes)
        while todo:
            for parent in parents.get(todo.pop(), ()):
                if parent not in found:
                    found.add(parent)
                    todo.append(parent)
        return found

    def leaves_of(self, tensors: Sequence[Tensor]) -> list[Any]:
        return [self.leaves[id(t)] for t in tensors if id(t) in self.leaves]

    def cut(self, on_way: set[Any], wanted: set[Any] | None) -> tuple[list[_Call], list[_Call]]:
        """The nodes where ways to parameters leave the ways to the inputs.

        Returns:
            All of them, and those of them that compute everything at once.
        """
        calls: list[_Call] = []
        whole: list[_Call] = []
        for node in on_way:
            results = tuple(
                (index, GradientEdge(child, number), self._alone(child))
                for index, (child, number) in enumerate(self.nexts[node])
                if child is not None and child not in on_way and (wanted is None or child in wanted)
            )
            if results:
                call = _Call(node, results)
                calls.append(call)
                if (_KINDS.get(type(node)) or _kind_of(node)).whole:
                    whole.append(call)
        return calls, whole

    def _alone(self, node: Any) -> bool:
        """Whether its one way down ends at a leaf, without meeting another way."""
        while len(self.parents[node]) == 1 and node not in self._starts:
            following = self.nexts[node]
            if not following:
                return True
            if len(following) > 1 or following[0][0] is None:
                return False
            node = following[0][0]
        return False

    def below(self, node: Any) -> Iterator[Any]:
        """The leaves that a node reaches."""
        seen, todo = {node}, [node]
        while todo:
            node = todo.pop()
            following = self.nexts[node]
            if not following:
                yield node
            for child, _ in following:
                if child is not None and child not in seen:
                    seen.add(child)
                    todo.append(child)

    def early(self, calls: list[_Call], whole: list[_Call]) -> tuple[list[Any], list[_Call]]:
        """Take from the weight half what has to be done with the input half.

        A leaf is done at one time: whatever else leads to the leaves of a node that cannot be
        split is early too, and so are the other leaves that it leads to.

        Returns:
            The early leaves, and what is left for the weight half.
        """
        late = {edge: set(self.below(edge.node)) for call in calls for _, edge, _ in call.results}
        leaves: set[Any] = set()
        new = {leaf for call in whole for _, edge, _ in call.results for leaf in late[edge]}
        while new - leaves:
            leaves |= new
            new = {leaf for found in late.values() if found & leaves for leaf in found}
        left = []
        for call in calls:
            results = tuple(x for x in call.results if not late[x[1]] & leaves)
            if results:
                left.append(_Call(call.node, results))
        return [leaf for leaf in self.leaves.values() if leaf in leaves], left

    def release(self, nodes: set[Any], but: set[Any]) -> None:
        """Free what nodes saved for the input half: the weight half holds on to the graph."""
        kinds = _KINDS
        for node in nodes:
            kind = kinds.get(type(node)) or _kind_of(node)
            if not kind.saved or node in but:
                continue
            for name in kind.saved:
                saved = getattr(node, name)
                for one in saved if isinstance(saved, tuple) else (saved,):
                    if one is not None:
                        _forget(one)


_KINDS: dict[type, _Kind] = {}


def _kind_of(node: Any) -> _Kind:
    cls = type(node)
    if isinstance(node, torch._C._FunctionBase):
        # A class made by the user, perhaps one of many: not to be kept alive by a table.
        return _Kind(False, True, ("_raw_saved_tensors",))
    name = cls.__name__
    saved = tuple(attribute for attribute in dir(cls) if attribute.startswith("_raw_saved_"))
    kind = _KINDS[cls] = _Kind(name == "AccumulateGrad", name in _ALL_AT_ONCE, saved)
    return kind


def _name_of(node: Any) -> str:
    """Its name; up to torch 2.6 the nodes of a user's own functions have no name of their own."""
    if isinstance(node, torch._C._FunctionBase):
        return type(node).__name__
    return str(node.name())


def _forget(saved: Any) -> None:
    """Let a saved tensor go: from now on it is packed as nothing."""
    try:
        saved.register_hooks(_nothing, _gone)
    except RuntimeError:
        # Empty, or with hooks of somebody else, whose memory is theirs to manage.
        return


def _nothing(tensor: Tensor) -> None:
    return None


def _gone(packed: None) -> NoReturn:
    raise RuntimeError(
        "a tensor saved for backward was freed after the input half of a split backward; this "
        "graph cannot be used again"
    )


def _checked(
    outputs: Sequence[Output],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    parameters: Iterable[Tensor] | None,
) -> tuple[list[tuple[Output, Tensor]], tuple[Tensor, ...] | None]:
    """The outputs that require a gradient, each with its gradient, and the parameters that do."""
    if len(outputs) != len(gradients):
        raise ConfigError(
            f"{len(outputs)} outputs and {len(gradients)} gradients: give one gradient for each"
        )
    given: list[tuple[Output, Tensor]] = []
    for place, (output, gradient) in enumerate(zip(outputs, gradients, strict=True)):
        if isinstance(output, Tensor):
            if not output.requires_grad:
                continue
            if gradient is None and output.dim() == 0:
                gradient = torch.ones_like(output)
            elif gradient is not None and gradient.shape != output.shape:
                raise ConfigError(
                    f"output {place} has shape {list(output.shape)}, but its gradient has "
                    f"{list(gradient.shape)}"
                )
        if gradient is None:
            raise ConfigError(
                f"output {place} is no scalar tensor and has no gradient: only that of a scalar "
                "loss can be left out"
            )
        given.append((output, gradient))
    for place, x in enumerate(inputs):
        if x.requires_grad and not x.is_leaf:
            raise ConfigError(
                f"input {place} was computed from other tensors; detach it before the forward and "
                "call requires_grad_()"
            )
    if parameters is None:
        return given, None
    chosen = tuple(p for p in parameters if p.requires_grad)
    for p in chosen:
        if not p.is_leaf:
            raise ConfigError(
                f"a parameter of shape {list(p.shape)} was computed from other tensors, and has no "
                ".grad: give the tensors that it was computed from"
            )
    return given, chosen


def _node_of(output: Output) -> Any:
    if isinstance(output, Tensor):
        return output.grad_fn if output.grad_fn is not None else get_gradient_edge(output).node
    return output.node


def _in_places(inputs: Sequence[Tensor], found: Sequence[Tensor | None]) -> list[Tensor | None]:
    """What was found for those inputs that require a gradient, with None for the others."""
    rest = iter(found)
    return [next(rest) if x.requires_grad else None for x in inputs]


def _backward_to(
    roots: tuple[Output, ...],
    gradients: tuple[Tensor, ...],
    xs: tuple[Tensor, ...],
    leaves: tuple[Tensor, ...],
    keep: bool = False,
) -> list[Tensor | None]:
    """A backward that adds to .grad of the leaves (all if none), but returns it for the inputs."""
    before = [x.grad for x in xs]
    try:
        for x in xs:
            x.grad = None
        _run_backward(
            roots, gradients, keep, False, leaves, allow_unreachable=True,
            accumulate_grad=True,
        )  # fmt: skip
        return [x.grad for x in xs]
    finally:
        for x, gradient in zip(xs, before, strict=True):
            x.grad = gradient


def _accumulate(
    roots: Sequence[Output], gradients: Sequence[Tensor], parameters: tuple[Tensor, ...]
) -> None:
    _run_backward(
        tuple(roots), tuple(gradients), True, False, parameters, allow_unreachable=True,
        accumulate_grad=True,
    )  # fmt: skip


def _ask(
    calls: tuple[_Call, ...],
    arrived: dict[int, tuple[Tensor | None, ...]],
    roots: list[Output],
    gradients: list[Tensor],
    parameters: tuple[Tensor, ...],
) -> None:
    """Ask nodes for the results that lead to parameters; runs inside the engine, under its mask."""
    alone: list[Output] = []
    ready: list[Tensor] = []
    pending = 0
    for index in list(arrived):
        given = arrived.pop(index)
        if all(gradient is None for gradient in given):
            continue
        node, results = calls[index]
        made = node(*given)
        if not isinstance(made, tuple):
            made = (made,)
        for place, edge, is_alone in results:
            gradient = made[place]
            if gradient is None:
                continue
            if is_alone:
                alone.append(edge)
                ready.append(gradient)
                pending += gradient.nbytes
            else:
                roots.append(edge)
                gradients.append(gradient)
        if pending > _PENDING_BYTES:
            _accumulate(alone, ready, parameters)
            alone.clear()
            ready.clear()
            pending = 0
    roots += alone
    gradients += ready


class _Masked(threading.local):
    """Runs a function inside torch's engine, with a mask of wanted edges.

    A node that is called there computes only those of its results whose edges are wanted. The
    engine is started on a leaf of our own, with nothing to do but to call the leaf's hook.
    """

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self._leaf = torch.zeros((), requires_grad=True)
            self._one = torch.ones(())
        self._work: Callable[[], None] | None = None
        self._leaf.register_hook(self._called)  # type: ignore[no-untyped-call]

    def _called(self, gradient: Tensor) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()

    def run(self, work: Callable[[], None], edges: Iterable[GradientEdge]) -> None:
        leaf = self._leaf
        self._work = work
        _run_backward(
            (leaf,), (self._one,), False, False, (leaf, *edges), allow_unreachable=True,
            accumulate_grad=False,
        )  # fmt: skip


_MASKED = _Masked()
