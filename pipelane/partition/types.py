"""What a partition is, and what makes sizes given by hand wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipelane.errors import PartitionError

__all__ = ["Partition", "validate_sizes"]


@dataclass(frozen=True)
class Partition:
    """Which layers make which stage.

    Attributes:
        stages: names of the layers, per stage.
        stage_seconds: forward, backward and communication of each stage, for one micro-batch;
            empty if the partition was given without costs.
        bottleneck: seconds of the slowest stage.
        lower_bound: seconds that no partition can be below; the bottleneck itself if ``exact``.
        bound_reason: what keeps the bottleneck from being smaller.
        exact: whether the bottleneck is proven to be the least possible.
        method: how it was found.
        seconds: how long finding it took.
    """

    stages: tuple[tuple[str, ...], ...]
    stage_seconds: tuple[float, ...] = ()
    bottleneck: float = math.nan
    lower_bound: float = math.nan
    bound_reason: str = ""
    exact: bool = False
    method: str = "given"
    seconds: float = 0.0

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
