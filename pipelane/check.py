"""Is a schedule valid, and can its program deadlock? Pure functions that raise with the reason.

:func:`check` looks at a schedule, :func:`verify_program` at any instruction stream, however it
was made; it proves the strongest property that a transport may need: with **rendezvous**
communication and one queue per rank (a send ends only when its receive has been reached, nothing
is buffered, nothing overlaps) the program still ends. Every weaker transport is then safe too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipelane.actions import COMMUNICATION, COMPUTE, Action, Kind
from pipelane.errors import CheckError
from pipelane.program import (
    Instruction,
    Program,
    check_placement,
    dependencies,
    lower,
    message_of,
    misplaced,
    result_of,
    wait_chain,
)
from pipelane.schedule import Schedule

__all__ = ["Certificate", "check", "peak_activations", "verify_program"]

# One bit a kind: what a stage has done, or is to do, for a micro-batch.
_BIT = {Kind.F: 1, Kind.B: 2, Kind.I: 4, Kind.W: 8}
_TRAINED = (1 | 2, 1 | 4 | 8)  # F and B, or F, I and W
_EVALUATED = (1,)


@dataclass(frozen=True)
class Certificate:
    """What was proven about a program.

    Attributes:
        schedule: name of the schedule.
        ranks, microbatches, chunks: its sizes.
        computes: number of compute actions over all ranks.
        messages: number of point-to-point messages.
        peak_activations: per rank, the most chunks of activations alive at once.
        statement: the proof in one sentence.
    """

    schedule: str
    ranks: int
    microbatches: int
    chunks: int
    computes: int
    messages: int
    peak_activations: tuple[int, ...]
    statement: str


def check(schedule: Schedule, *, forward_only: bool = False) -> Certificate:
    """Check completeness, placement and dependencies, lower, and verify the program.

    Args:
        schedule: what to check.
        forward_only: the schedule is for evaluation: forwards only, no backward.

    Returns:
        The certificate. Linear in the number of actions.

    Raises:
        CheckError: the first fault found, naming rank, action and remedy.
    """
    check_placement(schedule)
    _check_complete(schedule, forward_only)
    program = lower(schedule)
    computes, messages = verify_program(program)
    shape = schedule.shape
    return Certificate(
        schedule.name,
        shape.ranks,
        shape.microbatches,
        shape.chunks,
        computes,
        messages,
        peak_activations(schedule.orders),
        "all ranks' programs are parts of one total order in which each send and its receive are "
        "one point, so they cannot deadlock, not even with rendezvous sends and one queue per rank",
    )


def peak_activations(orders: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Per rank, the most chunks alive at once: F adds one, B or W frees one."""
    peaks = []
    for order in orders:
        alive = peak = 0
        for action in order:
            for part in action.flat():
                if part.kind is Kind.F:
                    alive += 1
                    peak = max(peak, alive)
                elif part.kind in (Kind.B, Kind.W):
                    alive -= 1
        peaks.append(peak)
    return tuple(peaks)


def _check_complete(schedule: Schedule, forward_only: bool) -> None:
    """Every stage x micro-batch has F and either B or both I and W, once, on its own rank."""
    where = f"schedule {schedule.name!r}"
    work = _Work(where, schedule.placement, schedule.shape.microbatches)
    for rank, order in enumerate(schedule.orders):
        for action in order:
            if not isinstance(action, Action):
                raise CheckError(
                    f"{where}, rank {rank}: {action!r} is not a pipelane.Action; text such as "
                    "'2F3' is read by pipelane.actions.parse_action"
                )
            if action.kind not in COMPUTE:
                raise CheckError(
                    f"{where}, rank {rank}: {action} is not a compute action; communication is "
                    "derived, leave it out"
                )
            work.add(rank, _parts(where, rank, action))
    work.finish(forward_only)


