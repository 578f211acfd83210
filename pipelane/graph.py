"""The graph of layers and of the tensors between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelane.errors import PartitionError

if TYPE_CHECKING:
    import networkx

    from pipelane.profile import Profile

__all__ = ["Chain", "chain_costs", "chain_graph", "chain_order"]


class Chain(NamedTuple):
    """A chain as plain lists.

    Attributes:
        names: of the layers, in order.
        seconds: forward and backward of each.
        bytes: of the tensors between them, one fewer.
    """

    names: list[str]
    seconds: list[float]
    bytes: list[float]


def chain_graph(profile: Profile) -> networkx.DiGraph:
    """The layers as nodes 0, 1, ... and the tensors between them as edges.

    Nodes have ``name``, ``forward`` and ``backward`` (seconds), ``parameter_bytes`` and
    ``activation_bytes``; edges have ``bytes``.
    """
    import networkx

    graph = networkx.DiGraph()
    for index, layer in enumerate(profile.layers):
        graph.add_node(
            index,
            name=layer.name,
            forward=layer.forward_seconds,
            backward=layer.backward_seconds,
            parameter_bytes=layer.parameter_bytes,
            activation_bytes=layer.activation_bytes,
        )
        if index:
            graph.add_edge(index - 1, index, bytes=profile.layers[index - 1].output_bytes)
    return graph


def chain_order(graph: networkx.DiGraph) -> list[Any]:
    """The nodes of a chain, first to last.

    Raises:
        PartitionError: not a directed graph, empty, not one chain, or a cost is missing, negative
            or not finite; names the node or edge.
    """
    import networkx

    if not isinstance(graph, networkx.DiGraph) or graph.is_multigraph():
        raise PartitionError(
            f"expected a networkx.DiGraph, got {type(graph).__name__}; see pipelane.graph"
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
        if graph.in_degree(node) > 1 or graph.out_degree(node) > 1:
            raise PartitionError(
                f"node {node!r} has several inputs or outputs; this version partitions chains "
                "only (partitions of graphs with branches will come): merge the branches into one "
                "node"
            )
    if graph.number_of_edges() != len(order) - 1:
        starts = ", ".join(repr(node) for node in order if not graph.in_degree(node))
        raise PartitionError(
            f"the graph falls into several parts, which start at {starts}; expected one chain: "
            "connect them"
        )
    _check_costs(graph, order)
    return order


def chain_costs(graph: networkx.DiGraph) -> Chain:
    """A chain's costs in order.

    Nodes need ``forward`` and ``backward``, or ``seconds`` for both together; ``name`` defaults to
    the node itself and ``bytes`` of an edge to 0.

    Raises:
        PartitionError: see :func:`chain_order`.
    """
    order = chain_order(graph)
    nodes = [graph.nodes[node] for node in order]
    return Chain(
        [str(data.get("name", node)) for node, data in zip(order, nodes, strict=True)],
        [sum(float(data[key]) for key in _time_keys(data)) for data in nodes],
        [float(graph.edges[pair].get("bytes", 0)) for pair in pairwise(order)],
    )


def _time_keys(data: Mapping[str, Any]) -> tuple[str, ...]:
    both = ("forward", "backward")
    return ("seconds",) if "seconds" in data and not any(key in data for key in both) else both


def _check_costs(graph: networkx.DiGraph, order: list[Any]) -> None:
    for node in order:
        data = graph.nodes[node]
        name = data.get("name", node)
        where = f"node {node!r} ({name})" if name != node else f"node {node!r}"
        for key in _time_keys(data):
            _check_cost(where, data, key)
    for pair in pairwise(order):
        if "bytes" in graph.edges[pair]:
            _check_cost(f"edge {pair[0]!r} -> {pair[1]!r}", graph.edges[pair], "bytes")


def _check_cost(where: str, data: Mapping[str, Any], key: str) -> None:
    value = data.get(key)
    try:
        fine = math.isfinite(value) and value >= 0  # type: ignore[arg-type, operator]
    except TypeError:
        fine = False
    if not fine:
        raise PartitionError(
            f"{where}: {key} must be a finite number >= 0, got {value!r}"
            + ("; set it on the graph" if value is None else "")
        )
