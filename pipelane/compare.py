"""All schedules side by side, under the same costs and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipelane.bounds import makespan_bound, span_bound
from pipelane.catalogue import build_schedule, default_chunks, schedule_names
from pipelane.check import check
from pipelane.costs import Costs
from pipelane.errors import ConfigError, PipelaneError
from pipelane.memory import peak_bytes
from pipelane.schedule import Schedule
from pipelane.simulate import simulate

__all__ = ["Comparison", "Entry", "compare"]


@dataclass(frozen=True)
class Entry:
    """A schedule that fits.

    Attributes:
        name: of the schedule.
        chunks: v; with several, each rank's stage is taken to be cut into equal chunks.
        makespan, span: seconds; see :class:`pipelane.timeline.Timeline`.
        bubble_rate: (span - work) / span of the widest rank.
        bubble_fraction: (makespan - work) / work, of the rank with the most work.
        peak_bytes: the most activations of a rank; 0 if the costs give no bytes.
        peak_activations: micro-batches of a whole rank alive at most: chunks over v.
        sent_bytes: of all messages of a step; 0 if the costs give no bytes.
        messages: per step.
        copies: of the parameters.
        makespan_bound, span_bound: seconds that no schedule of this placement, kind of backward
            and memory can be below.
        limit: what limits the makespan.
        schedule: itself.
    """

    name: str
    chunks: int
    makespan: float
    span: float
    bubble_rate: float
    bubble_fraction: float
    peak_bytes: float
    peak_activations: float
    sent_bytes: float
    messages: int
    copies: int
    makespan_bound: float
    span_bound: float
    limit: str
    schedule: Schedule

    @property
    def gap(self) -> float:
        """How far the makespan is above its bound: 0.05 is 5 %."""
        return self.makespan / self.makespan_bound - 1 if self.makespan_bound else 0.0


@dataclass(frozen=True)
class Comparison:
    """What fits, the fastest first, and why the others do not: (name, chunks, reason)."""

    entries: tuple[Entry, ...]
    left_out: tuple[tuple[str, int, str], ...]


def compare(
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    memory: float | Sequence[float] | None = None,
) -> Comparison:
    """Build, check and simulate every schedule of the catalogue.

    Args:
        ranks: p.
        microbatches: m.
        costs: of one stage per rank (schedules with v chunks get each stage cut into v equal
            ones), or of v p stages (then only schedules with v chunks take part); unit costs if
            not given.
        memory: bytes that activations may take, of a rank or of each; not limited if not given.

    Raises:
        ConfigError: the number of stages is no multiple of the ranks, or memory has another
            length.
    """
    costs = Costs.unit(ranks) if costs is None else costs
    if costs.stages % ranks:
        raise ConfigError(f"costs are for {costs.stages} stages, no multiple of {ranks} ranks")
    limits = list(memory) if isinstance(memory, Sequence) else [memory] * ranks
    if len(limits) != ranks:
        raise ConfigError(f"memory has {len(limits)} entries for {ranks} ranks")
    entries: list[Entry] = []
    left_out: list[tuple[str, int, str]] = []
    for name in schedule_names():
        chunks = costs.stages // ranks
        try:
            whole = costs
            if chunks == 1:
                chunks = default_chunks(name)
            if chunks == costs.stages // ranks:
                made = build_schedule(name, ranks, microbatches, chunks, costs, memory)
            else:
                made = build_schedule(name, ranks, microbatches, chunks)
                whole = costs.split(made.placement)
            check(made)
        except PipelaneError as error:
            left_out.append((name, chunks, str(error)))
            continue
        held = peak_bytes(made, whole)
        short = [
            (need - limit, rank)
            for rank, (need, limit) in enumerate(zip(held, limits, strict=True))
            if limit is not None and need > limit * (1 + 1e-9)
        ]
        if short:
            missing, rank = max(short)
            reason = f"rank {rank} would hold {held[rank]:.0f} bytes, {missing:.0f} too many"
            left_out.append((name, chunks, reason))
            continue
        entries.append(_entry(name, made, whole, memory, max(held)))
    entries.sort(key=lambda entry: (entry.makespan, entry.span, entry.peak_activations, entry.name))
    return Comparison(tuple(entries), tuple(left_out))


def _entry(
    name: str, made: Schedule, costs: Costs, memory: float | Sequence[float] | None, held: float
) -> Entry:
    timeline = simulate(made, costs)
    bound = makespan_bound(made, costs, memory)
    size = costs.boundary_bytes
    sent = 0.0
    for message in timeline.messages if size else ():
        forward = message.kind.value == "F"
        sent += size[message.stage if forward else message.stage - 1]
    return Entry(
        name=name,
        chunks=made.shape.chunks,
        makespan=timeline.makespan,
        span=timeline.span,
        bubble_rate=timeline.bubble_rate,
        bubble_fraction=timeline.bubble_fraction,
        peak_bytes=held,
        peak_activations=max(timeline.peak_activations) / made.shape.chunks,
        sent_bytes=sent,
        messages=len(timeline.messages),
        copies=1,
        makespan_bound=bound.seconds,
        span_bound=span_bound(made, costs, memory).seconds,
        limit=bound.reason,
        schedule=made,
    )
