"""Profile, partition and schedule together, with the step that they predict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pipelane.catalogue import build_schedule
from pipelane.check import check, peak_activations
from pipelane.costs import Costs, Link
from pipelane.errors import PartitionError
from pipelane.partition import Partition, partition
from pipelane.profile import Profile, profile
from pipelane.schedule import Schedule
from pipelane.simulate import simulate
from pipelane.timeline import Timeline

__all__ = ["Plan", "plan", "stage_costs"]

#: Bytes per byte of parameters: the parameter, its gradient, and two optimizer states (Adam).
STATIC_COPIES = 4


@dataclass(frozen=True)
class Plan:
    """What a pipeline will do.

    Attributes:
        profile: what was measured.
        partition: layers to stages.
        schedule: the order of actions.
        costs: seconds and bytes per stage.
        timeline: the predicted step.
        memory_bytes: per rank, parameters, gradients, Adam states and activations at peak.
    """

    profile: Profile
    partition: Partition
    schedule: Schedule
    costs: Costs
    timeline: Timeline
    memory_bytes: tuple[int, ...]


def stage_costs(measured: Profile, sizes: Sequence[int], link: Link | None = None) -> Costs:
    """Add up the layers of each stage.

    Input and weight gradient were measured together; the backward is split in halves, which
    matters only to schedules that run them apart.
    """
    forward, backward, kept, crossing = [], [], [], []
    begin = 0
    for size in sizes:
        part = measured.layers[begin : begin + size]
        forward.append(sum(layer.forward_seconds for layer in part))
        backward.append(sum(layer.backward_seconds for layer in part))
        kept.append(float(sum(layer.activation_bytes for layer in part)))
        crossing.append(float(part[-1].output_bytes))
        begin += size
    half = tuple(seconds / 2 for seconds in backward)
    return Costs(tuple(forward), half, half, tuple(crossing[:-1]), tuple(kept), link or Link())


def plan(
    model: nn.Module,
    example: torch.Tensor,
    ranks: int,
    *,
    microbatches: int,
    schedule: str | Schedule | Callable[..., Schedule] = "1f1b",
    chunks: int | None = None,
    link: Link | None = None,
    memory: float | None = None,
    measured: Profile | None = None,
) -> Plan:
    """Measure a model, balance it, and predict a step.

    Args:
        model: an ``nn.Sequential``.
        example: a typical micro-batch.
        ranks: p.
        microbatches: m.
        schedule: a name, a schedule, or a function that makes one.
        chunks: stages per rank, 1 if not given.
        link: connection between ranks; free if not given.
        memory: bytes that each rank has; not checked if not given.
        measured: an earlier profile of the model, instead of a new one.

    Raises:
        ModelError, ProfileError, ScheduleError: see there.
        PartitionError: more stages than layers, or a rank needs more than ``memory``.
    """
    if not isinstance(schedule, Schedule):
        schedule = build_schedule(schedule, ranks, microbatches, chunks)
    check(schedule)
    measured = measured if measured is not None else profile(model, example)
    split = partition(measured, schedule.shape.stages, link=link)
    costs = stage_costs(measured, split.sizes, link)
    needed = _memory(measured, split.sizes, schedule)
    for rank, size in enumerate(needed):
        if memory is not None and size > memory:
            raise PartitionError(
                f"rank {rank} needs {size} bytes (parameters, gradients, Adam states, and "
                f"{peak_activations(schedule.orders)[rank]} micro-batches' activations at peak), "
                f"{size - memory:.0f} more than memory={memory:.0f}; use more ranks or smaller "
                "micro-batches"
            )
    return Plan(measured, split, schedule, costs, simulate(schedule, costs), needed)


def _memory(measured: Profile, sizes: Sequence[int], schedule: Schedule) -> tuple[int, ...]:
    """Bytes per rank; a rank with several chunks is counted with its largest one at peak."""
    static = [0] * schedule.shape.ranks
    largest = [0] * schedule.shape.ranks
    begin = 0
    for stage, size in enumerate(sizes):
        part = measured.layers[begin : begin + size]
        rank = schedule.placement[stage]
        static[rank] += STATIC_COPIES * sum(layer.parameter_bytes for layer in part)
        largest[rank] = max(largest[rank], sum(layer.activation_bytes for layer in part))
        begin += size
    peaks = peak_activations(schedule.orders)
    return tuple(s + k * a for s, k, a in zip(static, peaks, largest, strict=True))
