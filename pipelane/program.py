"""Lowering: from a schedule to each rank's instruction stream, with a deadlock certificate.

All compute actions are put into one total order. Each is emitted on its rank, followed by the
send there and the matching receive on the peer. Every rank's stream is then a part of one total
order in which a send and its receive are a single point: no buffering is needed, one queue per
rank is enough, and nothing can deadlock. On each channel (sender, receiver, direction) receives
come in the order of the sends, so transports without tags work as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple, TypeAlias

from pipelane.actions import COMMUNICATION, Action, Kind, parse_action
from pipelane.collector import without_collector
from pipelane.errors import CheckError, ScheduleError
from pipelane.schedule import Schedule, read_rows, schedule_from_rows

__all__ = [
    "Instruction",
    "Program",
    "Result",
    "check_placement",
    "dependencies",
    "lower",
    "message_of",
    "misplaced",
    "program_from_csv",
    "program_from_rows",
    "result_of",
    "wait_chain",
]

Result: TypeAlias = tuple[Kind, int, int]
"""What an action makes and later ones wait for: (F, I or W, stage, micro-batch).

A backward is named ``I``, whether it is a whole ``B`` or an ``I``.
"""

_SHOWN = 12

# Relative durations used only to pick, among all valid total orders, one close to how the ranks
# really proceed, so that a receive stands near the time at which its message can arrive.
_DURATION = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1, Kind.OVERLAP: 3}


class Instruction(NamedTuple):
    """One entry of a rank's stream: an action, and the other rank if it communicates.

    ``to`` is the stage at a message's other end where that is not the neighbour in the chain.
    """

    kind: Kind
    stage: int
    microbatch: int = -1
    peer: int = -1
    parts: tuple[Action, ...] = ()
    to: int = -1

    def flat(self) -> Iterator[Action]:
        """The compute actions in it: one, or the two of an overlapped pair."""
        if self.parts:
            yield from self.parts
        else:
            yield Action(self.kind, self.stage, self.microbatch)

    @property
    def edge(self) -> tuple[tuple[int, int], bool]:
        """Of a send or receive: the two stages, the earlier one first, and is it forward."""
        to_later = self.kind is Kind.SEND_F or self.kind is Kind.RECV_B
        other = self.to if self.to >= 0 else self.stage + (1 if to_later else -1)
        forward = self.kind is Kind.SEND_F or self.kind is Kind.RECV_F
        return ((self.stage, other) if to_later else (other, self.stage)), forward

    def __str__(self) -> str:
        text = str(Action(self.kind, self.stage, self.microbatch, self.parts))
        if self.to < 0:
            return text
        return f"{text}{'>' if self.kind.is_send else '<'}{self.to}"


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
        skips: pairs of stages, no neighbours, between which a value goes straight from the first
            to the second, and its gradient back.
    """

    name: str
    stages: int
    microbatches: int
    placement: tuple[int, ...]
    streams: tuple[tuple[Instruction, ...], ...]
    forward_only: bool = False
    skips: tuple[tuple[int, int], ...] = ()


def result_of(part: Action | Instruction) -> Result:
    """What a compute action makes; not for an overlapped pair, which makes two things."""
    return (Kind.I if part.kind is Kind.B else part.kind, part.stage, part.microbatch)


def dependencies(part: Action | Instruction, stages: int) -> tuple[Result, ...]:
    """The results that a compute action (not an overlapped pair) needs."""
    kind, stage, number = part.kind, part.stage, part.microbatch
    if kind is Kind.F:
        return ((Kind.F, stage - 1, number),) if stage else ()
    if kind is Kind.W:
        return ((Kind.I, stage, number),)
    if stage + 1 < stages:
        return ((Kind.F, stage, number), (Kind.I, stage + 1, number))
    return ((Kind.F, stage, number),)


def message_of(instruction: Instruction) -> Result:
    """The result that a send or receive carries."""
    edge, forward = instruction.edge
    return (Kind.F if forward else Kind.I, edge[not forward], instruction.microbatch)


def misplaced(
    part: Action | Instruction, rank: int, placement: tuple[int, ...], microbatches: int
) -> str | None:
    """Why an action cannot be on a rank at all, or None if it can."""
    stage, number = part.stage, part.microbatch
    if not (0 <= stage < len(placement) and 0 <= number < microbatches):
        return (
            f"rank {rank}: {part} is out of range; stages are 0 to {len(placement) - 1}, "
            f"micro-batches 0 to {microbatches - 1}"
        )
    if placement[stage] != rank:
        return f"rank {rank}: {part} belongs to rank {placement[stage]}, which has stage {stage}"
    return None


