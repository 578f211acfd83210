"""The chain partition is optimal: against brute force, neighbours' rules and public profiles."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise
from pathlib import Path

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipelane
from pipelane.costs import Link
from pipelane.errors import PartitionError
from pipelane.graph import chain_graph, validate_graph
from pipelane.partition import Partition, chain_partition, validate_sizes
from pipelane.profile import LayerProfile, Profile
from pipelane.views.tables import human_bytes, partition_text

DATA = Path(__file__).parent / "data"
# PipeDream's published profile of VGG-16 (origin and licence in the file).
_LAYERS = json.loads((DATA / "vgg16_chain.json").read_text())["layers"]
VGG16 = [forward + backward for _, forward, backward, _ in _LAYERS]  # ms
#: ms to send an output and its gradient over PipeDream's 12 GB/s.
VGG16_SENDS = [2 * size / 12e9 * 1e3 for *_, size in _LAYERS[:-1]]


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


def programme_in_full(
    costs: Sequence[int], stages: int, boundary: Sequence[int]
) -> list[tuple[float, float]]:
    """(bottleneck, least sum of squares) for exactly 1 ... ``stages`` stages, cut by cut."""
    n = len(costs)
    total, edge = [0, *accumulate(costs)], [0, *(boundary or [0] * (n - 1)), 0]
    took = [[total[j] - total[i] + edge[i] + edge[j] for j in range(n + 1)] for i in range(n + 1)]
    worst, found = [[0.0] + [math.inf] * n], []
    for k in range(1, stages + 1):
        worst.append([math.inf] * (n + 1))
        for j in range(1, n + 1):
            worst[k][j] = min(max(worst[k - 1][i], took[i][j]) for i in range(j))
        limit = worst[k][n]
        squares = [0.0] + [math.inf] * n
        for _ in range(k):
            squares = [math.inf] + [
                min(
                    (squares[i] + took[i][j] ** 2 for i in range(j) if took[i][j] <= limit),
                    default=math.inf,
                )
                for j in range(1, n + 1)
            ]
        found.append((limit, squares[n]))
    return found


@given(seed=st.integers(0, 10**6), n=st.sampled_from([2, 7, 13, 26, 40]))
def test_long_and_skewed_chains_equal_the_programme_in_full(seed: int, n: int) -> None:
    """Long enough for every branch of the fast programme; whole numbers, so that ties are ties."""
    draw = random.Random(seed)
    high = draw.choice([1, 4, 100])
    costs = [draw.randint(0, high) for _ in range(n)]
    if draw.random() < 0.5:
        costs[draw.randrange(n)] = 30 * high
    boundary = [draw.randint(0, draw.choice([1, high, 9 * high])) for _ in range(n - 1)]
    if draw.random() < 0.3:
        boundary = []
    k = draw.randint(1, min(n, 9))
    answers = programme_in_full(costs, k, boundary)

    exactly = times(costs, chain_partition(costs, k, boundary=boundary), boundary)
    assert (len(exactly), max(exactly), sum(t * t for t in exactly)) == (k, *answers[-1])

    at_most = times(costs, chain_partition(costs, k, boundary=boundary, at_most=True), boundary)
    best = min(answer[0] for answer in answers)
    fewest = next(i for i, answer in enumerate(answers) if answer[0] == best)
    assert len(at_most) == fewest + 1
    assert (max(at_most), sum(t * t for t in at_most)) == answers[fewest]


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1e9])
def test_the_unit_does_not_matter(scale: float) -> None:
    costs = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.0]
    found = chain_partition([scale * c for c in costs], 4)
    assert found == chain_partition(costs, 4)


@pytest.mark.parametrize("kind", ["even", "one giant", "heavy tail", "dear boundaries"])
def test_a_thousand_layers_into_64_stages_in_a_second(kind: str) -> None:
    draw = random.Random(0)
    costs = [draw.random() for _ in range(1000)]
    boundary: list[float] = []
    if kind == "one giant":
        costs[500] = 1000.0
    elif kind == "heavy tail":
        costs = [draw.paretovariate(1) for _ in range(1000)]
    elif kind == "dear boundaries":
        boundary = [100 * draw.random() for _ in range(999)]
    began = time.process_time()
    sizes = chain_partition(costs, 64, boundary=boundary)
    assert time.process_time() - began < 1
    assert (len(sizes), sum(sizes)) == (64, 1000)


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


@pytest.mark.parametrize(("stages", "best"), [(2, 415.316), (4, 304.097), (8, 304.097)])
def test_vgg16_with_communication_in_at_most_k_stages(stages: int, best: float) -> None:
    sizes = chain_partition(VGG16, stages, boundary=VGG16_SENDS, at_most=True)
    assert max(times(VGG16, sizes, VGG16_SENDS)) == pytest.approx(best, abs=1e-3)


def test_fewer_stages_where_communication_makes_them_faster() -> None:
    graph = networkx.DiGraph()
    graph.add_node("a", forward=1.0, backward=0.0)
    graph.add_node("b", seconds=1.0)
    graph.add_edge("a", "b", bytes=10)
    link = Link(bandwidth=10)
    assert pipelane.partition(graph, 2, link=link).bottleneck == 3
    one = pipelane.partition(graph, 2, link=link, at_most=True)
    assert (one.stages, one.bottleneck) == ((("a", "b"),), 2)
    assert pipelane.partition(graph, 5, at_most=True).sizes == (1,) * 2


def test_a_longer_stage_can_be_cheaper_once_communication_is_priced() -> None:
    """Filling stages greedily up to a limit stops before the dear boundary and fails."""
    costs, boundary = [1.0, 1.0, 1.0, 1.0], [0.0, 10.0, 0.0]
    assert chain_partition(costs, 2, boundary=boundary) in ([1, 3], [3, 1])


def profile_of(seconds: Sequence[float], output_bytes: int = 1000, name: str = "l") -> Profile:
    layers = tuple(
        LayerProfile(
            f"{name}{i}", "Layer", s / 3, 2 * s / 3, 100, 50, output_bytes, (2, 2), "float32"
        )
        for i, s in enumerate(seconds)
    )
    return Profile(layers, 16, "cpu", batch=2, repeats=1)


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
    assert "single layer 'l1'" in one.bound_reason
    assert one.gap == 0


def test_the_graph_of_a_profile() -> None:
    graph = chain_graph(profile_of([3, 6]))
    assert validate_graph(graph) == [0, 1]
    assert graph.nodes[1] == {
        "name": "l1", "forward": 2, "backward": 4, "input_grad": 2, "weight_grad": 2,
        "parameter_bytes": 100, "static_bytes": 400,
        "activation_bytes": 50,
    }  # fmt: skip
    assert graph.edges[0, 1] == {"bytes": 1000}


def test_the_limit_names_the_slowest_stage() -> None:
    reason = pipelane.partition(profile_of([2, 2, 2, 2, 2]), 2).bound_reason
    assert "'l0' to 'l2'" in reason or "'l2' to 'l4'" in reason
    assert "20.0% above" in reason  # 6 against 5


def test_bad_graphs() -> None:
    graph = networkx.DiGraph()
    with pytest.raises(PartitionError, match="no nodes"):
        pipelane.partition(graph, 1)
    graph.add_node("a", seconds=1.0)
    graph.add_node("b", seconds=1.0)
    graph.add_edge("a", "b")
    graph.add_edge("b", "a")
    with pytest.raises(PartitionError, match="cycle"):
        pipelane.partition(graph, 1)
    graph.remove_edge("b", "a")
    for bad in (-1.0, math.nan, math.inf, None, "x"):
        graph.nodes["b"]["seconds"] = bad
        with pytest.raises(PartitionError, match=r"'b'.*seconds"):
            pipelane.partition(graph, 1)
    graph.nodes["b"]["seconds"] = 1.0
    graph.edges["a", "b"]["bytes"] = -1
    with pytest.raises(PartitionError, match=r"edge 'a' -> 'b'.*bytes"):
        pipelane.partition(graph, 1)


@pytest.mark.parametrize(
    "graph", [networkx.Graph([(0, 1)]), networkx.MultiDiGraph([(0, 1), (0, 1)]), [1.0, 2.0], None]
)
def test_what_is_no_directed_graph(graph: object) -> None:
    with pytest.raises(PartitionError, match=r"expected a profile or a networkx\.DiGraph"):
        pipelane.partition(graph, 1)  # type: ignore[arg-type]


def test_a_profile_with_impossible_seconds_names_the_layer() -> None:
    with pytest.raises(PartitionError, match=r"\(l1\): forward must be"):
        pipelane.partition(profile_of([1, math.nan, 1]), 2)


@pytest.mark.parametrize(
    ("costs", "stages", "boundary", "word"),
    [
        ([1.0], 2, [], "2 stages for 1 layers"),
        ([1.0], 0, [], "at least 1"),
        ([], 1, [], "no layers"),
        ([1.0, -1.0], 1, [], "layer 1"),
        ([1.0, math.nan], 1, [], "layer 1"),
        ([1.0, 1.0], 1, [math.inf], "boundary behind layer 0"),
        ([1.0, 1.0], 1, [1.0, 1.0], "2 boundaries"),
    ],
)
def test_bad_costs(costs: list[float], stages: int, boundary: list[float], word: str) -> None:
    with pytest.raises(PartitionError, match=word):
        chain_partition(costs, stages, boundary=boundary)


@pytest.mark.parametrize("sizes", [[1, 1], [2, 2], [0, 3], [-1, 4], [1.0, 2], [3], [1, 1, 1]])
def test_sizes_given_by_hand(sizes: list[int]) -> None:
    validate_sizes([1, 2], 3, 2)
    with pytest.raises(PartitionError, match=r"stage|layers"):
        validate_sizes(sizes, 3, 2)
    assert Partition.from_sizes(["a", "b", "c"], [1, 2]).stages == (("a",), ("b", "c"))


def test_sizes_that_do_not_sum_say_how_much_is_missing() -> None:
    with pytest.raises(PartitionError, match="sums to 4, but the model has 6 layers; add 2"):
        validate_sizes([2, 2], 6, 2)
    with pytest.raises(PartitionError, match="take away 1"):
        Partition.from_sizes(["a"], [1, 1])


@pytest.mark.parametrize("width", [20, 30, 40, 60, 79, 80, 100, 140])
@pytest.mark.parametrize("name", ["l", "a_very_long_name_of_a_layer_in_a_model.attention"])
def test_table_fits(width: int, name: str) -> None:
    measured = profile_of([1e-3, 5e-3, 2e-3, 2e-3, 3e-3], name=name)
    made = pipelane.partition(measured, 3)
    for text in (
        partition_text(made, measured, width),
        partition_text(made, None, width),
        partition_text(made, measured, width, ascii=False),
    ):
        lines = text.splitlines()
        assert max(map(len, lines)) <= width
        assert [line.split()[0] for line in lines[1:4]] == ["0", "1", "2"]
        assert len(lines[0]) <= width


def test_table_says_everything_at_100_columns() -> None:
    measured = profile_of([1e-3, 5e-3, 2e-3, 2e-3, 3e-3])
    text = partition_text(pipelane.partition(measured, 3), measured, 100)
    assert text.isascii()
    head, first = text.splitlines()[:2]
    assert " ".join(head.split()) == "stage layers F ms I ms W ms of slowest params saved sends"
    row = "0 l0 to l1 (2) 2.00 2.00 2.00 ######## 100% 200 B 100 B 1000 B"
    assert " ".join(first.split()) == row
    assert "Slowest stage: 6.00 ms, proven optimal (gap 0 %)" in text
    assert "Limit: stage 0 ('l0' to 'l1') is 38.5% above" in " ".join(text.split())


def test_table_is_ascii_when_asked_and_not_markup() -> None:
    measured = profile_of([1e-3, 2e-3], name="größe[bold]")
    made = pipelane.partition(measured, 2)
    assert partition_text(made, measured).isascii()
    assert "[bold]0 (1)" in partition_text(made, measured)
    unicode = partition_text(made, measured, ascii=False)
    assert "größe" in unicode
    assert "█" in unicode


def test_table_of_sizes_chosen_by_hand() -> None:
    assert "by hand" in partition_text(Partition.from_sizes(["a", "b"], [1, 1]))
    assert human_bytes(1536) == "1.5 KiB"
    assert human_bytes(5) == "5 B"
    assert human_bytes(3 * 2**40) == "3.0 TiB"
