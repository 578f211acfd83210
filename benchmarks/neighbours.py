"""How other libraries balance a chain, re-stated as baselines.

Each takes costs per layer and a number of stages, and returns [begin, end) per stage. They know
neither communication nor memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

__all__ = ["RULES", "equal_layers", "fair_blocks", "least_spread"]

Cuts = list[tuple[int, int]]


def equal_layers(costs: Sequence[float], stages: int) -> Cuts:
    """As many layers per stage as possible the same, the first stages one more."""
    size, more = divmod(len(costs), stages)
    ends = [0, *accumulate(size + (stage < more) for stage in range(stages))]
    return list(pairwise(ends))


def fair_blocks(costs: Sequence[float], stages: int) -> Cuts:
    """torchgpipe's rule: Bárány and Grinberg, "Block partitions of sequences" (1308.2452).

    Costs are scaled to [0, 1] by their least and largest. While the largest block exceeds the
    smallest by more than 1, the first smallest takes an item from its neighbour on the side of the
    largest. The scaling makes the cheapest layers free, which is why it can go wrong.
    """
    low, width = min(costs), max(costs) - min(costs)
    scaled = [(cost - low) / width if width else 0.0 for cost in costs]
    ends = [len(costs) // stages * (stage + 1) for stage in range(stages)]
    ends[-1] = len(costs)

    def begin(stage: int) -> int:
        return ends[stage - 1] if stage else 0

    def size(stage: int) -> float:
        return sum(scaled[begin(stage) : ends[stage]])

    for _ in range(100 * len(costs) * stages):  # it is proven to end with exact numbers only
        sizes = [size(stage) for stage in range(stages)]
        large = max(range(stages), key=lambda stage: (sizes[stage], stage))
        while True:
            sizes = [size(stage) for stage in range(stages)]
            small = min(range(stages), key=lambda stage: (sizes[stage], stage))
            if sizes[large] <= sizes[small] + 1:
                return [(begin(stage), ends[stage]) for stage in range(stages)]
            giver = small - 1 if large < small else small + 1
            if large < small:
                ends[giver] -= 1
            else:
                ends[small] += 1
            if giver == large:
                break
    return [(begin(stage), ends[stage]) for stage in range(stages)]


def least_spread(costs: Sequence[float], stages: int) -> Cuts:
    """DeepSpeed's rule: a dynamic programme over (layers, stages) for the least spread.

    For each it keeps one split, that with the least difference between its largest and its
    smallest stage (the last one found of equals), which is neither the least bottleneck nor, as
    one split per state is not enough, always the least spread.
    """
    total = [0.0, *accumulate(costs)]
    n = len(costs)
    states: list[list[tuple[float, float, int] | None]]
    states = [[None] * (stages + 1) for _ in range(n + 1)]
    states[0][0] = (-math.inf, math.inf, 0)
    for end in range(1, n + 1):
        for stage in range(1, min(end, stages) + 1):
            best = math.inf
            for cut in range(end):
                before = states[cut][stage - 1]
                if before is None:
                    continue
                seconds = total[end] - total[cut]
                high, low = max(before[0], seconds), min(before[1], seconds)
                if high - low <= best:
                    best = high - low
                    states[end][stage] = (high, low, cut)
    ends = [n]
    for stage in range(stages, 0, -1):
        state = states[ends[-1]][stage]
        assert state is not None
        ends.append(state[2])
    return list(pairwise(reversed(ends)))


RULES = {
    "equal layers": equal_layers,
    "torchgpipe": fair_blocks,
    "DeepSpeed": least_spread,
}
