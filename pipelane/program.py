"""Lowering: from a schedule to each rank's instruction stream, with a deadlock certificate.

All compute actions are put into one total order. Each is emitted on its rank, followed by the
send there and the matching receive on the peer. Every rank's stream is then a part of one total
order in which a send and its receive are a single point: no buffering is needed, one queue per
rank is enough, and nothing can deadlock. On each channel (sender, receiver, direction) receives
come in the order of the sends, so transports without tags work as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipelane.actions import Action, Kind
from pipelane.errors import CheckError
from pipelane.schedule import Schedule

__all__ = ["Instruction", "Program", "dependencies", "lower", "message_of", "result_of"]

# Relative durations used only to pick, among all valid total orders, one close to how the ranks
# really proceed, so that a receive stands near the time at which its message can arrive.
_DURATION = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1, Kind.OVERLAP: 3}


class Instruction(NamedTuple):
    """One entry of a rank's stream: an action, and the other rank if it communicates."""

    kind: Kind
    stage: int
    microbatch: int = -1
    peer: int = -1
    parts: tuple[Action, ...] = ()

    def flat(self) -> Iterator[Action]:
        """The compute actions in it: one, or the two of an overlapped pair."""
        if self.parts:
            yield from self.parts
        else:
            yield Action(self.kind, self.stage, self.microbatch)

    def __str__(self) -> str:
        return str(Action(self.kind, self.stage, self.microbatch, self.parts))


@dataclass(frozen=True)
class Program:
    """Per rank, what to execute: computes, sends and receives.

    Attributes:
        name: name of the schedule it was made from.
        stages: S, the number of stages.
        microbatches: m.
        placement: stage -> rank.
        streams: per rank, the instructions in order.
        forward_only: no backward at all (evaluation).
    """

    name: str
    stages: int
    microbatches: int
    placement: tuple[int, ...]
    streams: tuple[tuple[Instruction, ...], ...]
    forward_only: bool = False


def dependencies(action: Action, stages: int, forward_only: bool = False) -> list[Action]:
    """The actions whose results a compute action (not an overlapped pair) needs.

    A backward of the next stage is named by ``I`` there, whether it is a ``B`` or an ``I``;
    see :func:`message_of`, which names results in the same way.
    """
    kind, stage, number = action.kind, action.stage, action.microbatch
    if kind is Kind.F:
        return [Action(Kind.F, stage - 1, number)] if stage else []
    if kind is Kind.W:
        return [Action(Kind.I, stage, number)]
    needs = [Action(Kind.F, stage, number)]
    if stage + 1 < stages:
        needs.append(Action(Kind.I, stage + 1, number))
    return needs


def message_of(instruction: Instruction) -> tuple[Kind, int, int]:
    """The result that a send or receive carries, as (F or I, producing stage, micro-batch)."""
    kind, stage, number = instruction.kind, instruction.stage, instruction.microbatch
    if kind is Kind.SEND_F:
        return (Kind.F, stage, number)
    if kind is Kind.RECV_F:
        return (Kind.F, stage - 1, number)
    if kind is Kind.SEND_B:
        return (Kind.I, stage, number)
    return (Kind.I, stage + 1, number)


def lower(schedule: Schedule) -> Program:
    """Add sends and receives to a schedule.

    Args:
        schedule: complete, as :func:`pipelane.check.check` verifies.

    Raises:
        CheckError: the dependencies and the ranks' orders contradict each other; the message
            shows the cycle.
    """
    stages, placement = schedule.shape.stages, schedule.placement
    streams: list[list[Instruction]] = [[] for _ in schedule.orders]
    for rank, action in _total_order(schedule):
        streams[rank].append(Instruction(*action[:3], -1, action.parts))
        for part in action.flat():
            if part.kind is Kind.F and part.stage + 1 < stages:
                send, receive, to = Kind.SEND_F, Kind.RECV_F, part.stage + 1
            elif part.kind in (Kind.B, Kind.I) and part.stage > 0:
                send, receive, to = Kind.SEND_B, Kind.RECV_B, part.stage - 1
            else:
                continue
            peer = placement[to]
            if peer != rank:
                streams[rank].append(Instruction(send, part.stage, part.microbatch, peer))
                streams[peer].append(Instruction(receive, to, part.microbatch, rank))
    has_backward = any(a.kind is not Kind.F for order in schedule.orders for a in order)
    return Program(
        schedule.name,
        stages,
        schedule.shape.microbatches,
        placement,
        tuple(tuple(stream) for stream in streams),
        forward_only=not has_backward,
    )


def result_of(part: Action) -> tuple[Kind, int, int]:
    """What later actions wait for: F, I (also made by B), W."""
    kind = Kind.I if part.kind is Kind.B else part.kind
    return (kind, part.stage, part.microbatch)


def _total_order(schedule: Schedule) -> list[tuple[int, Action]]:
    """All actions as (rank, action), sorted by when they would end with the unit durations."""
    stages = schedule.shape.stages
    ends: dict[tuple[Kind, int, int], int] = {}
    waiting: dict[tuple[Kind, int, int], list[int]] = {}
    position = [0] * len(schedule.orders)
    clock = [0] * len(schedule.orders)
    placed: list[tuple[int, int, int, Action]] = []
    ready = list(range(len(schedule.orders)))
    while ready:
        rank = ready.pop()
        order = schedule.orders[rank]
        while position[rank] < len(order):
            action = order[position[rank]]
            start = clock[rank]
            blocked_by = None
            for part in action.flat():
                for need in dependencies(part, stages):
                    end = ends.get(need[:3])
                    if end is None:
                        blocked_by = need[:3]
                        break
                    start = max(start, end)
                if blocked_by:
                    break
            if blocked_by:
                waiting.setdefault(blocked_by, []).append(rank)
                break
            end = start + _DURATION[action.kind]
            clock[rank] = end
            placed.append((end, rank, position[rank], action))
            position[rank] += 1
            for part in action.flat():
                result = result_of(part)
                ends[result] = end
                ready.extend(waiting.pop(result, ()))
    if len(placed) < sum(map(len, schedule.orders)):
        raise CheckError(_cycle(schedule, position, ends))
    placed.sort(key=lambda item: item[:3])
    return [(rank, action) for _, rank, _, action in placed]


def _cycle(
    schedule: Schedule, position: Sequence[int], ends: dict[tuple[Kind, int, int], int]
) -> str:
    """The chain of waits among stuck ranks, until a rank repeats or will never deliver."""
    stages = schedule.shape.stages
    rank = next(r for r, order in enumerate(schedule.orders) if position[r] < len(order))
    seen: list[int] = []
    lines: list[str] = []
    while rank not in seen:
        seen.append(rank)
        if position[rank] >= len(schedule.orders[rank]):
            lines.append(f"  rank {rank} never runs it")
            break
        stuck = schedule.orders[rank][position[rank]]
        need = next(
            n for part in stuck.flat() for n in dependencies(part, stages) if n[:3] not in ends
        )
        owner = schedule.placement[need.stage]
        what = "backward" if need.kind is Kind.I else "forward"
        shown = f"the {what} of stage {need.stage}, micro-batch {need.microbatch},"
        lines.append(f"  rank {rank}: {stuck} waits for {shown} on rank {owner}")
        rank = owner
    return (
        f"schedule {schedule.name!r} cannot run: dependencies and orders contradict each other\n"
        + "\n".join(lines)
    )
