"""What the main thread is doing, where the watchdog and other processes can read it at any time.

Writing it costs one store per instruction. On the same host the other ranks map the same memory, so
that they know where a rank was that was killed without a word.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

__all__ = ["Activity", "Label", "Peek", "Silent", "label_of"]

_SLOTS = 4
_TABLE, _INDEX, _CALL, _STEP = range(_SLOTS)
IDLE = -1

Mark: TypeAlias = tuple[int, int, int, int]
"""Table, index, number of calls begun, step."""


class Label(NamedTuple):
    """One thing that a rank does.

    Attributes:
        what: "run" or "wait".
        text: for people.
        peer: whom it waits for, -1 for all.
    """

    what: str
    text: str
    peer: int = -1


class Activity:
    """Of this process.

    Attributes:
        marks: what to write to: ``marks[1] = index`` is the current entry of the current table.
        path: the file that other processes of this host may map; empty once they have.
    """

    def __init__(self) -> None:
        descriptor, self.path = tempfile.mkstemp(prefix="pipelane-")
        try:
            os.truncate(descriptor, mmap.PAGESIZE)
            self._memory = mmap.mmap(descriptor, mmap.PAGESIZE)
        finally:
            os.close(descriptor)
        self.marks = memoryview(self._memory).cast("q")
        self.marks[_TABLE] = IDLE

    def begin(self, table: int, step: int = -1) -> None:
        """A call begins whose entries are in a table; every rank makes the same calls in order."""
        marks = self.marks
        marks[_INDEX], marks[_STEP] = 0, step
        marks[_CALL] += 1
        marks[_TABLE] = table

    def end(self) -> None:
        self.marks[_TABLE] = IDLE

    def now(self) -> Mark:
        return _read(self.marks)

    def unlink(self) -> None:
        """Take the name away; who has mapped it goes on reading."""
        if self.path:
            os.unlink(self.path)
            self.path = ""


class Silent:
    """Of a process that is alone: nobody reads it."""

    def __init__(self) -> None:
        self.marks = [IDLE, 0, 0, 0]

    def begin(self, table: int, step: int = -1) -> None:
        """Nothing to tell."""

    def end(self) -> None:
        """Nothing to tell."""


class Peek:
    """Another process's activity on this host."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            self._memory = mmap.mmap(file.fileno(), mmap.PAGESIZE, access=mmap.ACCESS_READ)
        self._marks = memoryview(self._memory).cast("q")

    def now(self) -> Mark:
        return _read(self._marks)


def _read(marks: memoryview[int]) -> Mark:
    table, index, call, step = marks[:_SLOTS].tolist()
    return table, index, call, step


def label_of(tables: dict[int, Sequence[Label]], mark: Mark) -> tuple[Label, str]:
    """The entry that a mark means, and the text with its step."""
    table, index, _, step = mark
    if table == IDLE:
        return Label("idle", ""), "outside of the pipeline"
    entries = tables.get(table, ())
    if not 0 <= index < len(entries):
        entry = Label("wait", "the end of its step")
    else:
        entry = entries[index]
    return entry, entry.text if step < 0 else f"{entry.text} of step {step}"
