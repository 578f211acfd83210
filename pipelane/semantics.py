"""Can a program deadlock? One verdict for each way in which messages may be carried.

A rank executes its stream one instruction after the other (one queue per rank). What differs is
when a send lets it go on, and how a receive finds its message:

==============  ==================================================================================
``rendezvous``  a send ends only when its receive is reached, and the other way round
``k-buffered``  a channel (sender, receiver, direction) holds ``buffers`` messages that were sent
                and not received; when it is full, a send waits for room or for its own receive
``buffered``    sends never wait
``fifo``        sends never wait, and messages carry no tags: a receive takes the oldest message of
                its channel, so both ends must have the same order
``pipelane``    what :mod:`pipelane.runtime.transport` does: a receive only posts, up to
                ``LOOKAHEAD`` messages beyond its own, in the order of its channel, and the compute
                that needs the message waits for it; a send waits until at most ``SENDS_AHEAD``
                sends of its channel have no posted receive; channels are FIFO. Messages are taken
                as large; small ones wait less
==============  ==================================================================================

In each of them a rank has exactly one next instruction, and what lets it go on is never taken back.
So every run gets equally far, and playing one run through decides; that takes linear time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipelane.actions import Kind
from pipelane.errors import ConfigError
from pipelane.program import Program, wait_chain

__all__ = [
    "LOOKAHEAD", "SEMANTICS", "SENDS_AHEAD", "Messages", "Verdict", "play", "trace_messages",
]  # fmt: skip

#: What pipelane's transport does with large messages (a test holds the two together).
LOOKAHEAD = 2
SENDS_AHEAD = 2

SEMANTICS = ("rendezvous", "k-buffered", "buffered", "fifo", "pipelane")

_ASSUMES = {
    "rendezvous": "nothing is buffered and a send waits for its receive",
    "k-buffered": "each channel buffers {buffers} message{plural}",
    "buffered": "sends never wait",
    "fifo": "sends never wait, and each channel delivers in the order of its sends, without tags",
    "pipelane": (
        f"receives are posted {LOOKAHEAD} messages ahead in their channel's order, {SENDS_AHEAD} "
        "sends per channel are under way, and both ends of a channel have the same order"
    ),
}

# Events, the parts of a stream that may wait: 4 * message + one of these.
_SEND, _RECEIVE, _WAIT = 0, 1, 2


class Verdict(NamedTuple):
    """Whether a program can deadlock if messages are carried in one way.

    Attributes:
        semantics: one of :data:`SEMANTICS`.
        safe: it cannot deadlock, and every receive gets its own message.
        assumption: what the verdict takes for granted.
        reason: why not: the wait-for cycle rank by rank, or where a channel's two ends differ;
            "" if safe. Instructions have their place in the rank's stream, counted from 0.
    """

    semantics: str
    safe: bool
    assumption: str
    reason: str = ""


@dataclass(frozen=True)
class Messages:
    """A program's messages as numbers, for the players.

    A message is ``row * m + micro-batch``. Rows are: the stage of its producer, plus ``S`` for
    gradients; then for each of the program's skips one for its value and one for its gradient.

    Attributes:
        program: where they come from.
        events: per rank, 4 * message + 0 for a send, 1 for a receive, 2 for a compute that needs
            it.
        sender, receiver: ranks by ``message // m``; -1 where there is no message.
    """

    program: Program
    events: tuple[list[int], ...]
    sender: list[int]
    receiver: list[int]

    def channel(self, message: int) -> tuple[int, int, bool]:
        """(sender, receiver, is forward)."""
        row = message // self.program.microbatches
        return self.sender[row], self.receiver[row], self.is_forward(row)

    def is_forward(self, row: int) -> bool:
        """Whether the row's messages are activations."""
        first = 2 * self.program.stages
        return row < self.program.stages if row < first else (row - first) % 2 == 0