def check_placement(schedule: Schedule) -> None:
    """Raise CheckError unless every rank exists and holds as many stages as the shape says."""
    shape = schedule.shape
    if len(schedule.placement) != shape.stages:
        raise CheckError(
            f"schedule {schedule.name!r}: placement names {len(schedule.placement)} stages, "
            f"but {shape.ranks} ranks x {shape.chunks} chunks are {shape.stages}"
        )
    if len(schedule.orders) != shape.ranks:
        raise CheckError(
            f"schedule {schedule.name!r}: {len(schedule.orders)} orders for {shape.ranks} ranks"
        )
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < shape.ranks:
            raise CheckError(
                f"schedule {schedule.name!r}: stage {stage} is placed on rank {rank}, but ranks "
                f"are 0 to {shape.ranks - 1}"
            )
    held = Counter(schedule.placement)
    for rank in range(shape.ranks):
        if held[rank] != shape.chunks:
            raise CheckError(
                f"schedule {schedule.name!r}: rank {rank} holds {held[rank]} stages instead of "
                f"{shape.chunks}"
            )


def wait_chain(rank: int, wait_of: Callable[[int], tuple[str, int] | None]) -> str:
    """Who waits for whom, one line a rank: the cycle, or the way to a rank that has ended.

    Args:
        rank: a stuck rank to start from.
        wait_of: rank -> (what it waits in, the rank it waits for), or None if it has ended.
    """
    place: dict[int, int] = {}
    lines: list[str] = []
    while rank not in place:
        wait = wait_of(rank)
        if wait is None:
            lines.append(f"  rank {rank} has nothing left to do")
            break
        place[rank] = len(lines)
        text, peer = wait
        lines.append(f"  rank {rank}{text}")
        rank = peer
    else:
        lines = lines[place[rank] :]
    hidden = len(lines) - _SHOWN
    if hidden > 0:
        half = _SHOWN // 2
        lines[half:-half] = [f"  ... and {hidden} more ranks"]
    return "\n".join(lines)


@without_collector
def lower(schedule: Schedule, skips: Sequence[tuple[int, int]] = ()) -> Program:
    """Add sends and receives to a schedule.

    Args:
        schedule: complete, as :func:`pipelane.check.check` verifies.
        skips: pairs (earlier stage, later stage) of stages that are no neighbours and between which
            a value goes; what is on one rank needs no message.

    Raises:
        CheckError: the placement does not fit the sizes, an action is out of range or on the wrong
            rank, or the dependencies and the ranks' orders contradict each other; the message
            shows the cycle rank by rank.
    """
    check_placement(schedule)
    stages, placement = schedule.shape.stages, schedule.placement
    _check_skips(skips, stages)
    streams: list[list[Instruction]] = [[] for _ in schedule.orders]
    for rank, action in _total_order(schedule):
        streams[rank].append(Instruction(*action[:3], -1, action.parts))
        for part in action.parts or (action,):
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
            if skips:
                _skip_messages(streams, rank, part, send, receive, skips, placement)
    has_backward = any(a.kind is not Kind.F for order in schedule.orders for a in order)
    return Program(
        schedule.name,
        stages,
        schedule.shape.microbatches,
        placement,
        tuple(tuple(stream) for stream in streams),
        forward_only=not has_backward,
        skips=tuple(sorted(set(skips))),
    )


def _skip_messages(
    streams: list[list[Instruction]],
    rank: int,
    part: Action,
    send: Kind,
    receive: Kind,
    skips: Sequence[tuple[int, int]],
    placement: tuple[int, ...],
) -> None:
    """After an action, and after its message to the neighbour, its messages along skips."""
    here = 0 if send is Kind.SEND_F else 1
    for edge in sorted(set(skips)):
        if edge[here] != part.stage or placement[edge[0]] == placement[edge[1]]:
            continue
        to = edge[1 - here]
        peer = placement[to]
        streams[rank].append(Instruction(send, part.stage, part.microbatch, peer, (), to))
        streams[peer].append(Instruction(receive, to, part.microbatch, rank, (), part.stage))


def _check_skips(skips: Sequence[tuple[int, int]], stages: int) -> None:
    for a, b in skips:
        if not (a >= 0 and a + 1 < b < stages):
            raise CheckError(
                f"a skip from stage {a} to stage {b} must go to a later one of {stages} stages "
                "that is not the next: what goes to the next is a part of the ordinary message"
            )