def _parts(where: str, rank: int, action: Action | Instruction) -> tuple[Action | Instruction, ...]:
    """The action itself or the two parts of an overlapped pair, which must be well formed."""
    if not action.parts and action.kind is not Kind.OVERLAP:
        return (action,)
    kinds = [part.kind for part in action.parts]
    pair = action.kind is Kind.OVERLAP and len(kinds) == 2 and kinds[0] is Kind.F
    if not pair or kinds[1] not in (Kind.B, Kind.I):
        raise CheckError(
            f"{where}, rank {rank}: {action} is not an action; only OVERLAP_F_B has parts, one F "
            "and one B or I"
        )
    return action.parts


class _Work:
    """Which compute actions there are; each must be on its rank, and appear once."""

    def __init__(self, where: str, placement: tuple[int, ...], microbatches: int) -> None:
        self.where = where
        self.placement = placement
        self.microbatches = microbatches
        self.masks: dict[tuple[int, int], int] = {}  # (stage, micro-batch) -> bits of kinds

    def add(self, rank: int, parts: Iterable[Action | Instruction]) -> None:
        for part in parts:
            if fault := misplaced(part, rank, self.placement, self.microbatches):
                raise CheckError(f"{self.where}, {fault}")
            slot, bit = (part.stage, part.microbatch), _BIT[part.kind]
            mask = self.masks.get(slot, 0)
            if mask & bit:
                raise CheckError(f"{self.where}, rank {rank}: {part} appears twice")
            self.masks[slot] = mask | bit

    def finish(self, forward_only: bool) -> None:
        """Raise unless every stage has all of its work for every micro-batch."""
        complete = _EVALUATED if forward_only else _TRAINED
        for stage, rank in enumerate(self.placement):
            for number in range(self.microbatches):
                mask = self.masks.get((stage, number), 0)
                if mask not in complete:
                    fault = self._fault(stage, number, mask, forward_only)
                    raise CheckError(f"{self.where}, rank {rank}: {fault}")

    @staticmethod
    def _fault(stage: int, number: int, mask: int, forward_only: bool) -> str:
        if not mask & _BIT[Kind.F]:
            return f"{stage}F{number} is missing"
        found = [f"{stage}{k.value}{number}" for k in (Kind.B, Kind.I, Kind.W) if mask & _BIT[k]]
        expected = (
            "no backward in a forward-only schedule"
            if forward_only
            else f"{stage}B{number}, or both {stage}I{number} and {stage}W{number}"
        )
        return (
            f"stage {stage}, micro-batch {number} has {', '.join(found) or 'nothing'} as its "
            f"backward; expected {expected}"
        )


def verify_program(program: Program) -> tuple[int, int]:
    """Prove that a program ends under rendezvous communication with one queue per rank.

    Plays the program: a compute runs when its inputs are there, a send and its receive run
    together when both ranks have reached them. Runs in any order lead to the same end, because
    each rank has exactly one next instruction, so one play-through decides. It also checks that
    every stage does its work for every micro-batch, once and on its own rank, that every compute
    finds its inputs computed or received before it, and that each message goes, once, from the
    rank that makes it to the rank that needs it.

    Returns:
        The number of compute instructions and of messages.

    Raises:
        CheckError: with the rank and the instruction at fault, or with the wait-for cycle, rank
            by rank.
    """
    streams, placement, where = program.streams, program.placement, f"program {program.name!r}"
    _check_stages(program)
    m, routes = program.microbatches, _routes(placement)
    work = _Work(where, placement, m)
    at = [0] * len(streams)
    done: set[tuple[Kind, int, int]] = set()  # what computes that ran made
    received: set[tuple[Kind, int, int]] = set()
    reached: dict[tuple[Kind, int, int], int] = {}  # message -> rank waiting at its one end
    computes = messages = 0
    ready = list(range(len(streams)))
    while ready:
        rank = ready.pop()
        stream = streams[rank]
        while at[rank] < len(stream):
            instruction = stream[at[rank]]
            kind = instruction.kind
            if kind in COMPUTE:
                parts = _parts(where, rank, instruction)
                work.add(rank, parts)
                for part in parts:
                    for need in dependencies(part, program.stages):
                        local = placement[need[1]] == rank
                        if need not in (done if local else received):
                            raise CheckError(f"{where}, {_late(rank, instruction, need, local)}")
                done.update(map(result_of, parts))
                computes += 1
                at[rank] += 1
                continue
            if kind not in COMMUNICATION:
                at[rank] += 1
                continue
            route = routes.get((kind, instruction.stage))
            if route != (rank, instruction.peer) or not 0 <= instruction.microbatch < m:
                raise CheckError(f"{where}, {_wrong_route(program, rank, instruction)}")
            message = message_of(instruction)
            if message not in done and kind.is_send:
                raise CheckError(
                    f"{where}, rank {rank}: {instruction} sends what was not computed before it"
                )
            if message in received:
                raise CheckError(f"{where}, rank {rank}: {instruction} repeats a message")
            other = reached.get(message)
            if other is None or other == rank:
                reached[message] = rank
                break
            del reached[message]
            received.add(message)
            messages += 1
            at[rank] += 1
            at[other] += 1
            ready.append(other)
    if any(position < len(stream) for position, stream in zip(at, streams, strict=True)):
        raise CheckError(_deadlock(program, at))
    work.finish(program.forward_only)
    return computes, messages


