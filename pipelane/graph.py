"""The graph of layers and of the tensors between them.

A graph is a ``networkx.DiGraph``. Its nodes are layers (or operators), an edge a -> b says that a
must not be in a later stage than b. Node attributes, all optional but the time:

- ``forward`` and ``backward``, or ``input_grad`` and ``weight_grad`` in place of ``backward``, or
  ``seconds`` for all together;
- ``parameter_bytes``; ``static_bytes``: what the node holds all the time (parameters, gradients,
  optimizer state), ``parameter_bytes`` if not given;
- ``activation_bytes``: what is held per micro-batch from forward to backward;
- ``name``: for tables and messages, else the node itself.

``graph.graph`` may hold ``tensors`` (a tuple of :class:`Tensor`), ``colocate`` (groups of nodes
that stay together), ``tied`` (a tuple of :class:`Tied`) and ``unit``, the unit of all times ("s"
if not given; public profiles come in "ms"). Without ``tensors`` every edge with ``bytes`` or
``seconds`` is a tensor of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipelane.errors import ConfigError, PartitionError
from pipelane.files import json_object

if TYPE_CHECKING:
    import networkx

    from pipelane.profile import Profile

__all__ = [
    "Tensor",
    "Tied",
    "build_graph",
    "chain_graph",
    "graph_from_json",
    "graph_to_json",
    "is_chain",
    "node_name",
    "tensors_of",
    "times_of",
    "validate_graph",
]

SCHEMA = 1
_KIND = "pipelane.graph"
_TIMES = ("forward", "backward", "input_grad", "weight_grad", "seconds")
_BYTES = ("parameter_bytes", "static_bytes", "activation_bytes")
_ATTRIBUTES = ("name", *_TIMES, *_BYTES)


@dataclass(frozen=True)
class Tensor:
    """What one node makes and others take.

    A stage pays for it once, however many of its nodes take it, and nothing where producer and
    consumers are all in one stage.

    Attributes:
        source: the node that makes it.
        consumers: the nodes that take it.
        bytes: its size; its gradient has the same.
        seconds: of one transfer over a stage boundary, forward and gradient together, if that is
            known and does not follow from ``bytes`` and a link.
        name: for messages.
        orders: whether its consumers must not be in earlier stages than its source; not so for
            gradients, and for what a forward leaves to some backward.
    """

    source: Hashable
    consumers: tuple[Hashable, ...]
    bytes: float = 0.0
    seconds: float = 0.0
    name: str = ""
    orders: bool = True


@dataclass(frozen=True)
class Tied:
    """Nodes that share parameters.

    Attributes:
        nodes: those that share.
        bytes: of the parameters that they share.
        name: of the parameter, for messages.
        static_bytes: with gradient and optimizer state; ``bytes`` if not given.
    """

    nodes: tuple[Hashable, ...]
    bytes: float
    name: str = ""
    static_bytes: float | None = None


def build_graph(
    nodes: Mapping[Hashable, Mapping[str, Any]],
    tensors: Iterable[Tensor] = (),
    *,
    order: Iterable[tuple[Hashable, Hashable]] = (),
    colocate: Iterable[Iterable[Hashable]] = (),
    tied: Iterable[Tied] = (),
    unit: str = "s",
) -> networkx.DiGraph:
    """A graph from its nodes and tensors; each tensor gives the edges to its consumers.

    Args:
        nodes: node -> attributes, see the module.
        tensors: what passes between them.
        order: further edges, without a tensor.
        colocate: groups of nodes that must be in one stage.
        tied: nodes that share parameters.
        unit: of all times.

    Raises:
        PartitionError: see :func:`validate_graph`.
    """
    import networkx

    graph = networkx.DiGraph(
        tensors=tuple(tensors),
        colocate=tuple(tuple(group) for group in colocate),
        tied=tuple(tied),
        unit=unit,
    )
    for node, data in nodes.items():
        graph.add_node(node, **data)
    edges = [*order, *_edges(graph.graph["tensors"])]
    for source, target in edges:
        for end in (source, target):
            if end not in nodes:
                raise PartitionError(
                    f"edge {source!r} -> {target!r}: there is no node {end!r}; add it or remove "
                    "the edge"
                )
        graph.add_edge(source, target)
    validate_graph(graph)
    return graph


def _edges(tensors: Iterable[Tensor]) -> Iterator[tuple[Hashable, Hashable]]:
    return ((t.source, to) for t in tensors if t.orders for to in t.consumers)


def chain_graph(profile: Profile) -> networkx.DiGraph:
    """The layers as nodes 0, 1, ... and the tensors between them as edges.

    Nodes have ``name``, ``forward``, ``backward``, ``input_grad`` and ``weight_grad`` (seconds),
    ``parameter_bytes``, ``static_bytes`` and ``activation_bytes``; edges have ``bytes``. Values
    that skip layers are further tensors.
    """
    import networkx

    graph = networkx.DiGraph(
        tied=tuple(
            Tied(one.layers, one.bytes, one.name, one.static_bytes) for one in profile.shared
        )
    )
    for index, layer in enumerate(profile.layers):
        graph.add_node(
            index,
            name=layer.name,
            forward=layer.forward_seconds,
            backward=layer.backward_seconds,
            input_grad=layer.input_grad_seconds,
            weight_grad=layer.weight_grad_seconds,
            parameter_bytes=layer.parameter_bytes,
            static_bytes=layer.static_bytes,
            activation_bytes=layer.activation_bytes,
        )
        if index:
            graph.add_edge(index - 1, index, bytes=profile.layers[index - 1].output_bytes)
    if profile.skips:
        # What goes past layers is a tensor of its own, beside that of the same layer's output.
        chain = [
            Tensor(source, (target,), data["bytes"])
            for source, target, data in graph.edges(data=True)
        ]
        past = [
            Tensor(one.source, (one.target,), one.bytes, name=one.name) for one in profile.skips
        ]
        graph.graph["tensors"] = (*chain, *past)
        graph.add_edges_from((one.source, one.target) for one in profile.skips)
    return graph


def node_name(graph: networkx.DiGraph, node: Hashable) -> str:
    """What a node is called."""
    return str(graph.nodes[node].get("name", node))


def times_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """The times of a node by name: those that it must have, and what stands in for backward."""
    if "seconds" in data and not ("forward" in data or "backward" in data):
        return {"seconds": data["seconds"]}
    if "input_grad" in data or "weight_grad" in data:
        found = {key: data.get(key) for key in ("forward", "input_grad", "weight_grad")}
        if "backward" in data:  # measured as a whole, which may be less than its two parts
            found["backward"] = data["backward"]
        return found
    return {key: data.get(key) for key in ("forward", "backward")}


def tensors_of(graph: networkx.DiGraph) -> tuple[Tensor, ...]:
    """The tensors of a graph: those it lists, or one per edge."""
    if "tensors" in graph.graph:
        return tuple(graph.graph["tensors"])
    return tuple(
        Tensor(source, (target,), data.get("bytes", 0.0), data.get("seconds", 0.0))
        for source, target, data in graph.edges(data=True)
        if "bytes" in data or "seconds" in data
    )


def is_chain(graph: networkx.DiGraph) -> bool:
    """Whether the nodes can stand in one row only, each joined to the next by one edge."""
    return graph.number_of_edges() == len(graph) - 1 and all(
        graph.in_degree(node) <= 1 and graph.out_degree(node) <= 1 for node in graph
    )


def validate_graph(graph: networkx.DiGraph) -> list[Hashable]:
    """Check a graph before anything is computed from it.

    Returns:
        Its nodes in a topological order.

    Raises:
        PartitionError: not a directed graph, empty, a cycle, a cost that is missing, negative or
            not finite, or a tensor or group with an unknown node; names it.
    """
    import networkx

    if not isinstance(graph, networkx.DiGraph) or graph.is_multigraph():
        raise PartitionError(
            f"expected a profile or a networkx.DiGraph, got {type(graph).__name__}; see "
            "pipelane.graph"
        )
    if not graph:
        raise PartitionError("the graph has no nodes; add one per layer")
    try:
        order = list(networkx.topological_sort(graph))
    except networkx.NetworkXUnfeasible:
        cycle = [a for a, _ in networkx.find_cycle(graph)]
        names = " -> ".join(map(repr, [*cycle, cycle[0]]))
        raise PartitionError(
            f"the graph has a cycle: {names}; a layer cannot need its own result, remove an edge"
        ) from None
    for node in order:
        data = graph.nodes[node]
        name = data.get("name", node)
        where = f"node {node!r} ({name})" if name != node else f"node {node!r}"
        for key, value in times_of(data).items():
            _check_cost(where, key, value)
        for key in _BYTES:
            if key in data:
                _check_cost(where, key, data[key])
    for tensor in tensors_of(graph):
        where = _tensor_label(tensor)
        for key in ("bytes", "seconds"):
            _check_cost(where, key, getattr(tensor, key))
        _check_known(graph, where, (tensor.source, *tensor.consumers))
    for group in graph.graph.get("colocate", ()):
        _check_known(graph, f"colocation group {list(group)}", group)
    for tied in graph.graph.get("tied", ()):
        _check_known(graph, f"tied parameter {tied.name!r}", tied.nodes)
        _check_cost(f"tied parameter {tied.name!r}", "bytes", tied.bytes)
    return order


def _tensor_label(tensor: Tensor) -> str:
    ends = f"{tensor.source!r} -> {', '.join(map(repr, tensor.consumers))}"
    return f"tensor {tensor.name!r} ({ends})" if tensor.name else f"edge {ends}"


def _check_known(graph: networkx.DiGraph, where: str, nodes: Iterable[Hashable]) -> None:
    for node in nodes:
        if node not in graph:
            raise PartitionError(f"{where}: there is no node {node!r}; add it or take it out")


def _check_cost(where: str, key: str, value: Any) -> None:
    try:
        fine = math.isfinite(value) and value >= 0
    except TypeError:
        fine = False
    if not fine:
        raise PartitionError(
            f"{where}: {key} must be a finite number >= 0, got {value!r}"
            + ("; set it on the graph" if value is None else "")
        )


def graph_to_json(graph: networkx.DiGraph) -> str:
    """A graph as a JSON object; the reverse of :func:`graph_from_json`.

    Nodes must be strings or whole numbers.

    Raises:
        PartitionError: the graph is not valid.
        ConfigError: a node is something that JSON has no form for.
    """
    for node in validate_graph(graph):
        if not isinstance(node, (str, int)) or isinstance(node, bool):
            raise ConfigError(f"node {node!r} is neither text nor a whole number; rename the nodes")
    tensors = tensors_of(graph)
    implied = set(_edges(tensors))
    data: dict[str, Any] = {
        "kind": _KIND,
        "schema": SCHEMA,
        "unit": graph.graph.get("unit", "s"),
        "nodes": [
            {"id": node, **{key: found[key] for key in _ATTRIBUTES if key in found}}
            for node, found in graph.nodes(data=True)
        ],
        "tensors": [
            {
                "source": tensor.source,
                "consumers": list(tensor.consumers),
                "bytes": tensor.bytes,
                "seconds": tensor.seconds,
                "name": tensor.name,
                "orders": tensor.orders,
            }
            for tensor in tensors
        ],
        "edges": [list(edge) for edge in graph.edges if edge not in implied],
        "colocate": [list(group) for group in graph.graph.get("colocate", ())],
        "tied": [
            {
                "nodes": list(tied.nodes),
                "bytes": tied.bytes,
                "name": tied.name,
                "static_bytes": tied.static_bytes,
            }
            for tied in graph.graph.get("tied", ())
        ],
    }
    return json.dumps(data)


def graph_from_json(text: str, where: str = "graph") -> networkx.DiGraph:
    """Read what :func:`graph_to_json` wrote, or a file written by hand in that form.

    Only ``kind`` and ``nodes`` (and of a node its ``id`` and times) are needed.

    Args:
        text: the JSON object.
        where: what to call it in messages, such as its file.

    Raises:
        ConfigError: not such an object; says which entry and what was expected.
        PartitionError: a graph that is not valid, see :func:`validate_graph`.
    """
    data = json_object(text, where)
    if data.get("kind") != _KIND:
        raise ConfigError(f"{where}: expected an object with kind {_KIND!r}")
    if not (isinstance(data.get("schema", 1), int) and 1 <= data.get("schema", 1) <= SCHEMA):
        raise ConfigError(f"{where}: schema {data['schema']!r}; this version reads up to {SCHEMA}")
    nodes: dict[Hashable, dict[str, Any]] = {}
    for number, entry in enumerate(_entries(data, "nodes", where)):
        found = _fields(entry, ("id",), _ATTRIBUTES, f"{where}, node {number}")
        node = found.pop("id")
        if node in nodes:
            raise ConfigError(f"{where}, node {number}: a second node {node!r}; ids must differ")
        nodes[node] = found
    tensors = []
    for number, entry in enumerate(_entries(data, "tensors", where)):
        place = f"{where}, tensor {number}"
        found = _fields(
            entry, ("source", "consumers"), ("bytes", "seconds", "name", "orders"), place
        )
        found["consumers"] = _nodes(found["consumers"], place)
        tensors.append(Tensor(**found))
    tied = []
    for number, entry in enumerate(_entries(data, "tied", where)):
        place = f"{where}, tied parameter {number}"
        found = _fields(entry, ("nodes", "bytes"), ("name", "static_bytes"), place)
        found["nodes"] = _nodes(found["nodes"], place)
        tied.append(Tied(**found))
    edges = [_nodes(edge, f"{where}, edge {i}") for i, edge in enumerate(data.get("edges", ()))]
    for number, edge in enumerate(edges):
        if len(edge) != 2:
            raise ConfigError(f"{where}, edge {number}: expected [from, to], got {list(edge)}")
    groups = data.get("colocate", ())
    colocate = [_nodes(group, f"{where}, colocation group {i}") for i, group in enumerate(groups)]
    unit = data.get("unit", "s")
    try:
        return build_graph(
            nodes,
            tensors,
            order=[(edge[0], edge[1]) for edge in edges],
            colocate=colocate,
            tied=tied,
            unit=str(unit),
        )
    except PartitionError as error:
        raise PartitionError(f"{where}: {error}") from None


def _entries(data: Mapping[str, Any], key: str, where: str) -> Sequence[Any]:
    found = data.get(key, [] if key != "nodes" else None)
    if not isinstance(found, list):
        raise ConfigError(f"{where}: {key!r} must be a list, got {type(found).__name__}")
    return found


def _fields(entry: Any, needed: Sequence[str], more: Sequence[str], where: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: expected an object, got {entry!r}")
    for key in needed:
        if key not in entry:
            raise ConfigError(
                f"{where}: {key!r} is missing; it has {', '.join(entry) or 'nothing'}"
            )
    for key in entry:
        if key not in needed and key not in more:
            raise ConfigError(f"{where}: unknown {key!r}; expected {', '.join((*needed, *more))}")
    return dict(entry)


def _nodes(value: Any, where: str) -> tuple[Hashable, ...]:
    if not isinstance(value, list) or not all(isinstance(x, (str, int)) for x in value):
        raise ConfigError(f"{where}: expected a list of node ids, got {value!r}")
    return tuple(value)
