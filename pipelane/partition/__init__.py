"""Layers to stages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import combinations
from time import perf_counter
from typing import TYPE_CHECKING, Literal, cast

from pipelane.costs import Link
from pipelane.errors import PartitionError
from pipelane.graph import Tied, chain_graph, validate_graph
from pipelane.partition.chain import chain_partition
from pipelane.partition.downsets import Rule, stage_time
from pipelane.partition.interleaved import solve_interleaved
from pipelane.partition.problem import Charge, Problem, assign, bits, problem_of
from pipelane.partition.solve import Solution, solve
from pipelane.partition.types import Partition, StageLoad, validate_sizes

if TYPE_CHECKING:
    import networkx

    from pipelane.profile import Profile

__all__ = ["Partition", "StageLoad", "chain_partition", "partition", "validate_sizes"]

#: Micro-batches that each stage holds at its peak, for a pipeline of so many stages.
InFlight = Callable[[int], Sequence[int]]


def partition(
    source: networkx.DiGraph | Profile,
    stages: int,
    *,
    link: Link | None = None,
    at_most: bool = False,
    communication: Charge | Literal["none"] = "both",
    memory: float | Sequence[float] | None = None,
    in_flight: InFlight | Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
    recompute: bool = False,
    placement: Sequence[int] | None = None,
    tied: Literal["auto", "colocate", "replicate"] = "auto",
    microbatches: int = 1,
    time_limit: float = 60.0,
) -> Partition:
    """Balance the stages of a pipeline, provably as well as possible where that can be done.

    The time of a stage is forward and backward of its layers, plus each tensor that leaves it,
    once, plus each tensor that enters it, once. A tensor costs what the graph says, or, with a
    ``link``, ``2 * (latency + bytes / bandwidth)`` for itself and its gradient. Stages are
    numbered in the order of the pipeline: no layer needs a result from a later stage. Ties go to
    the more even partition.

    Args:
        source: a profile, or a graph (see :mod:`pipelane.graph`).
        stages: number of stages.
        link: the connection between ranks. Without it only what the graph itself prices counts.
        at_most: take fewer stages if that is faster; else exactly ``stages``.
        communication: who pays for a tensor: sender and receivers ("both"), or the "sender", or
            "none".
        memory: bytes of a rank, or of each; not limited if not given. A stage needs the static
            bytes of its layers, and its activations times ``in_flight``.
        in_flight: micro-batches that each stage holds at its peak: numbers, first stage to last,
            or a function from the number of stages to them (see
            :func:`pipelane.memory.in_flight`); 1 if not given.
        speeds: of the ranks, 1.0 being as fast as where the profile was taken.
        recompute: let a stage that does not fit keep only its input, and run its forward twice.
        placement: rank of each stage, if several stages share a rank; then ``memory``,
            ``in_flight`` and ``speeds`` still are as above, per rank but for ``in_flight``, and
            the times of a rank's stages add up.
        tied: layers with common parameters go to one stage ("colocate"), or each of their stages
            gets a copy and the gradients are summed ("replicate"), which is priced with ``link``
            once per step of ``microbatches``; "auto" takes what is faster.
        microbatches: per step; only for the price of tied weights.
        time_limit: seconds after which the best partition so far is returned, with ``exact``
            False and the bound that was proven.

    Raises:
        PartitionError: a graph that is not valid, impossible numbers, more stages than layers, or
            memory that no partition meets (says which layer or stage lacks how many bytes).
    """
    began = perf_counter()
    _check(stages, memory, speeds, recompute, placement, microbatches, time_limit)
    layers = getattr(source, "layers", None)
    # Not isinstance: a graph shall be partitioned without importing torch for the profile.
    graph = (
        chain_graph(cast("Profile", source))
        if isinstance(layers, tuple)
        else cast("networkx.DiGraph", source)
    )
    validate_graph(graph)
    ranks = stages if placement is None else max(placement) + 1
    rules = _rules(stages, ranks, memory, in_flight, speeds, placement)
    deadline = began + time_limit
    variants = _tied_variants(graph, tied, link if communication != "none" else None, microbatches)
    answers: list[tuple[Problem, Solution, str]] = []
    failure: PartitionError | None = None
    for colocate, shared, note in variants:
        problem = problem_of(
            graph,
            link=link,
            priced=communication != "none",
            charge=communication if communication != "none" else "both",
            colocate=colocate,
            shared=shared,
        )
        try:
            if placement is None:
                solution = solve(
                    problem, stages, rules,
                    exactly=not at_most, recompute=recompute, deadline=deadline,
                )  # fmt: skip
            else:
                solution = solve_interleaved(problem, placement, rules(stages), deadline=deadline)
        except PartitionError as error:
            failure = failure or error
            continue
        answers.append((problem, solution, note))
    if not answers:
        assert failure is not None
        raise failure
    made = [
        _partition(graph, problem, solution, rules, placement, note, began)
        for problem, solution, note in answers
    ]
    # Of equally fast ones that which holds less: weights in one stage are there once.
    best = min(made, key=lambda one: (one.bottleneck, sum(x.static_bytes for x in one.loads)))
    if len(variants) > 1:
        # What was proven for one way of keeping tied weights says nothing about the others.
        bound = min(one.lower_bound for one in made)
        exact = len(made) == len(variants) and best.bottleneck <= bound * (1 + 1e-9)
        best = replace(best, lower_bound=min(bound, best.bottleneck), exact=exact)
    return best


def _check(
    stages: int,
    memory: float | Sequence[float] | None,
    speeds: Sequence[float] | None,
    recompute: bool,
    placement: Sequence[int] | None,
    microbatches: int,
    time_limit: float,
) -> None:
    if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1:
        raise PartitionError(f"stages must be a whole number of at least 1, got {stages!r}")
    if placement is not None:
        ranks = set(placement)
        if len(placement) != stages or ranks != set(range(len(ranks))):
            raise PartitionError(
                f"placement {list(placement)} must give a rank to each of the {stages} stages and "
                "use all ranks from 0 on"
            )
        if recompute:
            raise PartitionError("recompute is a choice per stage with one stage per rank only")
    ranks_needed = stages if placement is None else len(set(placement))
    for what, values in (("memory", memory), ("speeds", speeds)):
        if values is None:
            continue
        many = [values] if isinstance(values, (int, float)) else list(values)
        if not isinstance(values, (int, float)) and len(many) != ranks_needed:
            raise PartitionError(f"{what} has {len(many)} entries for {ranks_needed} ranks")
        for rank, value in enumerate(many):
            if not (isinstance(value, (int, float)) and value > 0):
                raise PartitionError(f"{what} of rank {rank} must be above 0, got {value!r}")
    if not microbatches >= 1:
        raise PartitionError(f"microbatches must be at least 1, got {microbatches!r}")
    if not time_limit > 0:
        raise PartitionError(f"time_limit must be above 0 s, got {time_limit!r}")


def _rules(
    stages: int,
    ranks: int,
    memory: float | Sequence[float] | None,
    in_flight: InFlight | Sequence[int] | None,
    speeds: Sequence[float] | None,
    placement: Sequence[int] | None,
) -> Callable[[int], tuple[Rule, ...]]:
    infinite = float("inf")
    if memory is None:
        limits = [infinite] * ranks
    elif isinstance(memory, (int, float)):
        limits = [float(memory)] * ranks
    else:
        limits = [float(value) for value in memory]
    fast = [1.0] * ranks if speeds is None else [float(value) for value in speeds]
    known: dict[int, tuple[Rule, ...]] = {}

    def rules(q: int) -> tuple[Rule, ...]:
        if q not in known:
            held: Sequence[int]
            if in_flight is None:
                held = [1] * q
            elif callable(in_flight):
                held = in_flight(q)
            else:
                held = in_flight[:q]
            if len(held) != q or not all(isinstance(x, int) and x >= 0 for x in held):
                raise PartitionError(
                    f"in_flight must give a whole number for each of {q} stages, got {list(held)}"
                )
            where = range(q) if placement is None else placement
            known[q] = tuple(
                Rule(fast[rank], limits[rank], count)
                for rank, count in zip(where, held, strict=True)
            )
        return known[q]

    rules(stages)
    return rules


_Variant = tuple[list[tuple[Hashable, ...]], list[tuple[tuple[Hashable, ...], float]], str]


def _tied_variants(
    graph: networkx.DiGraph, tied: str, link: Link | None, microbatches: int
) -> list[_Variant]:
    """Ways to keep tied weights: groups to colocate, groups that pay for apart, and a note."""
    groups: tuple[Tied, ...] = tuple(graph.graph.get("tied", ()))
    if not groups:
        return [([], [], "")]
    if tied not in ("auto", "colocate", "replicate"):
        raise PartitionError(f"tied must be 'auto', 'colocate' or 'replicate', got {tied!r}")
    if tied != "auto":
        together = [groups if tied == "colocate" else ()]
    else:
        most = len(groups) if len(groups) <= 3 else 0  # each way for few groups, else all or none
        together = [c for size in range(most + 1) for c in combinations(groups, size)]
        if not most:
            together = [(), groups]
    variants: list[_Variant] = []
    for kept in together:
        apart = [group for group in groups if group not in kept]
        said = [f"tied weights {group.name!r}: one stage" for group in kept]
        said += [f"tied weights {group.name!r}: a copy per stage" for group in apart]
        variants.append(
            (
                [group.nodes for group in kept],
                [(group.nodes, _reduction(group, link, microbatches)) for group in apart],
                "; ".join(said),
            )
        )
    return variants


def _reduction(group: Tied, link: Link | None, microbatches: int) -> float:
    """Seconds per micro-batch of summing the gradients of copies, once per step.

    A ring over r members moves ``2 (r - 1) / r`` of the bytes through each of them in
    ``2 (r - 1)`` messages (Patarasuk and Yuan, 2009).
    """
    if link is None:
        return 0.0
    r = len(group.nodes)
    moved = 2 * (r - 1) * (link.latency + group.bytes / r / link.bandwidth)
    return moved / microbatches


def _partition(
    graph: networkx.DiGraph,
    problem: Problem,
    solution: Solution,
    rules: Callable[[int], Sequence[Rule]],
    placement: Sequence[int] | None,
    note: str,
    began: float,
) -> Partition:
    """The solution in terms of the graph, with every item back in its place."""
    home = assign(solution.problem, solution.stages)
    count = len(solution.stages)
    masks = [0] * count
    for number, item in enumerate(problem.items):
        masks[home[item.nodes]] |= 1 << number
    used = rules(count)
    recompute = solution.recompute
    times = [
        stage_time(problem, mask, rule, again)
        for mask, rule, again in zip(masks, used, recompute, strict=True)
    ]
    loads = [
        _load(problem, mask, rule, again)
        for mask, rule, again in zip(masks, used, recompute, strict=True)
    ]
    if placement is None:
        worst = max(times)
    else:
        worst = max(
            sum(time for stage, time in enumerate(times) if placement[stage] == rank)
            for rank in set(placement)
        )
    return Partition(
        stages=tuple(_listed(problem, mask, "names") for mask in masks),
        stage_seconds=tuple(times),
        bottleneck=worst,
        lower_bound=worst if solution.exact else min(solution.lower_bound, worst),
        bound_reason=solution.reason,
        exact=solution.exact,
        method=solution.method,
        seconds=perf_counter() - began,
        nodes=tuple(_listed(problem, mask, "nodes") for mask in masks),
        loads=tuple(loads),
        placement=tuple(placement or ()),
        unit=graph.graph.get("unit", "s"),
        notes=(note,) if note else (),
    )


def _listed(problem: Problem, mask: int, what: str) -> tuple[str, ...]:
    return tuple(entry for item in bits(mask) for entry in getattr(problem.items[item], what))


def _load(problem: Problem, mask: int, rule: Rule, recompute: bool) -> StageLoad:
    static = problem.total(mask, "static_bytes")
    activation = problem.total(mask, "activation_bytes")
    transfers = problem.transfers(mask)
    sent = [cut for cut in transfers if mask >> cut.source & 1]
    received = sum(cut.bytes for cut in transfers if not mask >> cut.source & 1)
    needs = rule.needs(static, activation)
    if recompute:
        needs = static + activation + rule.in_flight * received
    return StageLoad(
        forward=problem.total(mask, "forward") / rule.speed,
        input_grad=problem.total(mask, "input_grad") / rule.speed,
        weight_grad=problem.total(mask, "weight_grad") / rule.speed,
        transfer=sum(cut.seconds for cut in transfers),
        parameter_bytes=problem.total(mask, "parameter_bytes"),
        static_bytes=static,
        activation_bytes=activation,
        in_flight=rule.in_flight,
        sent_bytes=sum(cut.bytes for cut in sent),
        recompute=recompute,
        memory=rule.memory,
        memory_bytes=needs,
    )