def trace_messages(program: Program) -> Messages:
    """The events of a program that pipelane.check found well formed."""
    stages, m, placement = program.stages, program.microbatches, program.placement
    sender, receiver = [-1] * (2 * stages), [-1] * (2 * stages)
    for s in range(stages - 1):
        here, there = placement[s], placement[s + 1]
        if here != there:
            sender[s], receiver[s] = here, there
            sender[stages + s + 1], receiver[stages + s + 1] = there, here
    # By kind: what to add to the stage to get the row of its message.
    row_of = {
        Kind.SEND_F: (0, _SEND), Kind.RECV_F: (-1, _RECEIVE),
        Kind.SEND_B: (stages, _SEND), Kind.RECV_B: (stages + 1, _RECEIVE),
        Kind.F: (-1, _WAIT), Kind.B: (stages + 1, _WAIT), Kind.I: (stages + 1, _WAIT),
    }  # fmt: skip
    skip_rows: dict[tuple[tuple[int, int], bool], int] = {}
    skip_waits: dict[tuple[Kind, int], list[int]] = {}
    for early, late in program.skips:
        row = len(sender)
        skip_rows[(early, late), True], skip_rows[(early, late), False] = row, row + 1
        here, there = placement[early], placement[late]
        apart = here != there
        sender += [here, there] if apart else [-1, -1]
        receiver += [there, here] if apart else [-1, -1]
        if apart:
            skip_waits.setdefault((Kind.F, late), []).append(row)
            for back in (Kind.B, Kind.I):
                skip_waits.setdefault((back, early), []).append(row + 1)
    find, last = row_of.get, 2 * stages
    events: list[list[int]] = []
    for stream in program.streams:
        found: list[int] = []
        for instruction in stream:
            kind, stage, number, _, parts, to = instruction
            if to >= 0:
                event = _SEND if kind.is_send else _RECEIVE
                found.append(4 * (skip_rows[instruction.edge] * m + number) + event)
                continue
            for a, s, i in ((kind, stage, number),) if not parts else [p[:3] for p in parts]:
                entry = find(a)
                if entry is None:
                    continue
                # Outside of these rows: stage 0's input, and the last stage's gradient.
                row = s + entry[0]
                if entry[1] != _WAIT or (0 <= row < last and receiver[row] >= 0):
                    found.append(4 * (row * m + i) + entry[1])
                if skip_waits and entry[1] == _WAIT:
                    found += [4 * (row * m + i) + _WAIT for row in skip_waits.get((a, s), ())]
        events.append(found)
    return Messages(program, tuple(events), sender, receiver)


def play(messages: Messages, semantics: str, *, buffers: int = 1) -> Verdict:
    """Decide whether the program can deadlock under one semantics.

    Args:
        messages: from :func:`trace_messages`.
        semantics: one of :data:`SEMANTICS`.
        buffers: messages that a channel holds, for ``k-buffered``.

    Raises:
        ConfigError: the semantics is unknown, or buffers is below 0.
    """
    if semantics not in SEMANTICS:
        raise ConfigError(f"unknown semantics {semantics!r}; choose from {', '.join(SEMANTICS)}")
    _require_buffers(buffers)
    reason = ""
    if semantics in ("fifo", "pipelane"):
        reason = _disagreement(messages)
    if not reason:
        if semantics == "pipelane":
            reason = _play_transport(messages)
        else:
            room = {"rendezvous": 0, "k-buffered": buffers}.get(semantics)
            reason = _play_queues(messages, room)
    return verdict(semantics, reason, buffers=buffers)


def verdict(semantics: str, reason: str = "", *, buffers: int = 1) -> Verdict:
    """A verdict with its assumption in words; safe if there is no reason why not."""
    _require_buffers(buffers)
    assumption = _ASSUMES[semantics].format(buffers=buffers, plural="" if buffers == 1 else "s")
    return Verdict(semantics, not reason, assumption, reason)


def _require_buffers(buffers: int) -> None:
    if buffers < 0:
        raise ConfigError(f"buffers must be at least 0, got {buffers}")


def channels_agree(messages: Messages) -> Verdict:
    """Whether each channel's two ends have the same order, as a verdict on ``fifo``.

    Only for programs that end under rendezvous, which are then safe with FIFO channels too.
    """
    return verdict("fifo", _disagreement(messages))


