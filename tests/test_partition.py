"""The chain partition is optimal: against brute force, neighbours' rules and public profiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise

import networkx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pipelane
from pipelane.costs import Link
from pipelane.errors import PartitionError
from pipelane.graph import chain_graph
from pipelane.partition import Partition, chain_partition, validate_sizes
from pipelane.profile import LayerProfile, Profile
from pipelane.views.tables import human_bytes, partition_text

# Forward + backward in ms of the layers of VGG-16, from PipeDream's published profile
# (github.com/msr-fiddle/pipedream, profiler/image_classification/profiles/vgg16, MIT licence);
# its one node beside the chain costs nothing.
VGG16 = [
    46.92, 9.999, 159.531, 9.766, 9.374, 54.803, 5.097, 75.441, 5.133, 4.999, 29.149, 2.757,
    44.481, 3.103, 48.133, 2.87, 2.682, 23.823, 1.722, 37.259, 1.527, 40.445, 1.523, 1.583,
    12.989, 1.05, 11.466, 0.653, 12.69, 0.63, 0.787, 0.0, 7.05, 0.407, 0.0, 1.443, 0.309, 0.0,
    0.941,
]  # fmt: skip


def times(costs: Sequence[float], sizes: Sequence[int], boundary: Sequence[float]) -> list[float]:
    edge = [0.0, *(boundary or [0.0] * (len(costs) - 1)), 0.0]
    ends = [0, *accumulate(sizes)]
    return [sum(costs[a:b]) + edge[a] + edge[b] for a, b in pairwise(ends)]


def every_partition(n: int, k: int) -> list[list[int]]:
    made = []
    for cuts in combinations(range(1, n), k - 1):
        ends = [0, *cuts, n]
        made.append([b - a for a, b in pairwise(ends)])
    return made


cost = st.one_of(st.just(0.0), st.floats(0, 100), st.integers(0, 5).map(float))


@given(data=st.data(), n=st.integers(1, 9))
def test_equals_brute_force(data: st.DataObject, n: int) -> None:
    costs = data.draw(st.lists(cost, min_size=n, max_size=n))
    boundary = data.draw(st.lists(cost, min_size=n - 1, max_size=n - 1))
    if data.draw(st.booleans()):
        boundary = []
    k = data.draw(st.integers(1, n))
    sizes = chain_partition(costs, k, boundary=boundary)
    assert sum(sizes) == n
    assert len(sizes) == k
    assert min(sizes) >= 1
    found = times(costs, sizes, boundary)
    options = [times(costs, other, boundary) for other in every_partition(n, k)]
    best = min(max(option) for option in options)
    assert max(found) == pytest.approx(best, rel=1e-9, abs=1e-9)
    # Ties are broken towards evenness.
    even = min(
        sum(t * t for t in option) for option in options if max(option) <= best * (1 + 1e-12)
    )
    assert sum(t * t for t in found) <= even * (1 + 1e-6) + 1e-6


@pytest.mark.parametrize(
    ("costs", "stages", "best"),
    [
        ([6, 6, 6, 9, 9], 4, 12),  # torchgpipe's balance by time gives 27
        ([2, 8, 4, 4], 3, 8),  # DeepSpeed's balanced split gives 10
        ([1], 1, 1),
        ([0, 0, 0], 2, 0),
        ([5, 1, 1, 1, 1, 1], 2, 5),
    ],
)
def test_counterexamples_of_neighbours(costs: list[float], stages: int, best: float) -> None:
    assert max(times(costs, chain_partition(costs, stages), [])) == best


@pytest.mark.parametrize(
    ("stages", "best"), [(2, 370.931), (4, 216.450), (6, 159.531), (8, 159.531)]
)
def test_vgg16_as_published(stages: int, best: float) -> None:
    assert max(times(VGG16, chain_partition(VGG16, stages), [])) == pytest.approx(best, abs=1e-3)


def test_a_longer_stage_can_be_cheaper_once_communication_is_priced() -> None:
    """Filling stages greedily up to a limit stops before the dear boundary and fails."""
    costs, boundary = [1.0, 1.0, 1.0, 1.0], [0.0, 10.0, 0.0]
    assert chain_partition(costs, 2, boundary=boundary) in ([1, 3], [3, 1])


def profile_of(seconds: Sequence[float], output_bytes: int = 1000) -> Profile:
    layers = tuple(
        LayerProfile(f"l{i}", "Layer", s / 3, 2 * s / 3, 100, 50, output_bytes, (2, 2), "float32")
        for i, s in enumerate(seconds)
    )
    return Profile(layers, 2, 16, "cpu", 1)


def test_profile_and_graph_give_the_same() -> None:
    measured = profile_of([1, 9, 2, 2, 3])
    link = Link(0.1, 1e4)
    one = pipelane.partition(measured, 3, link=link)
    other = pipelane.partition(chain_graph(measured), 3, link=link)
    assert one.stages == other.stages
    assert one.stages[0] == ("l0",)
    assert one.stage_seconds == pytest.approx(other.stage_seconds)
    assert one.exact
    assert one.lower_bound == one.bottleneck == max(one.stage_seconds)
    # The middle stage pays both its boundaries: 2 * (0.1 + 1000 / 1e4) each.
    assert one.bottleneck == pytest.approx(9 + 2 * 0.4)
    assert "single layer 'l1'" in one.limit


def test_bad_graphs() -> None:
    graph = networkx.DiGraph()
    with pytest.raises(PartitionError, match="no nodes"):
        pipelane.partition(graph, 1)
    graph.add_node("a", seconds=1.0)
    graph.add_node("b", seconds=1.0)
    with pytest.raises(PartitionError, match="several parts"):
        pipelane.partition(graph, 1)
    graph.add_edge("a", "b")
    graph.add_edge("b", "a")
    with pytest.raises(PartitionError, match="cycle"):
        pipelane.partition(graph, 1)
    graph.remove_edge("b", "a")
    graph.add_node("c", seconds=1.0)
    graph.add_edge("a", "c")
    with pytest.raises(PartitionError, match="'a' has several"):
        pipelane.partition(graph, 1)
    graph.remove_node("c")
    for bad in (-1.0, math.nan, None, "x"):
        graph.nodes["b"]["seconds"] = bad
        with pytest.raises(PartitionError, match="'b'"):
            pipelane.partition(graph, 1)


@pytest.mark.parametrize(
    ("costs", "stages", "boundary", "word"),
    [
        ([1.0], 2, [], "2 stages for 1 layers"),
        ([1.0], 0, [], "at least 1"),
        ([], 1, [], "1 stages for 0"),
        ([1.0, -1.0], 1, [], "layer 1"),
        ([1.0, math.nan], 1, [], "layer 1"),
        ([1.0, 1.0], 1, [math.inf], "boundary 0"),
        ([1.0, 1.0], 1, [1.0, 1.0], "2 boundaries"),
    ],
)
def test_bad_costs(costs: list[float], stages: int, boundary: list[float], word: str) -> None:
    with pytest.raises(PartitionError, match=word):
        chain_partition(costs, stages, boundary=boundary)


@pytest.mark.parametrize("sizes", [[1, 1], [2, 2], [0, 3], [-1, 4], [1.0, 2], [3], [1, 1, 1]])
def test_sizes_given_by_hand(sizes: list[int]) -> None:
    validate_sizes([1, 2], 3, 2)
    with pytest.raises(PartitionError):
        validate_sizes(sizes, 3, 2)
    assert Partition.from_sizes(["a", "b", "c"], [1, 2]).stages == (("a",), ("b", "c"))


def test_table_fits_and_says_what_limits() -> None:
    measured = profile_of([1e-3, 5e-3, 2e-3, 2e-3, 3e-3])
    for width in (60, 80, 120):
        text = partition_text(pipelane.partition(measured, 3), measured, width)
        text.encode("ascii")
        assert max(map(len, text.splitlines())) <= width
        assert "100%" in text
        assert "6.00 ms" in text
    by_hand = partition_text(Partition.from_sizes(["a", "b"], [1, 1]))
    assert "by hand" in by_hand
    assert human_bytes(1536) == "1.5 KiB"
    assert human_bytes(5) == "5 B"


def test_plan_predicts_the_step() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    measured = profile_of([1, 1, 1, 1, 1, 1])
    made = pipelane.plan(model, torch.randn(2, 8), 3, microbatches=4, measured=measured)
    assert made.partition.sizes == (2, 2, 2)
    assert made.timeline.makespan == pytest.approx((4 + 3 - 1) * 2)
    assert made.costs.activation_bytes == (100, 100, 100)
    assert made.memory_bytes == tuple(4 * 200 + k * 100 for k in (3, 2, 1))
    with pytest.raises(PartitionError, match=r"rank 0 needs 1100 bytes.*100 more"):
        pipelane.plan(model, torch.randn(2, 8), 3, microbatches=4, measured=measured, memory=1000)
    real = pipelane.plan(model, torch.randn(2, 8), 2, microbatches=2, schedule="gpipe")
    assert real.schedule.name == "gpipe"
    assert real.timeline.makespan > 0
