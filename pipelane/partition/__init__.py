"""Layers to stages."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from pipelane.costs import Link
from pipelane.errors import PartitionError
from pipelane.graph import Chain, chain_costs
from pipelane.partition.chain import chain_partition
from pipelane.partition.types import Partition, cut, validate_sizes

if TYPE_CHECKING:
    import networkx

    from pipelane.profile import Profile

__all__ = ["Partition", "chain_partition", "partition", "validate_sizes"]


def partition(
    source: networkx.DiGraph | Profile,
    stages: int,
    *,
    link: Link | None = None,
    at_most: bool = False,
) -> Partition:
    """Balance a chain, provably as well as possible.

    The time of a stage is forward and backward of its layers plus, for each of its boundaries,
    the activation and the gradient that cross it: ``2 * (latency + bytes / bandwidth)``, paid by
    the sender and by the receiver. Ties go to the most even partition.

    Args:
        source: a profile, or a graph that is a chain (see :func:`pipelane.graph.chain_costs`).
        stages: number of stages.
        link: the connection between neighbours; free if not given.
        at_most: take fewer stages if that is faster; else exactly ``stages``.

    Returns:
        The partition, with ``exact`` True and the lower bound equal to the bottleneck.

    Raises:
        PartitionError: not a chain, bad costs, less than one stage, or more stages than layers.
    """
    began = perf_counter()
    chain = _chain_of(source)
    _check_costs(chain)
    if link is None:
        boundary = [0.0] * len(chain.bytes)
    else:
        boundary = [2 * (link.latency + size / link.bandwidth) for size in chain.bytes]
    sizes = chain_partition(chain.seconds, stages, boundary=boundary, at_most=at_most)
    times = _stage_seconds(chain.seconds, boundary, sizes)
    worst = max(times)
    return Partition(
        stages=cut(chain.names, sizes),
        stage_seconds=tuple(times),
        bottleneck=worst,
        lower_bound=worst,
        bound_reason=_reason(chain, boundary, sizes, times),
        exact=True,
        method="dynamic programme (exact)",
        seconds=perf_counter() - began,
    )


def _chain_of(source: networkx.DiGraph | Profile) -> Chain:
    # Not isinstance: a graph shall be partitioned without importing torch for the profile.
    layers = getattr(source, "layers", None)
    if not isinstance(layers, tuple):
        return chain_costs(source)
    return Chain(
        [layer.name for layer in layers],
        [layer.seconds for layer in layers],
        [float(layer.output_bytes) for layer in layers[:-1]],
    )


def _check_costs(chain: Chain) -> None:
    for name, seconds in zip(chain.names, chain.seconds, strict=True):
        if not 0 <= seconds < float("inf"):
            raise PartitionError(
                f"layer {name!r}: forward and backward take {seconds} s; expected a finite number "
                ">= 0: profile the model again"
            )


def _stage_seconds(
    costs: Sequence[float], boundary: Sequence[float], sizes: Sequence[int]
) -> list[float]:
    edge = [0.0, *boundary, 0.0]
    times: list[float] = []
    begin = 0
    for size in sizes:
        end = begin + size
        times.append(sum(costs[begin:end]) + edge[begin] + edge[end])
        begin = end
    return times


def _reason(
    chain: Chain, boundary: Sequence[float], sizes: Sequence[int], times: Sequence[float]
) -> str:
    """In words: what keeps the slowest stage from being faster."""
    if len(sizes) == 1:
        return "a single stage holds the whole chain"
    worst = max(times)
    stage = times.index(worst)
    begin = sum(sizes[:stage])
    names = chain.names[begin : begin + sizes[stage]]
    extra = " with what it sends and receives" if any(boundary) else ""
    if len(names) == 1:
        return f"stage {stage} is the single layer {names[0]!r}{extra}, which cannot be cut"
    even = sum(chain.seconds) / len(times)
    over = f"{worst / even - 1:.1%}" if even else "0.0%"
    return (
        f"stage {stage} ({names[0]!r} to {names[-1]!r}){extra} is {over} above an even share of "
        "the layers, and no other cuts between layers do better"
    )
