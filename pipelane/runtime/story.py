"""What a failure looks like from all ranks: who was first, who waits for whom, and the words.

Pure functions; :mod:`pipelane.runtime.watch` feeds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = ["SLACK", "State", "Story", "chain", "first", "older", "report", "tell", "verdict"]

#: Seconds that others leave a rank to report itself, with its own stack, before they report it.
SLACK = 2.0
#: A story about all pipelines of a process.
EVERY = -1


@dataclass(frozen=True)
class State:
    """What a rank is doing.

    Attributes:
        rank: who.
        what: "run" (its own work), "wait" (for a peer), "idle" (outside of pipeline calls) or
            "ended".
        text: the same for people, such as "instruction 1F0 of step 3".
        peer: whom it waits for; -1 for all others.
        call: how many pipeline calls it has begun; ranks make the same calls in the same order.
        age: seconds since it began.
        allowed: seconds that it may take.
        heard: seconds since the rank last said so.
        debugging: whether a debugger is attached.
    """

    rank: int
    what: str
    text: str
    peer: int = -1
    call: int = 0
    age: float = 0.0
    allowed: float = float("inf")
    heard: float = 0.0
    debugging: bool = False


@dataclass(frozen=True)
class Story:
    """A failure, as one rank tells it.

    Attributes:
        when: seconds since the epoch on the clock of the rank that tells it.
        rank: who failed.
        headline: one sentence: rank, host, stage, micro-batch, instruction and the reason.
        instruction: what the rank that failed was doing.
        trace: traceback, or where the rank was stuck; may be empty.
        pipeline: number of the pipeline that it ends, or -1 for all of them.
    """

    when: float
    rank: int
    headline: str
    instruction: str
    trace: str = ""
    pipeline: int = EVERY

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def about(self, pipeline: int) -> bool:
        return self.pipeline in (EVERY, pipeline)


def first(stories: Sequence[Story]) -> Story:
    """The one that counts; the same on every rank that knows the same stories."""
    return min(stories, key=lambda story: (story.when, story.rank, story.headline))


def tell(story: Story, doing: Mapping[int, str]) -> str:
    """The message that every rank raises."""
    lines = [story.headline]
    if doing:
        lines.append("What the ranks were doing:")
        lines += [f"  rank {rank}: {doing[rank]}" for rank in sorted(doing)]
    if story.trace:
        lines.append(f"On rank {story.rank}:")
        lines += [f"  {line}" for line in story.trace.rstrip().splitlines()]
    return "\n".join(lines)


def chain(states: Mapping[int, State], start: int) -> list[int]:
    """From a rank to whom it waits for, to whom that one waits for ...; a repeated rank ends it."""
    found = [start]
    while True:
        state = states[found[-1]]
        if state.what != "wait":
            return found
        following = state.peer
        if following < 0:  # all must come: the lowest that has not
            behind = [s.rank for s in states.values() if s.call < state.call]
            if not behind:
                return found
            following = min(behind)
        if following not in states:
            return found
        repeated = following in found
        found.append(following)
        if repeated:
            return found


def verdict(states: Mapping[int, State], me: int, timeout: float) -> tuple[int, str] | None:
    """Who holds up all others, and why; None while there is no reason to give up.

    Args:
        states: of all ranks.
        me: the rank that judges. It knows itself at once, and others a little later, so that a
            rank that can speak for itself is the first to.
        timeout: seconds that a wait may take, unless who is waited for has reason to take longer.
    """
    if any(state.debugging for state in states.values()):
        return None
    if all(state.what in ("idle", "ended") for state in states.values()):
        return None
    for state in states.values():
        slack = 0.0 if state.rank == me else SLACK
        if state.what != "ended" and state.heard > timeout + SLACK:
            return state.rank, (
                f"has not given a sign of life for {state.heard:.0f} s (timeout {timeout:g} s): "
                "it is stopped (SIGSTOP), swapped out, cut off from the network, or in native code "
                "that does not let Python run"
            )
        if state.what == "run" and state.age > state.allowed + slack:
            return state.rank, (
                f"is in {state.text} for {state.age:.1f} s, allowed are {state.allowed:.1f} s "
                f"(timeout {timeout:g} s after the slowest so far); if it may take that long, give "
                "Pipeline a longer timeout="
            )
    for state in states.values():
        if state.what != "wait":
            continue
        way = chain(states, state.rank)
        last = states[way[-1]]
        slack = 0.0 if last.rank == me else SLACK
        if last.what == "ended" and last.call < state.call:
            return last.rank, f"ended its script while rank {state.rank} was in {state.text}"
        if state.age <= timeout + slack:
            continue
        if last.what == "idle" and last.call < state.call and last.age > last.allowed + slack:
            return last.rank, (
                f"has been outside of the pipeline for {last.age:.1f} s, while rank {state.rank} "
                f"waits in {state.text} (timeout {timeout:g} s): does it skip a call that the "
                "others make? If it may take that long, give Pipeline a longer timeout="
            )
        if last.what == "wait" and all(states[rank].age > timeout + SLACK for rank in way):
            where = " -> ".join(f"rank {rank}" for rank in way)
            return min(way), (
                f"and others wait for each other (timeout {timeout:g} s): {where}. The programs of "
                "the ranks do not match, or a message was lost"
            )
        if last.what == "idle" and last.call >= state.call and state.age > 2 * timeout + SLACK:
            return state.rank, (
                f"waits in {state.text} for {state.age:.1f} s, but rank {last.rank}, for which it "
                "waits, has finished that call: the programs of the ranks do not match, or a "
                "message was lost"
            )
    return None


def report(states: Mapping[int, State]) -> str:
    """All ranks, since when, and who holds up whom; for ``pipelane status``."""
    lines = []
    for rank in sorted(states):
        state = states[rank]
        quiet = f" (last heard of {state.heard:.1f} s ago)" if state.heard > SLACK else ""
        debugger = " (debugger attached)" if state.debugging else ""
        lines.append(f"rank {rank}: {state.text}, since {state.age:.1f} s{quiet}{debugger}")
    waiting = [state for state in states.values() if state.what == "wait"]
    if waiting:
        slowest = max(waiting, key=lambda state: state.age)
        way = chain(states, slowest.rank)
        last = states[way[-1]]
        lines.append("waits: " + " -> ".join(f"rank {rank}" for rank in way))
        if len(way) > len(set(way)):
            lines.append("cause: these ranks wait for each other; their programs do not match")
        elif last.what == "wait":
            lines.append(f"cause: rank {last.rank} waits for data that nobody owes it")
        else:
            why = {
                "run": f"is computing: {last.text}",
                "idle": "is outside of the pipeline, in its own script",
                "ended": "has ended",
            }[last.what]
            if last.what != "ended" and last.heard > SLACK:
                why = "gives no sign of life"
            lines.append(f"cause: rank {last.rank} {why}")
    return "\n".join(lines)


def older(state: State, seconds: float) -> State:
    """The same, some time later."""
    return replace(state, age=state.age + seconds, heard=state.heard + seconds)
