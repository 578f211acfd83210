"""The graph of layers and of the tensors between them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pipelane.errors import PartitionError

if TYPE_CHECKING:
    import networkx

    from pipelane.profile import Profile

__all__ = ["chain_costs", "chain_graph"]


def chain_graph(profile: Profile) -> networkx.DiGraph:
    """The layers as nodes 0, 1, ... and the tensors between them as edges.

    Nodes have ``name``, ``seconds`` (forward and backward) and ``parameter_bytes``; edges have
    ``bytes``.
    """
    import networkx

    graph = networkx.DiGraph()
    for index, layer in enumerate(profile.layers):
        graph.add_node(
            index, name=layer.name, seconds=layer.seconds, parameter_bytes=layer.parameter_bytes
        )
        if index:
            graph.add_edge(index - 1, index, bytes=profile.layers[index - 1].output_bytes)
    return graph


def chain_costs(graph: networkx.DiGraph) -> tuple[list[str], list[float], list[float]]:
    """Names and seconds of a chain's nodes in order, and bytes of the edges between them.

    Nodes need ``seconds``; ``name`` defaults to the node itself, ``bytes`` of an edge to 0.

    Raises:
        PartitionError: the graph is empty or not a chain, or a cost is missing, negative or NaN.
    """
    import networkx

    if not graph:
        raise PartitionError("the graph has no nodes")
    if not networkx.is_directed_acyclic_graph(graph):
        cycle = " -> ".join(str(a) for a, _ in networkx.find_cycle(graph))
        raise PartitionError(f"the graph has a cycle: {cycle}")
    order = list(networkx.topological_sort(graph))
    if list(graph.edges) and any(d > 1 for _, d in (*graph.in_degree, *graph.out_degree)):
        branch = next(n for n in order if graph.in_degree(n) > 1 or graph.out_degree(n) > 1)
        raise PartitionError(
            f"node {branch!r} has several inputs or outputs; this version partitions chains only"
        )
    if graph.number_of_edges() != len(order) - 1:
        raise PartitionError("the graph falls into several parts; expected one chain")
    seconds: list[float] = []
    for node in order:
        cost = graph.nodes[node].get("seconds")
        if not isinstance(cost, (int, float)) or not math.isfinite(cost) or cost < 0:
            raise PartitionError(f"node {node!r}: seconds must be finite and >= 0, got {cost!r}")
        seconds.append(float(cost))
    names = [str(graph.nodes[node].get("name", node)) for node in order]
    sizes = [
        float(graph.edges[a, b].get("bytes", 0)) for a, b in zip(order, order[1:], strict=False)
    ]
    return names, seconds, sizes
