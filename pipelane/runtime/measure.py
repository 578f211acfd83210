"""From every rank's clock readings to one timeline."""

from __future__ import annotations

import socket
from time import perf_counter
from typing import Any

import torch

from pipelane.actions import Action
from pipelane.runtime.group import Ranks
from pipelane.timeline import Span, Timeline

__all__ = ["gather_timeline"]

_CLOCK_TAG = 3
_ROUNDS = 8


def gather_timeline(
    ranks: Ranks,
    spans: list[tuple[Action, float, float]],
    name: str,
    placement: tuple[int, ...],
    microbatches: int,
) -> Timeline:
    """Put the spans of all ranks on rank 0's clock; every rank must call it.

    Ranks on one host share the monotonic clock. For others the offset is taken from the quickest
    of a few round trips with rank 0 (as NTP does), so it is off by at most half of that trip.
    """
    hosts = ranks.gather(socket.gethostname())
    offset = 0.0
    for peer in range(1, ranks.size):
        if hosts[peer] != hosts[0] and ranks.rank in (0, peer):
            measured = _clock_offset(ranks, peer)
            offset = measured if ranks.rank == peer else offset
    rows: list[Any] = ranks.gather([(a, start - offset, end - offset) for a, start, end in spans])
    origin = min((row[0][1] for row in rows if row), default=0.0)
    return Timeline(
        name,
        placement,
        microbatches,
        tuple(tuple(Span(a, s - origin, e - origin) for a, s, e in row) for row in rows),
        measured=True,
    )


def _clock_offset(ranks: Ranks, peer: int) -> float:
    """How far the peer's clock is ahead of rank 0's, seconds; both call it."""
    best, offset = float("inf"), 0.0
    reading = torch.zeros(1, dtype=torch.float64)
    for _ in range(_ROUNDS):
        if ranks.rank == 0:
            ranks.receive(reading, peer, _CLOCK_TAG, "a clock reading")
            answer = torch.tensor([perf_counter()], dtype=torch.float64)
            ranks.send(answer, peer, _CLOCK_TAG, "a clock reading")
            continue
        asked = perf_counter()
        ranks.send(torch.zeros(1, dtype=torch.float64), 0, _CLOCK_TAG, "a clock reading")
        ranks.receive(reading, 0, _CLOCK_TAG, "a clock reading")
        answered = perf_counter()
        if answered - asked < best:
            best = answered - asked
            offset = (asked + answered) / 2 - reading.item()
    return offset
