"""Is a schedule valid, and can its program deadlock? Pure functions that raise with the reason.

:func:`check` looks at a schedule, :func:`verify_program` at any instruction stream, however it
was made; it proves the strongest property that a transport may need: with **rendezvous**
communication and one queue per rank (a send ends only when its receive has been reached, nothing
is buffered, nothing overlaps) the program still ends. Every weaker transport is then safe too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pipelane.actions import Action, Kind
from pipelane.errors import CheckError
from pipelane.program import Instruction, Program, dependencies, lower, message_of, result_of
from pipelane.schedule import Schedule

__all__ = ["Certificate", "check", "peak_activations", "verify_program"]

_FORWARD = [Kind.F]
_SHOWN = 12


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
    _check_placement(schedule)
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


def _check_placement(schedule: Schedule) -> None:
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


def _check_complete(schedule: Schedule, forward_only: bool) -> None:
    """Every stage x micro-batch has F and either B or both I and W, once, on its own rank."""
    shape, where = schedule.shape, f"schedule {schedule.name!r}"
    seen: set[tuple[Kind, int, int]] = set()
    for rank, order in enumerate(schedule.orders):
        for action in order:
            if not action.kind.is_compute:
                raise CheckError(
                    f"{where}, rank {rank}: {action} is not a compute action; communication is "
                    "derived, leave it out"
                )
            for part in action.flat():
                kind, stage, number = part.kind, part.stage, part.microbatch
                if not 0 <= stage < shape.stages or not 0 <= number < shape.microbatches:
                    raise CheckError(
                        f"{where}, rank {rank}: {part} is out of range; stages are 0 to "
                        f"{shape.stages - 1}, micro-batches 0 to {shape.microbatches - 1}"
                    )
                if schedule.placement[stage] != rank:
                    raise CheckError(
                        f"{where}, rank {rank}: {part} belongs to rank "
                        f"{schedule.placement[stage]}, where stage {stage} is placed"
                    )
                if (kind, stage, number) in seen:
                    raise CheckError(f"{where}, rank {rank}: {part} appears twice")
                seen.add((kind, stage, number))
    for stage in range(shape.stages):
        rank = schedule.placement[stage]
        for number in range(shape.microbatches):
            found = [k for k in _BACKWARD_KINDS if (k, stage, number) in seen]
            if (Kind.F, stage, number) not in seen:
                raise CheckError(f"{where}, rank {rank}: {stage}F{number} is missing")
            if found != [] if forward_only else found not in ([Kind.B], [Kind.I, Kind.W]):
                have = ", ".join(f"{stage}{k.value}{number}" for k in found) or "nothing"
                need = (
                    "no backward in a forward-only schedule"
                    if forward_only
                    else f"{stage}B{number}, or both {stage}I{number} and {stage}W{number}"
                )
                raise CheckError(
                    f"{where}, rank {rank}: stage {stage}, micro-batch {number} has {have} as its "
                    f"backward; expected {need}"
                )


_BACKWARD_KINDS = (Kind.B, Kind.I, Kind.W)


def verify_program(program: Program) -> tuple[int, int]:
    """Prove that a program ends under rendezvous communication with one queue per rank.

    Plays the program: a compute runs when its inputs are there, a send and its receive run
    together when both ranks have reached them. Runs in any order lead to the same end, because
    each rank has exactly one next instruction, so one play-through decides. It also checks that
    every compute finds its input already received, and that each message is sent and received
    exactly once.

    Returns:
        The number of compute instructions and of messages.

    Raises:
        CheckError: with the wait-for cycle, rank by rank.
    """
    streams, placement = program.streams, program.placement
    at = [0] * len(streams)
    done: set[tuple[Kind, int, int]] = set()  # computes that ran
    received: set[tuple[Kind, int, int]] = set()
    reached: dict[tuple[Kind, int, int], int] = {}  # message -> rank waiting at its other end
    computes = messages = 0
    ready = list(range(len(streams)))
    while ready:
        rank = ready.pop()
        stream = streams[rank]
        while at[rank] < len(stream):
            instruction = stream[at[rank]]
            if instruction.kind.is_compute:
                for part in instruction.flat():
                    for need in dependencies(part, program.stages, program.forward_only):
                        local = placement[need.stage] == rank
                        if need[:3] not in (done if local else received):
                            raise CheckError(_late(program, rank, instruction, need, local))
                    done.add(result_of(part))
                computes += 1
                at[rank] += 1
                continue
            if not (instruction.kind.is_send or instruction.kind.is_receive):
                at[rank] += 1
                continue
            produced = message_of(instruction)
            if instruction.kind.is_send and produced not in done:
                raise CheckError(
                    f"program {program.name!r}, rank {rank}: {instruction} sends what was not "
                    "computed before it"
                )
            if produced in received:
                raise CheckError(
                    f"program {program.name!r}, rank {rank}: {instruction} repeats a message"
                )
            other = reached.get(produced)
            if other is None or other == rank:
                reached[produced] = rank
                break
            partner = streams[other][at[other]]
            if partner.kind.is_send == instruction.kind.is_send or (
                partner.peer,
                instruction.peer,
            ) != (rank, other):
                raise CheckError(
                    f"program {program.name!r}: {instruction} on rank {rank} (peer "
                    f"{instruction.peer}) does not match {partner} on rank {other} (peer "
                    f"{partner.peer})"
                )
            del reached[produced]
            received.add(produced)
            messages += 1
            at[rank] += 1
            at[other] += 1
            ready.append(other)
    if any(position < len(stream) for position, stream in zip(at, streams, strict=True)):
        raise CheckError(_deadlock(program, at))
    return computes, messages


def _late(program: Program, rank: int, runs: Instruction, need: Action, local: bool) -> str:
    verb = "computed" if local else "received"
    return (
        f"program {program.name!r}, rank {rank}: {runs} needs {need}, which was not {verb} before "
        "it on this rank; reorder the rank's actions"
    )


def _deadlock(program: Program, at: Sequence[int]) -> str:
    """Follow who waits for whom from a stuck rank until a rank repeats or has ended."""
    rank = next(r for r, stream in enumerate(program.streams) if at[r] < len(stream))
    seen: list[int] = []
    lines: list[str] = []
    while rank not in seen and at[rank] < len(program.streams[rank]):
        seen.append(rank)
        stuck = program.streams[rank][at[rank]]
        lines.append(f"  rank {rank} waits in {stuck} for rank {stuck.peer}")
        rank = stuck.peer
    if rank in seen:
        lines = lines[seen.index(rank) :]
    else:
        lines.append(f"  rank {rank} has no instruction left")
    more = len(lines) - _SHOWN
    if more > 0:
        lines = [*lines[:_SHOWN], f"  ... and {more} more ranks"]
    return f"program {program.name!r} can deadlock:\n" + "\n".join(lines)
