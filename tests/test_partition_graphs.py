"""Partitions of graphs: reference cases, public profiles, brute force as a judge."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelane.errors import PartitionError
from pipelane.formats import read_graph
from pipelane.graph import Tensor, Tied, build_graph
from pipelane.memory import in_flight
from pipelane.partition import Partition, milp, partition
from pipelane.partition.downsets import Rule, all_downsets, stage_time
from pipelane.partition.problem import problem_of, reduced
from pipelane.partition.solve import solve

DATA = Path(__file__).parent / "data"
CASES = json.loads((DATA / "partition_cases.json").read_text())["cases"]
COMMUNICATION = {"compute": "none", "comm_out": "sender", "comm": "both"}


def graph_of(case: dict[str, Any]) -> networkx.DiGraph:
    return build_graph(
        {
            number: {
                "forward": node["fwd"],
                "backward": node["bwd"],
                "parameter_bytes": node["params"],
                "activation_bytes": node["acts"],
            }
            for number, node in enumerate(case["nodes"])
        },
        [Tensor(t["src"], tuple(t["dst"]), seconds=t["cost"]) for t in case["tensors"]],
        colocate=case["colocate"],
    )


def judged(case: dict[str, Any], stages: Sequence[Sequence[Any]], variant: str) -> float:
    """The bottleneck, recomputed from the case; fails if the partition is not allowed."""
    home = {node: stage for stage, nodes in enumerate(stages) for node in nodes}
    assert sorted(home) == list(range(case["n"]))
    assert all(stages)
    q = len(stages)
    time, held = [0] * q, [0] * q
    for group in case["colocate"]:
        assert len({home[node] for node in group}) == 1
    for node, cost in enumerate(case["nodes"]):
        stage = home[node]
        alive = 1
        if case["mem"]["model"] == "1f1b":
            alive = min(q - stage, case["mem"]["microbatches"])
        time[stage] += cost["fwd"] + cost["bwd"]
        held[stage] += cost["params"] + alive * cost["acts"]
    for tensor in case["tensors"]:
        source = home[tensor["src"]]
        assert all(source <= home[node] for node in tensor["dst"])
        others = {home[node] for node in tensor["dst"]} - {source}
        if others and variant != "compute":
            time[source] += tensor["cost"]
        if variant == "comm":
            for other in others:
                time[other] += tensor["cost"]
    if case["interleave"]:
        p = case["interleave"]["ranks"]
        time, held = ([sum(values[r::p]) for r in range(p)] for values in (time, held))
    if case["mem"]["limit"] is not None:
        assert max(held) <= case["mem"]["limit"]
    return max(time)


@pytest.mark.parametrize("mode", ["exact_k", "at_most_k"])
@pytest.mark.parametrize("variant", COMMUNICATION)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_reference_cases(case: dict[str, Any], variant: str, mode: str) -> None:
    answer = case["answers"][variant][mode]
    if case["interleave"] and mode == "at_most_k":
        assert answer is None  # the number of chunks is fixed
        return
    m = case["mem"]["microbatches"]
    options: dict[str, Any] = {}
    if case["mem"]["model"] == "1f1b":
        options["in_flight"] = in_flight("1f1b", m)
    if case["interleave"]:
        options["placement"] = [s % case["interleave"]["ranks"] for s in range(case["k"])]

    def run() -> Partition:
        return partition(
            graph_of(case), case["k"], at_most=mode == "at_most_k", memory=case["mem"]["limit"],
            communication=COMMUNICATION[variant], **options,  # type: ignore[arg-type]
        )  # fmt: skip

    if answer is None:
        with pytest.raises(PartitionError, match=r"bytes|stages for"):
            run()
        return
    made = run()
    assert judged(case, made.nodes, variant) == made.bottleneck == answer["opt"]
    assert made.lower_bound == answer["opt"]
    assert made.exact
    assert len(made.stages) == case["k"] or (mode == "at_most_k" and len(made.stages) <= case["k"])


# file, stages, optimum without and with communication: as listed where the files come from.
GRAPHS = [
    ("dnn-partitioning/bert24_training.json", 6, 41.7380, 41.7458),
    ("dnn-partitioning/resnet50_training.json", 6, 79.4430, 80.4549),
    ("dnn-partitioning/gnmt_inference.json", 6, 32.8860, 32.9107),
    ("dnn-partitioning/bert_l-3_operators_training.json", 3, 44.0911, 65.3031),
    ("pipedream/vgg16.txt", 2, 370.931, 415.316),
    ("pipedream/vgg16.txt", 4, 216.450, 304.097),
    ("pipedream/vgg16.txt", 6, 159.531, None),
    ("pipedream/vgg16.txt", 8, 159.531, 304.097),
    ("pipedream/resnet50.txt", 2, 221.933, 256.186),
    ("pipedream/resnet50.txt", 4, 111.497, 179.367),
    ("pipedream/resnet50.txt", 8, 56.684, 165.222),
    ("pipedream/gnmt.txt", 2, 45.936, 46.985),
    ("pipedream/gnmt.txt", 4, 25.868, 27.170),
    ("pipedream/gnmt.txt", 8, 19.032, 21.085),
    ("piper/bert32a100.json", 4, 0.244521, None),
]
TOTALS = {
    "dnn-partitioning/bert24_training.json": 217.813,
    "dnn-partitioning/resnet50_training.json": 462.381,
    "dnn-partitioning/gnmt_inference.json": 182.563,
    "dnn-partitioning/bert_l-3_operators_training.json": 122.987,
    "pipedream/vgg16.txt": 672.535,
    "pipedream/resnet50.txt": 443.419,
    "pipedream/gnmt.txt": 89.416,
}


@pytest.mark.parametrize(("file", "stages", "compute", "priced"), GRAPHS)
def test_public_graphs(file: str, stages: int, compute: float, priced: float | None) -> None:
    graph: Any = read_graph(DATA / "graphs" / file)
    for communication, expected in (("none", compute), ("both", priced)):
        if expected is None:
            continue
        made = partition(graph, stages, at_most=True, communication=communication)  # type: ignore[arg-type]
        digits = 6 if expected < 1 else (4 if "dnn" in file else 3)
        assert made.bottleneck == pytest.approx(expected, abs=0.501 * 10**-digits)
        assert made.exact
        assert made.lower_bound == made.bottleneck
        assert made.seconds < 10
        if file in TOTALS and communication == "none":
            assert sum(made.stage_seconds) == pytest.approx(TOTALS[file], abs=5e-4)


@pytest.mark.parametrize(("memory", "expected"), [(20, 0.27286), (16, 0.303184), (12, None)])
def test_piper_under_memory(memory: int, expected: float | None) -> None:
    graph: Any = read_graph(DATA / "graphs" / "piper" / "bert32a100.json")

    def run(**options: Any) -> Partition:
        return partition(
            graph, 4, at_most=True, communication="none", memory=memory * 2**30,
            in_flight=in_flight("1f1b", 16), **options,
        )  # fmt: skip

    if expected is None:
        with pytest.raises(PartitionError, match=r"stage \d .* needs \d+ bytes .* more than"):
            run()
        rescued = run(recompute=True)
        assert any(load.recompute for load in rescued.loads)
        assert max(load.memory_bytes for load in rescued.loads) <= memory * 2**30
    else:
        assert run().bottleneck == pytest.approx(expected, abs=1e-8)


# -- brute force -------------------------------------------------------------------------------

Assignment = tuple[int, ...]


def assignments(graph: networkx.DiGraph, k: int) -> Iterator[Assignment]:
    """Every allowed assignment of nodes 0, 1, ... to exactly k stages."""
    for made in product(range(k), repeat=len(graph)):
        if len(set(made)) != k:
            continue
        if any(made[a] > made[b] for a, b in graph.edges):
            continue
        if any(len({made[node] for node in group}) > 1 for group in graph.graph["colocate"]):
            continue
        yield made


def cost_of(
    graph: networkx.DiGraph, made: Assignment, rules: Sequence[Rule], charge: str, recompute: bool
) -> list[float]:
    """Seconds per stage, infinite where it does not fit; from the definitions."""
    k = len(rules)
    times = []
    for stage in range(k):
        rule = rules[stage]
        nodes = [graph.nodes[node] for node, home in enumerate(made) if home == stage]
        compute = sum(node["forward"] + node["backward"] for node in nodes)
        static = sum(node["parameter_bytes"] for node in nodes)
        activation = sum(node["activation_bytes"] for node in nodes)
        paid = received = 0.0
        for tensor in graph.graph["tensors"]:
            home = made[tensor.source]
            homes = {home} | {made[node] for node in tensor.consumers}
            if len(homes) == 1 or stage not in homes or charge == "none":
                continue
            if home == stage or charge == "both":
                paid += tensor.seconds
            if home != stage:
                received += tensor.bytes
        if static + rule.in_flight * activation > rule.memory:
            fits = static + activation + rule.in_flight * received <= rule.memory
            if recompute and fits:
                compute += sum(node["forward"] for node in nodes)
            else:
                compute = math.inf
        times.append(compute / rule.speed + paid)
    return times


def random_graph(draw: random.Random, most: int = 7) -> networkx.DiGraph:
    """A small graph with everything in it: idle items, fans, backward tensors, groups."""
    n = draw.randint(1, most)
    number = list(range(n))
    draw.shuffle(number)  # ids are in no topological order
    idle = draw.choice([0.0, 0.3, 0.6])

    def seconds() -> float:
        return float(draw.randint(0, 6))

    nodes: dict[Any, Any] = {}
    for node in range(n):
        is_idle = draw.random() < idle
        bare = draw.random() < 0.5
        nodes[node] = {
            "forward": 0.0 if is_idle else seconds(),
            "backward": 0.0 if is_idle else seconds(),
            "parameter_bytes": 0.0 if bare else float(draw.randint(0, 9)),
            "activation_bytes": 0.0 if bare else float(draw.randint(0, 5)),
        }
    tensors, order = [], []
    density = draw.choice([0.2, 0.5])
    for position in range(n):
        later = [x for x in range(position + 1, n) if draw.random() < density]
        if later:
            consumers = tuple(number[x] for x in later)
            price = float(draw.choice([0, 1, 1, 2, 4]))
            tensors.append(Tensor(number[position], consumers, price, price))
            if draw.random() < 0.3:  # a second tensor between the same nodes
                tensors.append(Tensor(number[position], consumers[:1], 1.0, 1.0))
            if draw.random() < 0.3:  # a gradient that goes back
                tensors.append(Tensor(consumers[0], (number[position],), 1.0, 1.0, orders=False))
    for _ in range(n):
        a, b = sorted(draw.sample(range(n), 2)) if n > 1 else (0, 0)
        if a != b and draw.random() < 0.1:
            order.append((number[a], number[b]))
    groups = [draw.sample(range(n), 2)] if n > 2 and draw.random() < 0.25 else []
    return build_graph(nodes, tensors, order=order, colocate=groups)


def brute(
    graph: networkx.DiGraph,
    sizes: Sequence[int],
    rules: Callable[[int], Sequence[Rule]],
    charge: str,
    recompute: bool,
) -> float:
    return min(
        (
            max(cost_of(graph, made, rules(k), charge, recompute))
            for k in sizes
            for made in assignments(graph, k)
        ),
        default=math.inf,
    )


@settings(max_examples=250, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_equals_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    graph = random_graph(draw, draw.choice([4, 6, 7]))
    k = draw.randint(1, min(4, len(graph)))
    charge = draw.choice(["none", "both", "both", "sender"])
    at_most = draw.random() < 0.5
    recompute = draw.random() < 0.3
    limited = draw.random() < 0.5
    speeds = [draw.choice([1.0, 2.0, 0.5]) for _ in range(k)] if draw.random() < 0.3 else None
    memory = [float(draw.randint(5, 40)) for _ in range(k)] if limited else None
    alive = draw.choice(
        [lambda q: [1] * q, lambda q: [min(q - i, 3) for i in range(q)], lambda q: [q] * q]
    )

    def rules(q: int) -> list[Rule]:
        return [
            Rule(
                speeds[i] if speeds else 1.0,
                memory[i] if memory else math.inf,
                alive(q)[i],
            )
            for i in range(q)
        ]

    sizes = range(1, k + 1) if at_most else [k]
    best = brute(graph, sizes, rules, charge, recompute)
    options: Any = {
        "at_most": at_most, "communication": charge, "memory": memory, "in_flight": alive,
        "speeds": speeds, "recompute": recompute,
    }  # fmt: skip
    if best == math.inf:
        with pytest.raises(PartitionError):
            partition(graph, k, **options)
        return
    made = partition(graph, k, **options)
    assert made.exact
    assert made.bottleneck == pytest.approx(best, rel=1e-9)
    assert made.lower_bound == made.bottleneck
    home = {node: stage for stage, nodes in enumerate(made.nodes) for node in nodes}
    found = tuple(home[node] for node in range(len(graph)))
    q = len(made.stages)
    assert found in set(assignments(graph, q))
    again = cost_of(graph, found, rules(q), charge, recompute)
    assert max(again) == pytest.approx(best, rel=1e-9)
    # A stage is said to recompute only where it must.
    assert list(made.stage_seconds) == pytest.approx(again)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_reductions_lose_nothing(seed: int) -> None:
    """The best of at most k stages is the same with and without the reduced items."""
    draw = random.Random(seed)
    graph = random_graph(draw, 7)
    charge: Any = draw.choice(["both", "sender"])
    k = draw.randint(1, 4)
    problem = problem_of(graph, priced=draw.random() < 0.8, charge=charge)
    smaller = reduced(problem, memory=False)
    values = []
    for one in (problem, smaller):
        found = solve(one, k, lambda q: [Rule()] * q, exactly=False)
        values.append(max(stage_time(found.problem, mask, Rule()) for mask in found.stages))
        assert found.exact
    assert values[0] == pytest.approx(values[1])


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_several_stages_per_rank_equal_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    n, p = draw.randint(2, 9), draw.randint(1, 3)
    v = draw.randint(1, max(1, min(3, n // p)))
    stages = p * v
    if stages > n:
        return
    placement = [s % p for s in range(stages)]
    if draw.random() < 0.4:
        placement = [p - 1 - s % p if (s // p) % 2 else s % p for s in range(stages)]
    costs = [float(draw.randint(0, 9)) for _ in range(n)]
    price = [float(draw.randint(0, 3)) for _ in range(n - 1)]
    graph = build_graph(
        {
            i: {"seconds": cost, "parameter_bytes": draw.randint(0, 5), "activation_bytes": 1}
            for i, cost in enumerate(costs)
        },
        [Tensor(i, (i + 1,), seconds=price[i]) for i in range(n - 1)],
    )
    memory = float(draw.randint(8, 25)) if draw.random() < 0.5 else None
    best = math.inf
    for made in assignments(graph, stages):
        time, held = [0.0] * p, [0.0] * p
        for node, stage in enumerate(made):
            time[placement[stage]] += costs[node]
            held[placement[stage]] += graph.nodes[node]["parameter_bytes"] + 1
        for i in range(n - 1):
            if made[i] != made[i + 1]:
                time[placement[made[i]]] += price[i]
                time[placement[made[i + 1]]] += price[i]
        if memory is None or max(held) <= memory:
            best = min(best, max(time))
    if best == math.inf:
        with pytest.raises(PartitionError, match="rank"):
            partition(graph, stages, placement=placement, memory=memory)
        return
    found = partition(graph, stages, placement=placement, memory=memory)
    assert found.exact
    assert found.bottleneck == pytest.approx(best)


# -- beyond the exact programme ------------------------------------------------------------------


def wide_graph(branches: int, length: int, seed: int) -> networkx.DiGraph:
    """(length + 1) ** branches downsets."""
    draw = random.Random(seed)
    nodes = {
        (b, i): {"forward": draw.expovariate(1), "backward": draw.expovariate(0.5)}
        for b in range(branches)
        for i in range(length)
    }
    tensors = [
        Tensor((b, i), ((b, i + 1),), seconds=0.1)
        for b in range(branches)
        for i in range(length - 1)
    ]
    return build_graph(nodes, tensors)  # type: ignore[arg-type]


@pytest.mark.parametrize("with_scipy", [False, True])
def test_too_many_downsets_still_give_a_bound(
    with_scipy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if with_scipy:
        pytest.importorskip("scipy")
    else:
        monkeypatch.setattr(milp, "available", lambda: False)
    graph = wide_graph(8, 4, seed=3)
    assert all_downsets(problem_of(graph), 60_000) is None
    made = partition(graph, 4, time_limit=4)
    assert len(made.stages) == 4
    assert made.lower_bound <= made.bottleneck <= made.lower_bound * 1.1
    assert made.exact == (made.gap < 1e-8)
    assert made.seconds < 30


@pytest.mark.parametrize("seed", range(4))
def test_integer_programme_agrees(seed: int) -> None:
    pytest.importorskip("scipy")
    draw = random.Random(seed)
    graph = random_graph(draw, 7)
    problem = problem_of(graph)
    k = min(3, len(problem.items))
    found = milp.solve(problem, [Rule()] * k, exactly=True, seconds=20)
    best = brute(graph, [k], lambda q: [Rule()] * q, "both", False)
    assert found is not None
    assert found.lower_bound == pytest.approx(best, abs=1e-6)
    assert max(stage_time(problem, mask, Rule()) for mask in found.stages) == pytest.approx(best)


def test_the_time_limit_holds() -> None:
    made = partition(wide_graph(7, 8, seed=1), 5, time_limit=1.0)
    assert made.seconds < 15
    assert made.lower_bound <= made.bottleneck


# -- tied weights, errors ------------------------------------------------------------------------


def tied_chain(size: float) -> networkx.DiGraph:
    """An embedding and a head with the same weights, far apart."""
    costs = [4.0, 5.0, 5.0, 5.0, 5.0, 4.0]
    return build_graph(
        {i: {"seconds": c, "parameter_bytes": 1.0} for i, c in enumerate(costs)},
        [Tensor(i, (i + 1,), bytes=1.0) for i in range(5)],
        tied=[Tied((0, 5), size, "embedding.weight")],
    )


def test_tied_weights_together_or_apart() -> None:
    from pipelane.costs import Link

    link = Link(bandwidth=100.0)
    together = partition(tied_chain(1.0), 2, link=link, tied="colocate", at_most=True)
    assert len(together.stages) == 1  # the chain closes in a circle
    apart = partition(tied_chain(1.0), 2, link=link, tied="replicate")
    assert apart.bottleneck == pytest.approx(14 + 2 * 0.01 + 2 * 1.0 / 2 / 100)
    chosen = partition(tied_chain(1.0), 2, link=link, at_most=True)
    assert chosen.bottleneck == apart.bottleneck
    assert chosen.notes == ("tied weights 'embedding.weight': a copy per stage",)
    assert chosen.exact
    # A gradient of 10 kB takes 100 s: better not to cut at all.
    chosen = partition(tied_chain(10_000.0), 2, link=link, at_most=True)
    assert chosen.bottleneck == 28.0
    assert "one stage" in chosen.notes[0] or len(chosen.stages) == 1
    # Once per step, so many micro-batches share the price.
    shared = partition(tied_chain(10_000.0), 2, link=link, at_most=True, microbatches=10_000)
    assert shared.bottleneck == pytest.approx(14.02 + 0.01)


def test_memory_that_no_plan_meets_names_the_layer_and_the_bytes() -> None:
    graph = build_graph(
        {
            "small": {"seconds": 1, "parameter_bytes": 5, "activation_bytes": 1},
            "large": {"seconds": 1, "parameter_bytes": 90, "activation_bytes": 10, "name": "head"},
        },
        [Tensor("small", ("large",))],
    )
    with pytest.raises(PartitionError, match=r"'head' needs 100 bytes .* 20 more than .* 80"):
        partition(graph, 2, memory=80)
    with pytest.raises(PartitionError, match=r"stage 0 .* needs 106 bytes .* 6 more than 100"):
        partition(graph, 1, memory=100)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"stages": 0}, "stages must be"),
        ({"stages": 3}, "3 stages for 2 layers"),
        ({"memory": -1.0}, "memory of rank 0"),
        ({"memory": [1.0]}, "memory has 1 entries for 2 ranks"),
        ({"speeds": [1.0, 0.0]}, "speeds of rank 1"),
        ({"in_flight": [1]}, "in_flight must give"),
        ({"placement": [0]}, "placement"),
        ({"placement": [0, 2]}, "placement"),
        ({"placement": [0, 0], "recompute": True}, "recompute"),
        ({"time_limit": 0}, "time_limit"),
        ({"microbatches": 0}, "microbatches"),
    ],
)
def test_bad_arguments(options: dict[str, Any], word: str) -> None:
    graph = build_graph({0: {"seconds": 1}, 1: {"seconds": 1}}, [Tensor(0, (1,))])
    stages = options.pop("stages", 2)
    with pytest.raises(PartitionError, match=word):
        partition(graph, stages, **options)