def program_from_csv(source: str | Path, *, name: str | None = None) -> Program:
    """Read instruction streams with their sends and receives from a CSV file, one row per rank.

    This is the form of torch.distributed.pipelining with communication actions. Sizes and
    placement follow from the compute actions, the peer of each send and receive from the
    placement. Nothing is added and nothing reordered: :func:`pipelane.check.verify_program` and
    :func:`pipelane.check.deadlocks` say whether these very streams can deadlock. A file of compute
    actions gives a program without messages.

    Raises:
        ScheduleError: the file cannot be read, or a cell is not an action, or a stage is on two
            ranks, or a send or receive has no stage at its other end, or is between stages of one
            rank; the message names file, row and cell.
    """
    path = Path(source)
    return program_from_rows(read_rows(path), name=name or path.stem, where=str(path))


def program_from_rows(
    rows: Sequence[Sequence[str]], *, name: str, where: str = "program"
) -> Program:
    """Build a program from rows of action strings, as :func:`program_from_csv` does."""
    schedule = schedule_from_rows(rows, name=name, where=where)
    placement, stages = schedule.placement, schedule.shape.stages
    streams = []
    for rank, row in enumerate(rows):
        stream = []
        for column, cell in enumerate(row):
            if not cell.strip():
                continue
            action = parse_action(cell)
            peer = -1
            if action.kind in COMMUNICATION:
                to = action.stage + (1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else -1)
                fault = misplaced(action, rank, placement, schedule.shape.microbatches)
                if fault is None and not 0 <= to < stages:
                    fault = f"rank {rank}: {action} has no stage at its other end"
                if fault is None and placement[to] == rank:
                    fault = f"rank {rank}: {action} is not needed, stage {to} is on the same rank"
                if fault is not None:
                    raise ScheduleError(f"{where}, row {rank + 1}, cell {column + 1}: {fault}")
                peer = placement[to]
            stream.append(Instruction(*action[:3], peer, action.parts))
        streams.append(tuple(stream))
    forwards = all(a.kind is Kind.F for order in schedule.orders for a in order)
    return Program(
        schedule.name, stages, schedule.shape.microbatches, placement, tuple(streams), forwards
    )


def _total_order(schedule: Schedule) -> list[tuple[int, Action]]:
    """All actions as (rank, action), sorted by when they would end with the unit durations."""
    placement, m = schedule.placement, schedule.shape.microbatches
    stages = len(placement)
    ends: dict[Result, int] = {}
    waiting: dict[Result, list[int]] = {}
    position = [0] * len(schedule.orders)
    clock = [0] * len(schedule.orders)
    placed: list[tuple[int, int, int, Action]] = []
    ready = list(range(len(schedule.orders)))
    while ready:
        rank = ready.pop()
        order = schedule.orders[rank]
        while position[rank] < len(order):
            action = order[position[rank]]
            parts = action.parts or (action,)
            start, missing = clock[rank], None
            for part in parts:
                if fault := misplaced(part, rank, placement, m):
                    raise CheckError(f"schedule {schedule.name!r}, {fault}")
                for need in dependencies(part, stages):
                    end = ends.get(need)
                    if end is None:
                        missing = need
                    elif end > start:
                        start = end
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            end = start + _DURATION[action.kind]
            clock[rank] = end
            placed.append((end, rank, position[rank], action))
            position[rank] += 1
            for part in parts:
                result = result_of(part)
                ends[result] = end
                ready.extend(waiting.pop(result, ()))
    if len(placed) < sum(map(len, schedule.orders)):
        raise CheckError(_cycle(schedule, position, ends))
    placed.sort(key=itemgetter(0, 1, 2))
    return [(rank, action) for _, rank, _, action in placed]


def _cycle(schedule: Schedule, position: list[int], ends: dict[Result, int]) -> str:
    """The message for orders that contradict the dependencies."""

    def wait_of(rank: int) -> tuple[str, int] | None:
        if position[rank] == len(schedule.orders[rank]):
            return None
        stuck = schedule.orders[rank][position[rank]]
        kind, stage, number = next(
            need
            for part in stuck.flat()
            for need in dependencies(part, len(schedule.placement))
            if need not in ends
        )
        what = "backward" if kind is Kind.I else "forward"
        owner = schedule.placement[stage]
        shown = f"the {what} of stage {stage}, micro-batch {number}, on rank {owner}"
        return f": {stuck} waits for {shown}", owner

    first = next(r for r, order in enumerate(schedule.orders) if position[r] < len(order))
    return (
        f"schedule {schedule.name!r} cannot run: dependencies and orders contradict each other\n"
        + wait_chain(first, wait_of)
    )
