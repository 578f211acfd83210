"""How many micro-batches a schedule holds, stage by stage."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from pipelane.actions import Kind
from pipelane.catalogue import build_schedule
from pipelane.costs import Costs
from pipelane.schedule import Schedule

__all__ = ["in_flight", "peak_bytes", "stage_peaks"]


def stage_peaks(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most micro-batches whose activations are alive at once.

    F adds one, B or W frees one. Stages of one rank need not be at their peaks together.
    """
    alive = [0] * schedule.shape.stages
    peaks = [0] * schedule.shape.stages
    for order in schedule.orders:
        for action in order:
            for part in action.flat():
                if part.kind is Kind.F:
                    alive[part.stage] += 1
                    peaks[part.stage] = max(peaks[part.stage], alive[part.stage])
                elif part.kind in (Kind.B, Kind.W):
                    alive[part.stage] -= 1
    return tuple(peaks)


def peak_bytes(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Per rank, the most bytes of activations alive at once.

    F adds a stage's ``activation_bytes``; B frees them; I leaves ``weight_grad_bytes``, which W
    frees.
    """
    held, kept = costs.held_bytes, costs.kept_bytes
    change = {
        Kind.F: held,
        Kind.B: [-size for size in held],
        Kind.I: [after - before for before, after in zip(held, kept, strict=True)],
        Kind.W: [-size for size in kept],
    }
    peaks = []
    for order in schedule.orders:
        used = peak = 0.0
        for action in order:
            for part in action.flat():
                used += change[part.kind][part.stage]
                peak = max(peak, used)
        peaks.append(peak)
    return tuple(peaks)


def in_flight(
    schedule: str | Callable[..., Schedule], microbatches: int, chunks: int = 1
) -> Callable[[int], tuple[int, ...]]:
    """For :func:`pipelane.partition`: the peaks of a schedule, for any number of stages.

    Args:
        schedule: a name, or a function that makes one.
        microbatches: m.
        chunks: v, stages per rank.

    Returns:
        A function from the number of stages (a multiple of ``chunks``) to peaks.

    Raises:
        ScheduleError: by that function, where the schedule does not exist for a size.
    """

    @cache
    def peaks(stages: int) -> tuple[int, ...]:
        return stage_peaks(build_schedule(schedule, stages // chunks, microbatches, chunks))

    return peaks
