"""Graph files: our own JSON, public formats, and what is wrong with them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelane.commands import parse_bytes
from pipelane.errors import ConfigError, PartitionError
from pipelane.formats import read_dnn_partitioning, read_graph, read_pipedream, read_piper
from pipelane.graph import (
    Tensor,
    Tied,
    build_graph,
    graph_from_json,
    graph_to_json,
    is_chain,
    tensors_of,
)

GRAPHS = Path(__file__).parent / "data" / "graphs"

cost = st.floats(0, 1e6)


@given(data=st.data(), n=st.integers(1, 6))
def test_json_round_trip(data: st.DataObject, n: int) -> None:
    ids: list[Any] = data.draw(
        st.lists(st.one_of(st.integers(), st.text(max_size=4)), min_size=n, max_size=n, unique=True)
    )
    nodes = {
        node: data.draw(
            st.sampled_from(
                [
                    {"seconds": 1.5},
                    {"forward": 1.0, "backward": 0.0, "name": "größe"},
                    {"forward": 1.0, "input_grad": 2.0, "weight_grad": 0.5, "backward": 2.25},
                ]
            )
        )
        | {"parameter_bytes": data.draw(cost), "activation_bytes": data.draw(cost)}
        for node in ids
    }
    tensors = [
        Tensor(ids[i], tuple(ids[i + 1 : i + 3]), data.draw(cost), data.draw(cost), "t")
        for i in range(n - 1)
    ]
    if n > 1:
        tensors.append(Tensor(ids[1], (ids[0],), 1.0, orders=False))
    graph = build_graph(
        nodes, tensors, order=[(ids[0], ids[-1])] if n > 1 else [], colocate=[ids[:1]],
        tied=[Tied((ids[0], ids[-1]), 4.0, "w")], unit="ms",
    )  # fmt: skip
    again = graph_from_json(graph_to_json(graph))
    assert dict(again.nodes(data=True)) == dict(graph.nodes(data=True))
    assert set(again.edges) == set(graph.edges)
    assert again.graph == graph.graph


def test_edges_with_bytes_are_tensors() -> None:
    import networkx

    graph = networkx.DiGraph()
    graph.add_node("a", seconds=1)
    graph.add_node("b", seconds=1)
    graph.add_edge("a", "b", bytes=3)
    assert tensors_of(graph) == (Tensor("a", ("b",), 3),)
    assert is_chain(graph)
    assert tensors_of(graph_from_json(graph_to_json(graph))) == (Tensor("a", ("b",), 3, 0.0),)


def test_formats_are_recognised_by_content(tmp_path: Path) -> None:
    for name, nodes, unit in (
        ("dnn-partitioning/bert24_training.json", 64, "ms"),
        ("pipedream/gnmt.txt", 45, "ms"),
        ("piper/bert32a100.json", 37, "s"),
    ):
        copy = tmp_path / "graph.dat"
        copy.write_text((GRAPHS / name).read_text())
        graph: Any = read_graph(copy)
        assert (len(graph), graph.graph["unit"]) == (nodes, unit)
        own = tmp_path / "own.json"
        own.write_text(graph_to_json(graph))
        again: Any = read_graph(own)
        assert set(again.edges) == set(graph.edges)
        assert len(again.graph["tensors"]) == len(graph.graph["tensors"])


def test_pipedream_lists_and_inputs() -> None:
    graph = read_pipedream(
        "node1 -- Input0 -- forward_compute_time=0.0, backward_compute_time=0.0, "
        "activation_size=0.0, parameter_size=0.0\n"
        "node2 -- LSTM(4, 4) -- forward_compute_time=1.5, backward_compute_time=2.5, "
        "activation_size=[6.0; 6.0], parameter_size=8.0\n"
        "node3 -- A -- b -- forward_compute_time=1e-3, backward_compute_time=0, "
        "activation_size=1.0, parameter_size=0.0\n"
        "\tnode1 -- node2\n\tnode2 -- node3\n"
    )
    assert set(graph) == {"node2", "node3"}
    assert graph.nodes["node2"] == {
        "forward": 1.5, "backward": 2.5, "parameter_bytes": 8.0, "activation_bytes": 12.0,
    }  # fmt: skip
    assert graph.graph["tensors"] == (Tensor("node2", ("node3",), 12.0, 2e3 * 12 / 12e9),)


def node(number: int, color: int | None = None, backward: bool = False, **more: Any) -> Any:
    found = {"id": number, "fpgaLatency": 1.0, "isBackwardNode": backward, "size": 2.0, **more}
    return found | ({"colorClass": color} if color is not None else {})


def test_backward_edges_either_way_round() -> None:
    """Operator graphs write gradients from the loss on, layer graphs as the forward."""
    nodes = [node(0, 1), node(1, 2), node(2, 1, True), node(3, 2, True)]
    forward = {"sourceId": 0, "destId": 1, "cost": 3.0}
    real = {"sourceId": 3, "destId": 2, "cost": 4.0}
    mirrored = {"sourceId": 2, "destId": 3, "cost": 4.0}
    kept = {"sourceId": 0, "destId": 3, "cost": 5.0}
    for backward in (real, mirrored):
        text = json.dumps({"nodes": nodes, "edges": [forward, backward, kept]})
        graph = read_dnn_partitioning(text)
        assert set(graph.edges) == {(0, 1), (2, 3)}
        assert {tensor.seconds for tensor in graph.graph["tensors"]} == {3.0, 4.0, 5.0}
        assert sorted(map(sorted, graph.graph["colocate"])) == [[0, 2], [1, 3]]


GOOD = "node1 -- A -- forward_compute_time=1, backward_compute_time=1, activation_size=1, parameter_size=1\n"  # noqa: E501


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "no node found"),
        ("nonsense\n", "line 1: expected 'node1 -- Description"),
        (GOOD + GOOD, "line 2: a second node 'node1'"),
        (GOOD + "\tnode1 -- node7\n", "line 2: there is no node 'node7'"),
        (GOOD.replace("forward_compute_time=1", "forward_compute_time=-1"), "line 1: forward"),
        (GOOD.replace("activation_size=1", "activation_size=[1; x]"), "line 1: activation_size"),
        (GOOD.replace(", activation_size=1", ""), "line 1: activation_size is missing"),
        (GOOD.replace("_time=1", "_time=nan"), "line 1: forward_compute_time must be"),
        (GOOD + "\tnode1 -- node1\n", "cycle"),
        ("{", "not JSON"),
        ("{}", "none of the known formats"),
        ('{"nodes": [{"fpgaLatency": 1}]}', "'nodes' must|'id' must|'edges' must"),
        ('{"kind": "pipelane.profile"}', "not a profile"),
        ('{"kind": "pipelane.graph"}', "'nodes' must be a list"),
        ('{"kind": "pipelane.graph", "schema": 99, "nodes": []}', "schema 99"),
        ('{"kind": "pipelane.graph", "nodes": []}', "no nodes"),
        ('{"kind": "pipelane.graph", "nodes": [{"name": "a"}]}', "node 0: 'id' is missing"),
        ('{"kind": "pipelane.graph", "nodes": [{"id": 1, "sec": 1}]}', "node 0: unknown 'sec'"),
        ('{"kind": "pipelane.graph", "nodes": [{"id": 1}]}', "node 1: forward must be"),
        ('{"kind": "pipelane.graph", "nodes": [{"id": 1, "seconds": -1}]}', "seconds must be"),
        (
            '{"kind": "pipelane.graph", "nodes": [{"id": 1, "seconds": 1}], '
            '"tensors": [{"source": 1, "consumers": [2]}]}',
            "there is no node 2",
        ),
        (
            '{"kind": "pipelane.graph", "nodes": [{"id": 1, "seconds": 1}], "edges": [[1]]}',
            "edge 0: expected",
        ),
        (
            '{"kind": "pipelane.graph", "nodes": [{"id": 1, "seconds": 1}], "colocate": [[9]]}',
            "no node 9",
        ),
    ],
)
def test_malformed_files(text: str, word: str, tmp_path: Path) -> None:
    file = tmp_path / "graph.txt"
    file.write_text(text)
    with pytest.raises((ConfigError, PartitionError), match=word) as caught:
        read_graph(file)
    assert str(file) in str(caught.value) or "cycle" in word


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"nodes": [node(0), node(0)]}, "node 1: a second node with id 0"),
        ({"edges": [{"sourceId": 0, "destId": 5}]}, "edge 0: there is no node 5"),
        ({"nodes": [node(0, fpgaLatency=-1)]}, "node 0: fpgaLatency must be"),
        ({"nodes": [node(0, fpgaLatency=None)]}, "node 0: 'fpgaLatency' is missing"),
        ({"nodes": [{"id": [], "fpgaLatency": 1}]}, "node 0: 'id' must be"),
        ({"edges": [{"sourceId": 0, "destId": 0, "cost": "x"}]}, "edge 0: cost must be"),
    ],
)
def test_malformed_dnn_partitioning(change: dict[str, Any], word: str) -> None:
    with pytest.raises((ConfigError, PartitionError), match=word):
        read_dnn_partitioning(json.dumps({"nodes": [node(0)], "edges": []} | change))


def test_malformed_piper() -> None:
    for nodes, word in (
        ([{"id": 0, "TMPCs": {"1": []}}], "no variant 'vanilla'"),
        ([{"id": 0, "TMPCs": {"1": [{"id": "vanilla"}]}}], "'timePerSample' is missing"),
    ):
        with pytest.raises(ConfigError, match=word):
            read_piper(json.dumps({"nodes": nodes, "edges": []}))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_graph(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20GiB", 20 * 2**30),
        ("16GB", 16e9),
        ("12e9", 12e9),
        ("1.5 kib", 1536),
        ("7b", 7),
        ("3T", 3e12),
    ],
)
def test_sizes(text: str, size: float) -> None:
    assert parse_bytes(text) == size
    assert math.isfinite(size)


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.2.3", "5iB", "lots", "0"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="not a size"):
        parse_bytes(text)