def _check_stages(program: Program) -> None:
    """The placement names a rank of the program for each stage."""
    ranks, placement = len(program.streams), program.placement
    if len(placement) != program.stages or not all(0 <= rank < ranks for rank in placement):
        raise CheckError(
            f"program {program.name!r}: placement {placement} does not put {program.stages} "
            f"stages on ranks 0 to {ranks - 1}"
        )


def _routes(placement: tuple[int, ...]) -> dict[tuple[Kind, int], tuple[int, int]]:
    """(kind, stage) of a send or receive -> the rank that it is on, and its peer."""
    routes: dict[tuple[Kind, int], tuple[int, int]] = {}
    for stage, (here, there) in enumerate(pairwise(placement)):
        if here != there:
            routes[Kind.SEND_F, stage] = routes[Kind.RECV_B, stage] = (here, there)
            routes[Kind.RECV_F, stage + 1] = routes[Kind.SEND_B, stage + 1] = (there, here)
    return routes


def _wrong_route(program: Program, rank: int, instruction: Instruction) -> str:
    """Why a send or receive cannot be on this rank with this peer."""
    placement = program.placement
    if fault := misplaced(instruction, rank, placement, program.microbatches):
        return fault
    to_next = instruction.kind in (Kind.SEND_F, Kind.RECV_B)
    stage = instruction.stage + (1 if to_next else -1)
    if not 0 <= stage < program.stages:
        return f"rank {rank}: {instruction} has no stage at its other end"
    if placement[stage] == rank:
        return f"rank {rank}: {instruction} is not needed, stage {stage} is on the same rank"
    return (
        f"rank {rank}: {instruction} names rank {instruction.peer} as its peer, but stage {stage} "
        f"is on rank {placement[stage]}"
    )


def _late(rank: int, runs: Instruction, need: tuple[Kind, int, int], local: bool) -> str:
    kind, stage, number = need
    what = "backward" if kind is Kind.I else "forward"
    return (
        f"rank {rank}: {runs} needs the {what} of stage {stage}, micro-batch {number}, which was "
        f"not {'computed' if local else 'received'} before it on this rank; reorder the rank's "
        "actions"
    )


def _deadlock(program: Program, at: Sequence[int]) -> str:
    """The message for a program that does not end: who waits for whom."""

    def wait_of(rank: int) -> tuple[str, int] | None:
        if at[rank] == len(program.streams[rank]):
            return None
        stuck = program.streams[rank][at[rank]]
        return f" waits in {stuck} for rank {stuck.peer}", stuck.peer

    first = next(r for r, stream in enumerate(program.streams) if at[r] < len(stream))
    return f"program {program.name!r} can deadlock:\n{wait_chain(first, wait_of)}"