def _play_queues(messages: Messages, room: int | None) -> str:
    """With tags, one queue per rank and ``room`` messages per channel (None: any number)."""
    program = messages.program
    m = program.microbatches
    sender, receiver = messages.sender, messages.receiver
    streams = [[e for e in events if e & 3 != _WAIT] for events in messages.events]
    channel_of, channels = _channels(messages)
    space = [len(sender) * m if room is None else room] * channels
    blocked = [-1] * channels  # the message whose send waits for room
    lying, sending, awaited, done = range(1, 5)  # 0: nobody has reached it
    state = bytearray(len(sender) * m)
    at = [0] * len(streams)
    ready = list(range(len(streams)))
    while ready:
        rank = ready.pop()
        stream, position = streams[rank], at[rank]
        end = len(stream)
        while position < end:
            event = stream[position]
            message = event >> 2
            now = state[message]
            row = message // m
            if event & _RECEIVE:
                if now == lying:
                    channel = channel_of[row]
                    waiting = blocked[channel]
                    if waiting < 0:
                        space[channel] += 1
                    else:  # the room goes to the send that waits for it
                        blocked[channel] = -1
                        state[waiting] = lying
                        at[sender[row]] += 1
                        ready.append(sender[row])
                elif now == sending:
                    blocked[channel_of[row]] = -1
                    at[sender[row]] += 1
                    ready.append(sender[row])
                else:
                    state[message] = awaited
                    break
                state[message] = done
            elif now == awaited:
                state[message] = done
                at[receiver[row]] += 1
                ready.append(receiver[row])
            elif space[channel_of[row]]:
                space[channel_of[row]] -= 1
                state[message] = lying
            else:
                blocked[channel_of[row]] = message
                state[message] = sending
                break
            position += 1
        at[rank] = position
    if all(a == len(s) for a, s in zip(at, streams, strict=True)):
        return ""

    def partner(rank: int, event: int) -> tuple[int, int]:
        message = event >> 2
        row = message // m
        if event & _RECEIVE:
            return sender[row], 4 * message + _SEND
        peer, channel = receiver[row], channel_of[row]
        for other in streams[peer][at[peer] :]:  # what would make room, or take the message itself
            lies = state[other >> 2] == lying and channel_of[(other >> 2) // m] == channel
            if other & _RECEIVE and (other >> 2 == message or lies):
                return peer, other
        return peer, 4 * message + _RECEIVE

    return _chain(messages, streams, at, partner, waits=False)


def _play_transport(messages: Messages) -> str:
    """As the runtime does it; the two ends of each channel are known to agree."""
    m, sender, receiver = messages.program.microbatches, messages.sender, messages.receiver
    streams = messages.events
    channel_of, channels = _channels(messages)
    index = [0] * (len(sender) * m)  # a message's place in its channel
    count = [0] * channels
    for stream in streams:
        for event in stream:
            if not event & 3:
                channel = channel_of[(event >> 2) // m]
                index[event >> 2] = count[channel]
                count[channel] += 1
    sent, posted = [0] * channels, [0] * channels
    # What a blocked end needs the other end's counter to be; 0 if it is not blocked.
    sender_needs, receiver_needs = [0] * channels, [0] * channels
    at = [0] * len(streams)
    ready = list(range(len(streams)))
    while ready:
        rank = ready.pop()
        stream, position = streams[rank], at[rank]
        end = len(stream)
        while position < end:
            event = stream[position]
            message = event >> 2
            row = message // m
            channel, place = channel_of[row], index[message]
            if not event & 3:
                sent[channel] = place + 1
                if 0 < receiver_needs[channel] <= place + 1:
                    receiver_needs[channel] = 0
                    at[receiver[row]] += 1
                    ready.append(receiver[row])
                if posted[channel] < place + 1 - SENDS_AHEAD:
                    sender_needs[channel] = place + 1 - SENDS_AHEAD
                    break
            else:
                ahead = place + 1 + (LOOKAHEAD if event & _RECEIVE else 0)
                if ahead > posted[channel]:
                    posted[channel] = ahead
                    if 0 < sender_needs[channel] <= ahead:
                        sender_needs[channel] = 0
                        at[sender[row]] += 1
                        ready.append(sender[row])
                if event & _WAIT and sent[channel] <= place:
                    receiver_needs[channel] = place + 1
                    break
            position += 1
        at[rank] = position
    if all(a == len(s) for a, s in zip(at, streams, strict=True)):
        return ""

    def partner(rank: int, event: int) -> tuple[int, int]:
        message = event >> 2
        row = message // m
        if event & _WAIT:
            return sender[row], 4 * message + _SEND
        peer, channel = receiver[row], channel_of[row]
        needed = sender_needs[channel]
        for other in streams[peer][at[peer] :]:  # the first that posts far enough
            if other & 3 and channel_of[(other >> 2) // m] == channel:
                posts = index[other >> 2] + 1 + (LOOKAHEAD if other & _RECEIVE else 0)
                if posts >= needed:
                    return peer, other
        return peer, 4 * message + _RECEIVE

    return _chain(messages, streams, at, partner, waits=True)


def _channels(messages: Messages) -> tuple[list[int], int]:
    """Rows of messages -> number of their channel (-1 for none), and how many channels."""
    numbers: dict[tuple[int, int, bool], int] = {}
    rows = []
    for row, (a, b) in enumerate(zip(messages.sender, messages.receiver, strict=True)):
        key = a, b, messages.is_forward(row)
        rows.append(numbers.setdefault(key, len(numbers)) if a >= 0 else -1)
    return rows, len(numbers)


def _chain(
    messages: Messages,
    streams: Sequence[Sequence[int]],
    at: Sequence[int],
    partner: Callable[[int, int], tuple[int, int]],
    *,
    waits: bool,
) -> str:
    """Who waits for whom: which instruction, at which place, for which one of which rank."""

    def wait_of(rank: int) -> tuple[str, int] | None:
        if at[rank] == len(streams[rank]):
            return None
        event = streams[rank][at[rank]]
        peer, wanted = partner(rank, event)
        mine, theirs = _find(messages, rank, event), _find(messages, peer, wanted)
        return f" waits in {mine} for rank {peer}: {theirs}", peer

    first = next(r for r, stream in enumerate(streams) if at[r] < len(stream))
    return wait_chain(first, wait_of)


def _find(messages: Messages, rank: int, event: int) -> str:
    """An event's instruction and its place in the rank's stream."""
    program = messages.program
    m, kind = program.microbatches, event & 3
    row, number = divmod(event >> 2, m)
    forward = messages.is_forward(row)
    if row >= 2 * program.stages:
        edge = program.skips[(row - 2 * program.stages) // 2]
    else:
        edge = (row, row + 1) if forward else (row - program.stages - 1, row - program.stages)
    stage = edge[(kind == _SEND) != forward]
    if kind == _WAIT:
        kinds = {Kind.F} if forward else {Kind.B, Kind.I}
    elif kind == _SEND:
        kinds = {Kind.SEND_F if forward else Kind.SEND_B}
    else:
        kinds = {Kind.RECV_F if forward else Kind.RECV_B}
    for place, instruction in enumerate(program.streams[rank]):
        if kind != _WAIT and instruction.kind in kinds and instruction.edge[0] != edge:
            continue
        for part in instruction.parts or (instruction,):
            if part.kind in kinds and part.stage == stage and part.microbatch == number:
                return f"{instruction} (#{place})"
    return f"{stage}{min(kinds).value}{number}, which it does not have"


def _disagreement(messages: Messages) -> str:
    """Where the two ends of a channel first differ; "" if all agree."""
    m = messages.program.microbatches
    channel_of, channels = _channels(messages)
    sent: list[list[int]] = [[] for _ in range(channels)]
    got: list[list[int]] = [[] for _ in range(channels)]
    for stream in messages.events:
        for event in stream:
            kind = event & 3
            if kind != _WAIT:
                (got if kind else sent)[channel_of[event // (4 * m)]].append(event >> 2)
    for out, into in zip(sent, got, strict=True):
        if out == into:
            continue
        place = next(
            (i for i, (a, b) in enumerate(zip(out, into, strict=False)) if a != b),
            min(len(out), len(into)),
        )
        sender, receiver, forward = messages.channel((out or into)[0])
        ends = []
        for rank, row, kind in ((sender, out, _SEND), (receiver, into, _RECEIVE)):
            what = _find(messages, rank, 4 * row[place] + kind) if place < len(row) else "nothing"
            ends.append(f"rank {rank} has {what}")
        return (
            f"  the {'forward' if forward else 'backward'} channel from rank {sender} to rank "
            f"{receiver} has two orders; message {place} of it: {ends[0]}, {ends[1]}"
        )
    return ""
