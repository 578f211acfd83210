"""Is a schedule valid, and can its program deadlock? Pure functions that raise with the reason.

:func:`check` looks at a schedule, :func:`verify_program` at any instruction stream, however it
was made; it proves the strongest property that a transport may need: with **rendezvous**
communication and one queue per rank (a send ends only when its receive has been reached, nothing
is buffered, nothing overlaps) the program still ends. Every weaker transport is then safe too.
:func:`deadlocks` says for each of :data:`pipelane.semantics.SEMANTICS` whether it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from pipelane.actions import COMPUTE, Action, Kind
from pipelane.collector import without_collector
from pipelane.errors import CheckError
from pipelane.program import (
    Instruction,
    Program,
    Result,
    check_placement,
    dependencies,
    lower,
    message_of,
    misplaced,
    result_of,
)
from pipelane.schedule import Schedule
from pipelane.semantics import (
    SEMANTICS,
    Messages,
    Verdict,
    channels_agree,
    play,
    trace_messages,
    verdict,
)

__all__ = ["Certificate", "Verdict", "check", "deadlocks", "peak_activations", "verify_program"]

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
        verdicts: whether the program can deadlock, for each way of carrying messages.
    """

    schedule: str
    ranks: int
    microbatches: int
    chunks: int
    computes: int
    messages: int
    peak_activations: tuple[int, ...]
    statement: str
    verdicts: tuple[Verdict, ...] = ()


