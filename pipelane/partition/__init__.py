"""Layers to stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from pipelane.costs import Link
from pipelane.errors import PartitionError
from pipelane.graph import chain_costs
from pipelane.partition.chain import chain_partition

if TYPE_CHECKING:
    import networkx

    from pipelane.profile import Profile

__all__ = ["Partition", "chain_partition", "partition", "validate_sizes"]


@dataclass(frozen=True)
class Partition:
    """Which layers make which stage.

    Attributes:
        stages: names of the layers, per stage.
        stage_seconds: forward, backward and communication of each stage, seconds; empty if the
            partition was given without costs.
        bottleneck: the largest of them.
        lower_bound: no partition can be below; equal to the bottleneck if ``exact``.
        limit: what keeps the bottleneck from being smaller.
        exact: whether the bottleneck is proven to be the least possible.
        method: how it was found.
        seconds: how long that took.
    """

    stages: tuple[tuple[str, ...], ...]
    stage_seconds: tuple[float, ...] = ()
    bottleneck: float = math.nan
    lower_bound: float = math.nan
    limit: str = ""
    exact: bool = False
    method: str = "given"
    seconds: float = 0.0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Layers per stage."""
        return tuple(map(len, self.stages))

    @classmethod
    def from_sizes(cls, names: Sequence[str], sizes: Sequence[int]) -> Partition:
        """A partition chosen by hand.

        Raises:
            PartitionError: the sizes do not fit the layers.
        """
        validate_sizes(sizes, len(names), len(sizes))
        return cls(_cut(names, sizes))


def validate_sizes(sizes: Sequence[int], layers: int, stages: int) -> None:
    """Check layers per stage given by a user.

    Raises:
        PartitionError: wrong number of stages, an empty stage, or a sum that is not ``layers``.
    """
    sizes = list(sizes)
    if len(sizes) != stages:
        raise PartitionError(
            f"partition {sizes} has {len(sizes)} entries, but there are {stages} stages; give the "
            "number of layers of each stage"
        )
    for stage, size in enumerate(sizes):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise PartitionError(
                f"partition {sizes}: stage {stage} has {size!r} layers; each needs at least 1"
            )
    if sum(sizes) != layers:
        raise PartitionError(
            f"partition {sizes} sums to {sum(sizes)}, but the model has {layers} layers"
        )


def partition(
    source: networkx.DiGraph | Profile, stages: int, *, link: Link | None = None
) -> Partition:
    """Balance a chain into exactly ``stages`` stages, provably as well as possible.

    The time of a stage is forward and backward of its layers plus, for each of its boundaries,
    the activation and the gradient crossing it: ``2 * (latency + bytes / bandwidth)``.

    Args:
        source: a profile, or a graph that is a chain (see :func:`pipelane.graph.chain_costs`).
        stages: number of stages.
        link: the connection between neighbours; free if not given.

    Raises:
        PartitionError: not a chain, bad costs, or more stages than layers.
    """
    began = perf_counter()
    if hasattr(source, "layers"):
        names = [layer.name for layer in source.layers]
        costs = [layer.seconds for layer in source.layers]
        sizes = [float(layer.output_bytes) for layer in source.layers[:-1]]
    else:
        names, costs, sizes = chain_costs(source)
    price = [2 * (link.latency + s / link.bandwidth) for s in sizes] if link else [0.0] * len(sizes)
    chosen = chain_partition(costs, stages, boundary=price)
    edge = [0.0, *price, 0.0]
    times: list[float] = []
    begin = 0
    for size in chosen:
        end = begin + size
        times.append(sum(costs[begin:end]) + edge[begin] + edge[end])
        begin = end
    worst = max(times)
    return Partition(
        _cut(names, chosen),
        tuple(times),
        worst,
        worst,
        _limit(costs, names, times, chosen),
        True,
        "dynamic programme over the chain",
        perf_counter() - began,
    )


def _cut(names: Sequence[str], sizes: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    made = []
    begin = 0
    for size in sizes:
        made.append(tuple(names[begin : begin + size]))
        begin += size
    return tuple(made)


def _limit(
    costs: Sequence[float], names: Sequence[str], times: Sequence[float], sizes: Sequence[int]
) -> str:
    """In words: what the slowest stage is made of."""
    stage = times.index(max(times))
    heaviest = costs.index(max(costs))
    if sizes[stage] == 1:
        return f"stage {stage} is the single layer {names[heaviest]!r}, which cannot be cut"
    even = sum(costs) / len(times)
    over = times[stage] / even - 1 if even else 0.0
    return f"stage {stage} is {over:.1%} above an even share; no cut between layers does better"
