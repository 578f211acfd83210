"""What a partition is, and what makes sizes given by hand wrong."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from pipelane.errors import PartitionError

__all__ = ["Partition", "StageLoad", "validate_sizes"]


@dataclass(frozen=True)
class StageLoad:
    """What one stage does and holds, for one micro-batch.

    Attributes:
        forward, input_grad, weight_grad: seconds of its layers on its rank; where the backward is
            known as a whole it is under ``input_grad``, and where only one sum is known all is
            under ``forward``.
        transfer: seconds of its sends and receives.
        parameter_bytes, static_bytes, activation_bytes: sums over its layers.
        in_flight: micro-batches whose activations it holds at its peak.
        sent_bytes: of the tensors that it sends on.
        recompute: it keeps only its input, and runs its forward again before the backward.
        memory: bytes of its rank; infinite if not limited.
        memory_bytes: what it needs at its peak.
    """

    forward: float
    input_grad: float
    weight_grad: float
    transfer: float
    parameter_bytes: float
    static_bytes: float
    activation_bytes: float
    in_flight: int
    sent_bytes: float
    recompute: bool
    memory: float
    memory_bytes: float


@dataclass(frozen=True)
class Partition:
    """Which layers make which stage.

    Attributes:
        stages: names of the layers, per stage.
        stage_seconds: forward, backward and communication of each stage, for one micro-batch;
            empty if the partition was given without costs.
        bottleneck: seconds of the slowest rank: of its stage, or of all its stages together.
        lower_bound: seconds that no partition can be below; the bottleneck itself if ``exact``.
        bound_reason: where the lower bound comes from.
        exact: whether the bottleneck is proven to be the least possible.
        method: how it was found.
        seconds: how long finding it took.
        nodes: the nodes of the graph, per stage; indices of layers for a profile.
        loads: what each stage does and holds; empty if the partition was given without costs.
        placement: the rank of each stage, if several stages share a rank.
        unit: of all times, "s" but for graphs that say otherwise.
        notes: what was decided on the way, such as how tied weights are kept.
    """

    stages: tuple[tuple[str, ...], ...]
    stage_seconds: tuple[float, ...] = ()
    bottleneck: float = math.nan
    lower_bound: float = math.nan
    bound_reason: str = ""
    exact: bool = False
    method: str = "given"
    seconds: float = 0.0
    nodes: tuple[tuple[Hashable, ...], ...] = ()
    loads: tuple[StageLoad, ...] = ()
    placement: tuple[int, ...] = ()
    unit: str = "s"
    notes: tuple[str, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Layers per stage."""
        return tuple(map(len, self.stages))

    @property
    def gap(self) -> float:
        """How far the bottleneck can be above the optimum: 0.05 is 5 %; NaN if not known."""
        if self.bottleneck == self.lower_bound:
            return 0.0
        return self.bottleneck / self.lower_bound - 1 if self.lower_bound else math.nan

    @classmethod
    def from_sizes(cls, names: Sequence[str], sizes: Sequence[int]) -> Partition:
        """A partition chosen by hand, without costs.

        Args:
            names: of all layers, in order.
            sizes: layers per stage.

        Raises:
            PartitionError: the sizes do not fit the layers.
        """
        validate_sizes(sizes, len(names), len(sizes))
        return cls(cut(names, sizes))


def cut(names: Sequence[str], sizes: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Consecutive pieces of the given sizes."""
    made = []
    begin = 0
    for size in sizes:
        made.append(tuple(names[begin : begin + size]))
        begin += size
    return tuple(made)


def validate_sizes(sizes: Sequence[int], layers: int, stages: int) -> None:
    """Check layers per stage given by a user.

    Raises:
        PartitionError: wrong number of stages, an empty stage, or a sum that is not ``layers``;
            says what to change.
    """
    sizes = list(sizes)
    if len(sizes) != stages or not sizes:
        raise PartitionError(
            f"partition {sizes} has {len(sizes)} entries, but there are {stages} stages; give the "
            "number of layers of each stage"
        )
    for stage, size in enumerate(sizes):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise PartitionError(
                f"partition {sizes}: stage {stage} has {size!r} layers; every stage needs at least "
                "1: take one from a neighbour or use fewer stages"
            )
    difference = layers - sum(sizes)
    if difference:
        word = "add" if difference > 0 else "take away"
        raise PartitionError(
            f"partition {sizes} sums to {sum(sizes)}, but the model has {layers} layers; {word} "
            f"{abs(difference)}"
        )