@without_collector
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
    streams = _check_streams(program)
    _finish(program, streams)
    verdicts = _verdicts(trace_messages(program))
    for found in verdicts:
        if not found.safe:
            raise CheckError(_refusal(program, found))
    shape = schedule.shape
    return Certificate(
        schedule.name,
        shape.ranks,
        shape.microbatches,
        shape.chunks,
        streams.computes,
        streams.messages,
        peak_activations(schedule.orders),
        "all ranks' programs are parts of one total order in which each send and its receive are "
        "one point, so they cannot deadlock, not even with rendezvous sends and one queue per rank",
        verdicts,
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
            if not action.parts and action.kind is not Kind.OVERLAP:
                work.add(rank, action)
            else:
                for part in _parts(where, rank, action):
                    work.add(rank, part)
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
        # By stage * m + micro-batch: bits of kinds.
        self.masks = bytearray(len(placement) * microbatches)

    def add(self, rank: int, part: Action | Instruction) -> None:
        kind, stage, number = part[:3]
        m, placement = self.microbatches, self.placement
        if not (0 <= stage < len(placement) and 0 <= number < m and placement[stage] == rank):
            raise CheckError(f"{self.where}, {misplaced(part, rank, placement, m)}")
        slot, bit = stage * m + number, _BIT[kind]
        mask = self.masks[slot]
        if mask & bit:
            raise CheckError(f"{self.where}, rank {rank}: {part} appears twice")
        self.masks[slot] = mask | bit

    def finish(self, forward_only: bool) -> None:
        """Raise unless every stage has all of its work for every micro-batch."""
        complete = _EVALUATED if forward_only else _TRAINED
        if set(self.masks) <= set(complete):
            return
        for stage, rank in enumerate(self.placement):
            for number in range(self.microbatches):
                mask = self.masks[stage * self.microbatches + number]
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


@without_collector
def verify_program(
    program: Program, semantics: str = "rendezvous", *, buffers: int = 1
) -> tuple[int, int]:
    """Prove that a program ends; by default with rendezvous messages and one queue per rank.

    Also checks that every stage does its work for every micro-batch, once and on its own rank, that
    every compute finds its inputs computed or received before it, and that each message goes,
    once, from the rank that makes it to the rank that needs it. Linear in the program's length.

    Args:
        program: any instruction stream.
        semantics: one of :data:`pipelane.semantics.SEMANTICS`.
        buffers: messages that a channel holds, for ``k-buffered``.

    Returns:
        The number of compute instructions and of messages.

    Raises:
        CheckError: with the rank and the instruction at fault, or with the wait-for cycle, rank
            by rank.
        ConfigError: the semantics is unknown, or buffers is below 0.
    """
    streams = _check_streams(program)
    found = play(trace_messages(program), semantics, buffers=buffers)
    if not found.safe:
        raise CheckError(_refusal(program, found))
    _finish(program, streams)
    return streams.computes, streams.messages


def _refusal(program: Program, found: Verdict) -> str:
    how = "" if found.semantics == "rendezvous" else f" where {found.assumption}"
    return f"program {program.name!r} can deadlock{how}:\n{found.reason}"


@without_collector
def deadlocks(program: Program, *, buffers: int = 1) -> tuple[Verdict, ...]:
    """Whether a program can deadlock, for each of :data:`pipelane.semantics.SEMANTICS`.

    A program that ends under rendezvous ends with buffers too, and where the ends of each channel
    have the same order also with FIFO channels and over pipelane's transport: let each rank go as
    far as it does there, and everything that an instruction may wait for has happened. Only
    programs that do not end under rendezvous are played once for each semantics.

    Raises:
        CheckError: the program is malformed: work or messages are missing, double or misplaced.
    """
    _finish(program, _check_streams(program))
    return _verdicts(trace_messages(program), buffers)


def _verdicts(messages: Messages, buffers: int = 1) -> tuple[Verdict, ...]:
    strongest = play(messages, SEMANTICS[0])
    if not strongest.safe:
        rest = SEMANTICS[1:]
        return (strongest, *(play(messages, name, buffers=buffers) for name in rest))
    fifo = channels_agree(messages)
    orders = {"fifo": fifo.reason, "pipelane": fifo.reason}
    return tuple(verdict(name, orders.get(name, ""), buffers=buffers) for name in SEMANTICS)


def _finish(program: Program, streams: _Streams) -> None:
    """Raise unless all work and all messages are there, with both ends."""
    if streams.unmatched is not None:
        raise CheckError(f"program {program.name!r}, {streams.unmatched}")
    streams.work.finish(program.forward_only)


def _check_streams(program: Program) -> _Streams:
    """Each rank's stream by itself.

    Whether inputs are there before a compute does not depend on how the ranks proceed: results of
    a stage are made on its own rank only, and messages come in at receives.
    """
    streams, placement, where = program.streams, program.placement, f"program {program.name!r}"
    _check_stages(program)
    m, last, routes = program.microbatches, program.stages - 1, _routes(program)
    back = program.stages * m  # results are numbered stage * m + micro-batch, gradients from here
    work = _Work(where, placement, m)
    every = 2 * back + 2 * len(program.skips) * m
    made, sent, received = bytearray(2 * back), bytearray(every), bytearray(every)
    skip_routes, skip_needs = _skip_routes(program)
    # Where the input of a stage's forward, and of its backward, is found.
    remote = [a != b for a, b in pairwise(placement)]
    inputs = [made, *(received if there else made for there in remote)]
    grads = [*(received if there else made for there in remote), made]
    computes = 0
    for rank, stream in enumerate(streams):
        for instruction in stream:
            kind, stage, number, peer, parts, to = instruction
            if kind in COMPUTE:
                computes += 1
                runs: Sequence[Action | Instruction] = (instruction,)
                if parts or kind is Kind.OVERLAP:
                    runs = _parts(where, rank, instruction)
                for part in runs:
                    work.add(rank, part)
                    kind, stage, number = part[:3]
                    slot = stage * m + number
                    if kind is Kind.F:
                        there = stage == 0 or inputs[stage][slot - m]
                    elif kind is Kind.W:
                        there = made[back + slot]
                    else:
                        there = made[slot] and (stage == last or grads[stage][back + slot + m])
                    if there and skip_needs:
                        needs = skip_needs.get((kind, stage), ())
                        there = all(received[base + number] for base in needs)
                    if not there:
                        raise CheckError(f"{where}, {_late(program, rank, instruction)}")
                for part in runs:
                    if part.kind is not Kind.W:
                        slot = part.stage * m + part.microbatch
                        made[slot if part.kind is Kind.F else slot + back] = 1
            elif (ways := routes.get(kind)) is not None:
                way = ways.get(stage) if to < 0 else skip_routes.get((kind, stage, to))
                if way is None or way[0] != rank or way[1] != peer or not 0 <= number < m:
                    raise CheckError(f"{where}, {_wrong_route(program, rank, instruction)}")
                slot = way[2] + number
                if kind is Kind.SEND_F or kind is Kind.SEND_B:
                    seen = sent
                    source = stage * m + number + (0 if kind is Kind.SEND_F else back)
                    if not made[source]:
                        raise CheckError(
                            f"{where}, rank {rank}: {instruction} sends what was not computed "
                            "before it"
                        )
                else:
                    seen = received
                if seen[slot]:
                    raise CheckError(f"{where}, rank {rank}: {instruction} repeats a message")
                seen[slot] = 1
    unmatched = None if sent == received else _unmatched(program, sent, received)
    return _Streams(work, computes, sum(sent), unmatched)


class _Streams(NamedTuple):
    """What was found in the streams by themselves."""

    work: _Work
    computes: int
    messages: int
    unmatched: str | None  # why a send or receive has no other end


def _unmatched(program: Program, sent: bytearray, received: bytearray) -> str:
    """The first send or receive without its other end, and how many there are."""
    m = program.microbatches
    wrong = [slot for slot, (a, b) in enumerate(zip(sent, received, strict=True)) if a != b]
    ways = {
        Instruction(kind, stage): way
        for kind, found in _routes(program).items()
        for stage, way in found.items()
    }
    for (kind, stage, to), way in _skip_routes(program)[0].items():
        ways[Instruction(kind, stage, to=to)] = way
    for message, (rank, peer, base) in ways.items():
        if base <= wrong[0] < base + m and message.kind.is_send == bool(sent[wrong[0]]):
            alone = message._replace(microbatch=wrong[0] - base)
            other = {
                Kind.SEND_F: Kind.RECV_F, Kind.RECV_F: Kind.SEND_F,
                Kind.SEND_B: Kind.RECV_B, Kind.RECV_B: Kind.SEND_B,
            }[message.kind]  # fmt: skip
            edge = message.edge[0]
            end = edge[1] if edge[0] == message.stage else edge[0]
            back = message.stage if message.to >= 0 else -1
            missing = Instruction(other, end, alone.microbatch, to=back)
            more = f" (and {len(wrong) - 1} more like it)" if len(wrong) > 1 else ""
            return (
                f"rank {rank}: {alone} has no other end{more}; rank {peer} needs a {missing}, "
                f"or leave {alone} out"
            )
    raise AssertionError("every message has a route")


def _check_stages(program: Program) -> None:
    """The placement names a rank of the program for each stage."""
    ranks, placement = len(program.streams), program.placement
    if len(placement) != program.stages or not all(0 <= rank < ranks for rank in placement):
        raise CheckError(
            f"program {program.name!r}: placement {placement} does not put {program.stages} "
            f"stages on ranks 0 to {ranks - 1}"
        )


def _routes(program: Program) -> dict[Kind, dict[int, tuple[int, int, int]]]:
    """Kind of message, stage -> the rank that it is on, its peer, the number of micro-batch 0."""
    m, back = program.microbatches, program.stages * program.microbatches
    routes: dict[Kind, dict[int, tuple[int, int, int]]] = {
        Kind.SEND_F: {}, Kind.RECV_F: {}, Kind.SEND_B: {}, Kind.RECV_B: {}
    }  # fmt: skip
    for stage, (here, there) in enumerate(pairwise(program.placement)):
        if here != there:
            out, home = stage * m, back + (stage + 1) * m
            routes[Kind.SEND_F][stage] = (here, there, out)
            routes[Kind.RECV_F][stage + 1] = (there, here, out)
            routes[Kind.SEND_B][stage + 1] = (there, here, home)
            routes[Kind.RECV_B][stage] = (here, there, home)
    return routes


_SkipRoutes = dict[tuple[Kind, int, int], tuple[int, int, int]]


def _skip_routes(program: Program) -> tuple[_SkipRoutes, dict[tuple[Kind, int], list[int]]]:
    """As :func:`_routes` by (kind, stage, other stage); and the messages that a compute needs."""
    m, placement = program.microbatches, program.placement
    routes: _SkipRoutes = {}
    needs: dict[tuple[Kind, int], list[int]] = {}
    for index, (a, b) in enumerate(program.skips):
        here, there = placement[a], placement[b]
        if here == there:
            continue
        out = (2 * program.stages + 2 * index) * m
        home = out + m
        routes[Kind.SEND_F, a, b] = (here, there, out)
        routes[Kind.RECV_F, b, a] = (there, here, out)
        routes[Kind.SEND_B, b, a] = (there, here, home)
        routes[Kind.RECV_B, a, b] = (here, there, home)
        needs.setdefault((Kind.F, b), []).append(out)
        for kind in (Kind.B, Kind.I):
            needs.setdefault((kind, a), []).append(home)
    return routes, needs


def _wrong_route(program: Program, rank: int, instruction: Instruction) -> str:
    """Why a send or receive cannot be on this rank with this peer."""
    placement = program.placement
    if fault := misplaced(instruction, rank, placement, program.microbatches):
        return fault
    edge = instruction.edge[0]
    stage = edge[1] if edge[0] == instruction.stage else edge[0]
    if instruction.to >= 0 and edge not in program.skips:
        return f"rank {rank}: {instruction} goes along no skip of the program"
    if not 0 <= stage < program.stages:
        return f"rank {rank}: {instruction} has no stage at its other end"
    if placement[stage] == rank:
        return f"rank {rank}: {instruction} is not needed, stage {stage} is on the same rank"
    return (
        f"rank {rank}: {instruction} names rank {instruction.peer} as its peer, but stage {stage} "
        f"is on rank {placement[stage]}"
    )


def _late(program: Program, rank: int, runs: Instruction) -> str:
    """Which input of a compute is not there before it."""
    before: set[Result] = set()
    for instruction in program.streams[rank]:
        if instruction == runs:
            break
        if instruction.kind.is_receive:
            before.add(message_of(instruction))
        elif instruction.kind in COMPUTE:
            before.update(map(result_of, instruction.flat()))
    for part in runs.flat():
        for base in _skip_routes(program)[1].get((part.kind, part.stage), ()):
            skip = program.skips[(base // program.microbatches - 2 * program.stages) // 2]
            other = skip[0] if part.kind is Kind.F else skip[1]
            wanted = Instruction(
                Kind.RECV_F if part.kind is Kind.F else Kind.RECV_B,
                part.stage, part.microbatch, program.placement[other], (), other,
            )  # fmt: skip
            stream = program.streams[rank]
            if wanted not in stream[: stream.index(runs)]:
                return f"rank {rank}: {runs} needs {wanted} before it; reorder the rank's actions"
    kind, stage, number = next(
        need
        for part in runs.flat()
        for need in dependencies(part, program.stages)
        if need not in before
    )
    what = "backward" if kind is Kind.I else "forward"
    how = "computed" if program.placement[stage] == rank else "received"
    return (
        f"rank {rank}: {runs} needs the {what} of stage {stage}, micro-batch {number}, which was "
        f"not {how} before it on this rank; reorder the rank's actions"
    )
