"""Profile, partition and schedule together, with the step that they predict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from pipelane.catalogue import build_schedule, takes
from pipelane.check import check
from pipelane.costs import Costs, Link
from pipelane.errors import PartitionError, ScheduleError
from pipelane.layers import layers_of
from pipelane.memory import peak_bytes, stage_peaks
from pipelane.partition import Partition, partition, validate_sizes
from pipelane.profile import Profile
from pipelane.profile import profile as measure
from pipelane.program import lower
from pipelane.schedule import Schedule
from pipelane.simulate import simulate
from pipelane.timeline import Timeline

__all__ = ["Plan", "plan", "stage_costs"]


@dataclass(frozen=True)
class Plan:
    """What a pipeline will do.

    Attributes:
        profile: what was measured.
        partition: layers to stages.
        schedule: the order of actions.
        costs: seconds and bytes per stage.
        timeline: the predicted step.
        memory_bytes: per rank, parameters, gradients, two optimizer states (Adam) and the most
            activations alive at once.
    """

    profile: Profile
    partition: Partition
    schedule: Schedule
    costs: Costs
    timeline: Timeline
    memory_bytes: tuple[int, ...]


def stage_costs(
    profile: Profile,
    sizes: Sequence[int],
    link: Link | None = None,
    recompute: frozenset[str] | str = frozenset(),
) -> Costs:
    """Add up the layers of each stage, for one micro-batch of the profile's size.

    Args:
        profile: seconds and bytes per layer.
        sizes: layers per stage.
        link: connection between ranks; free if not given.
        recompute: names of layers that run their forward again in the backward, or "full": every
            stage does, from its input.

    Raises:
        PartitionError: the sizes do not fit the profile.
    """
    validate_sizes(sizes, len(profile.layers), len(sizes))
    layers = recomputed(profile, recompute).layers
    ends = [0, *accumulate(sizes)]
    parts = [layers[begin:end] for begin, end in pairwise(ends)]
    home = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    boundary = [float(part[-1].output_bytes) for part in parts[:-1]]
    skips: dict[tuple[int, int], float] = {}
    incoming = [float(profile.input_bytes), *boundary]
    for skip in profile.skips:
        a, b = home[skip.source], home[skip.target]
        if a + 1 == b:
            boundary[a] += skip.bytes
        elif a != b:
            skips[a, b] = skips.get((a, b), 0.0) + skip.bytes
        if a != b:
            incoming[b] += skip.bytes

    def total(key: str) -> tuple[float, ...]:
        return tuple(float(sum(getattr(layer, key) for layer in part)) for part in parts)

    return Costs(
        forward=total("forward_seconds"),
        input_grad=total("input_grad_seconds"),
        weight_grad=total("weight_grad_seconds"),
        whole_backward=total("backward_seconds"),
        boundary_bytes=tuple(boundary),
        activation_bytes=tuple(incoming) if recompute == "full" else total("activation_bytes"),
        weight_grad_bytes=total("weight_grad_bytes"),
        link=link or Link(),
        skip_bytes=tuple(sorted(skips.items())),
    )


def recomputed(profile: Profile, recompute: frozenset[str] | str) -> Profile:
    """The profile of layers of which some keep their input only, and run forward twice.

    Args:
        profile: as measured.
        recompute: names of these layers; "full" for all.
    """
    layers = []
    size = profile.input_bytes
    for index, layer in enumerate(profile.layers):
        into = size + sum(skip.bytes for skip in profile.skips if skip.target == index)
        size = layer.output_bytes
        if recompute == "full" or layer.name in recompute:
            again = layer.forward_seconds
            layer = replace(
                layer,
                backward_seconds=layer.backward_seconds + again,
                input_grad_seconds=layer.input_grad_seconds + again,
                activation_bytes=into,
                temporary_bytes=max(layer.temporary_bytes, layer.activation_bytes),
            )
        layers.append(layer)
    return replace(profile, layers=tuple(layers))


def plan(
    model: nn.Module,
    example: Any,
    ranks: int,
    *,
    microbatches: int,
    schedule: str | Schedule | Callable[..., Schedule] = "1f1b",
    chunks: int | None = None,
    link: Link | None = None,
    memory: float | None = None,
    profile: Profile | None = None,
    device: torch.device | str | None = None,
    time_limit: float = 5.0,
    recompute: frozenset[str] | str = frozenset(),
) -> Plan:
    """Measure a model, balance it, and predict a step.

    Args:
        model: an ``nn.Sequential``.
        example: a typical micro-batch, see :func:`pipelane.profile`.
        ranks: p.
        microbatches: m.
        schedule: a name, a schedule, or a function that makes one; a function that takes ``costs``
            and ``memory``, such as "auto", is given those of the balanced stages.
        chunks: stages per rank, as the schedule has it by default if not given.
        link: connection between ranks; free if not given.
        memory: bytes that each rank has; the partition keeps within it. Not limited if not given.
        time_limit: seconds for balancing, see :func:`pipelane.partition.partition`.
        profile: an earlier profile of the model, instead of a new one.
        device: where to measure; the example's device if not given.
        recompute: as for :func:`stage_costs`. Balancing within ``memory`` takes it that each layer
            keeps its input, also with "full".

    Raises:
        ModelError, ProfileError, ScheduleError: see there.
        PartitionError: more stages than layers, a profile of another model, or no partition keeps
            within ``memory``; names stages or layer and the missing bytes.
    """
    generator = None if isinstance(schedule, Schedule) else schedule
    if isinstance(schedule, Schedule):
        _check_shape(schedule, ranks, microbatches, chunks)
    else:
        schedule = build_schedule(schedule, ranks, microbatches, chunks)
    check(schedule)
    if profile is None:
        profile = measure(model, example, device=device)
    else:
        _check_profile(profile, model)
    shape = schedule.shape
    split = partition(
        recomputed(profile, recompute),
        shape.stages,
        link=link,
        memory=memory,
        in_flight=_in_flight(generator, schedule),
        placement=schedule.placement if shape.chunks > 1 else None,
        microbatches=shape.microbatches,
        time_limit=time_limit,
    )
    costs = stage_costs(profile, split.sizes, link, recompute)
    if generator is not None and takes(generator, "costs", "memory"):
        schedule = _made_for(generator, schedule, profile, split, costs, memory)
    needed = _memory_bytes(profile, split.sizes, schedule, costs, recompute)
    if memory is not None:
        _check_memory(needed, memory, split, schedule)
    skips = tuple(edge for edge, _ in costs.skip_bytes)
    timeline = simulate(lower(schedule, skips), costs)
    return Plan(profile, split, schedule, costs, timeline, needed)


def _check_shape(schedule: Schedule, ranks: int, microbatches: int, chunks: int | None) -> None:
    shape = schedule.shape
    wanted = (ranks, microbatches, shape.chunks if chunks is None else chunks)
    if (shape.ranks, shape.microbatches, shape.chunks) != wanted:
        raise ScheduleError(
            f"schedule {schedule.name!r} is for {shape.ranks} ranks, {shape.microbatches} "
            f"micro-batches and {shape.chunks} chunks per rank, but the plan is for {wanted[0]}, "
            f"{wanted[1]} and {wanted[2]}; build it for these sizes"
        )


def _check_profile(profile: Profile, model: nn.Module) -> None:
    found = [layer.name for layer in profile.layers]
    names = [name for name, _ in layers_of(model)]
    if found != names:
        raise PartitionError(
            f"the profile has {len(found)} layers ({found[0]!r} to {found[-1]!r}) and the model "
            f"{len(names)} ({names[0]!r} to {names[-1]!r}), not the same ones; profile this model"
            if found
            else "the profile has no layers; profile this model"
        )


def _in_flight(generator: str | Callable[..., Schedule] | None, first: Schedule) -> list[int]:
    """Micro-batches that each stage holds, to balance by.

    A schedule that is made for the memory will hold what fits; it is balanced as if it held as
    many as keep a pipeline of whole backwards going, one per stage from here on.
    """
    peaks = list(stage_peaks(first))
    if generator is None or not takes(generator, "memory"):
        return peaks
    return [min(peak, len(peaks) - stage) for stage, peak in enumerate(peaks)]


def _made_for(
    generator: str | Callable[..., Schedule],
    first: Schedule,
    profile: Profile,
    split: Partition,
    costs: Costs,
    memory: float | None,
) -> Schedule:
    """The schedule for the stages as they have become, and the memory that they leave."""
    shape = first.shape
    left: list[float] | None = None
    if memory is not None:
        left = [memory - static for static in _static_bytes(profile, split.sizes, first)]
    made = build_schedule(generator, shape.ranks, shape.microbatches, shape.chunks, costs, left)
    if made.placement != first.placement:  # the stages were balanced for another one
        return first
    check(made)
    return made


def _memory_bytes(
    profile: Profile,
    sizes: Sequence[int],
    schedule: Schedule,
    costs: Costs,
    recompute: frozenset[str] | str,
) -> tuple[int, ...]:
    """Bytes per rank: its static bytes, and its activations at the schedule's own peak.

    What is recomputed is there once, while its backward runs.
    """
    static = _static_bytes(profile, sizes, schedule)
    peaks = peak_bytes(schedule, costs)
    ends = [0, *accumulate(sizes)]
    again = [0.0] * len(static)
    for stage, rank in enumerate(schedule.placement):
        part = profile.layers[ends[stage] : ends[stage + 1]]
        if recompute == "full":
            one = sum(layer.activation_bytes for layer in part)
        else:
            one = max(
                (layer.activation_bytes for layer in part if layer.name in recompute), default=0
            )
        again[rank] = max(again[rank], one)
    return tuple(
        one + round(peak + more) for one, peak, more in zip(static, peaks, again, strict=True)
    )


def _static_bytes(profile: Profile, sizes: Sequence[int], schedule: Schedule) -> list[int]:
    ends = [0, *accumulate(sizes)]
    needed = []
    for rank in range(schedule.shape.ranks):
        own = {i for stage in schedule.stages_of(rank) for i in range(ends[stage], ends[stage + 1])}
        static = sum(profile.layers[i].static_bytes for i in own)
        for shared in profile.shared:
            # Counted with each layer, there once.
            here = sum(i in own for i in shared.layers)
            static -= max(0, here - 1) * shared.static_bytes
        needed.append(static)
    return needed


def _check_memory(
    needed: Sequence[int], memory: float, split: Partition, schedule: Schedule
) -> None:
    worst = max(range(len(needed)), key=needed.__getitem__)
    if needed[worst] <= memory:
        return
    stages = ", ".join(
        f"stage {stage} ({split.stages[stage][0]!r} to {split.stages[stage][-1]!r})"
        for stage in schedule.stages_of(worst)
    )
    raise PartitionError(
        f"rank {worst} with {stages} needs {needed[worst]} bytes (parameters, "
        f"gradients, optimizer states, and its activations at peak), {needed[worst] - memory:.0f} "
        f"more than memory={memory:.0f}; use more ranks or smaller micro-batches"
    )
