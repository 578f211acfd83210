"""Play a program with given costs: a discrete-event simulation, linear in its length.

Each rank executes its stream in order. A compute starts when the rank is free and its input has
arrived. Sends cost the rank no time: a message leaves when the compute that made it has ended and
its directed link is free, takes the link for bytes / bandwidth, and arrives a latency later.
"""

from __future__ import annotations

from typing import Any

from pipelane.actions import Action, Kind
from pipelane.collector import without_collector
from pipelane.costs import Costs
from pipelane.errors import CheckError, ConfigError
from pipelane.program import Program, lower
from pipelane.schedule import Schedule
from pipelane.timeline import Message, Span, Timeline

__all__ = ["simulate"]


@without_collector
def simulate(
    program: Program | Schedule, costs: Costs | None = None, *, unit: str = "s"
) -> Timeline:
    """Predict the timeline of a program.

    Args:
        program: a program, or a schedule, which is lowered first.
        costs: per-stage seconds and bytes; unit costs (F = I = W = 1) if not given.
        unit: label of the numbers; "" for unit costs.

    Raises:
        ConfigError: the costs are for another number of stages.
        CheckError: the program cannot run to its end.
    """
    if isinstance(program, Schedule):
        program = lower(program)
    if costs is None:
        costs, unit = Costs.unit(program.stages), ""
    if costs.stages != program.stages:
        raise ConfigError(
            f"costs are for {costs.stages} stages, program {program.name!r} has {program.stages}"
        )
    m, last = program.microbatches, program.stages - 1
    # When the input of F / of the backward is there, by stage * m + micro-batch.
    forward_at: list[float | None] = [None] * (program.stages * m)
    backward_at: list[float | None] = [None] * (program.stages * m)
    forward_at[:m] = [0.0] * m
    ended: dict[tuple[bool, int], float] = {}  # (is forward, slot) -> end of the producer
    waiting: dict[tuple[Any, ...], int] = {}  # the input -> the rank that waits for it
    # The same for what comes along skips: (is forward, skip, micro-batch) -> when it is there.
    skip_at: dict[tuple[Any, ...], float] = {}
    skip_bytes = dict(costs.skip_bytes)
    skip_needs: dict[tuple[bool, int], list[tuple[int, int]]] = {}
    for edge in program.skips:
        if program.placement[edge[0]] != program.placement[edge[1]]:
            skip_needs.setdefault((True, edge[1]), []).append(edge)
            skip_needs.setdefault((False, edge[0]), []).append(edge)
    link_free: dict[tuple[int, int], float] = {}
    clock = [0.0] * len(program.streams)
    position = [0] * len(program.streams)
    spans: list[list[Span]] = [[] for _ in program.streams]
    messages: list[Message] = []
    ready = list(range(len(program.streams) - 1, -1, -1))
    while ready:
        rank = ready.pop()
        stream, row = program.streams[rank], spans[rank]
        while position[rank] < len(stream):
            instruction = stream[position[rank]]
            kind, stage, number, peer, parts, to = instruction
            if kind.is_compute:
                actions = parts or (Action(kind, stage, number),)
                start = clock[rank]
                blocked: tuple[Any, ...] | None = None
                for part in actions:
                    if part.kind is Kind.W:
                        continue
                    slot = part.stage * m + part.microbatch
                    is_forward = part.kind is Kind.F
                    at = (forward_at if is_forward else backward_at)[slot]
                    if at is None:
                        blocked = (is_forward, slot)
                        break
                    start = max(start, at)
                    for edge in skip_needs.get((is_forward, part.stage), ()):
                        at = skip_at.get((is_forward, edge, part.microbatch))
                        if at is None:
                            blocked = (is_forward, edge, part.microbatch)
                            break
                        start = max(start, at)
                    if blocked is not None:
                        break
                if blocked is not None:
                    waiting[blocked] = rank
                    break
                end = start + sum(costs.seconds(part.kind, part.stage) for part in actions)
                clock[rank] = end
                whole = Action(kind, stage, number, parts)
                row.append(Span(whole, start, end))
                for part in actions:
                    slot = part.stage * m + part.microbatch
                    if part.kind is Kind.F:
                        ended[True, slot] = end
                        if part.stage == last:
                            backward_at[slot] = end
                        elif program.placement[part.stage + 1] == rank:
                            forward_at[slot + m] = end
                    elif part.kind is not Kind.W:
                        ended[False, slot] = end
                        if part.stage and program.placement[part.stage - 1] == rank:
                            backward_at[slot - m] = end
            elif kind.is_send:
                is_forward = kind is Kind.SEND_F
                slot = stage * m + number
                link = costs.link_between(rank, peer)
                size = 0.0
                if to >= 0:
                    size = skip_bytes.get(instruction.edge[0], 0.0)
                elif costs.boundary_bytes:
                    size = costs.boundary_bytes[stage if is_forward else stage - 1]
                made = ended.get((is_forward, slot))
                if made is None:
                    raise CheckError(
                        f"program {program.name!r}, rank {rank}: {instruction} sends what was not "
                        "computed before it"
                    )
                leaves = max(made, link_free.get((rank, peer), 0.0))
                free = leaves + size / link.bandwidth
                link_free[rank, peer] = free
                arrives = free + link.latency
                key: tuple[Any, ...]
                if to >= 0:
                    key = (is_forward, instruction.edge[0], number)
                    skip_at[key] = arrives
                else:
                    target = slot + m if is_forward else slot - m
                    (forward_at if is_forward else backward_at)[target] = arrives
                    key = (is_forward, target)
                messages.append(
                    Message(
                        Kind.F if is_forward else Kind.B, stage, number, rank, peer, leaves, arrives
                    )
                )
                waiter = waiting.pop(key, None)
                if waiter is not None:
                    ready.append(waiter)
            position[rank] += 1
    for rank, stream in enumerate(program.streams):
        if position[rank] < len(stream):
            raise CheckError(
                f"program {program.name!r} stops: rank {rank} waits forever in "
                f"{stream[position[rank]]}; run pipelane.check on the schedule for the reason"
            )
    return Timeline(
        program.name,
        program.placement,
        m,
        tuple(map(tuple, spans)),
        tuple(messages),
        measured=False,
        unit=unit,
    )
