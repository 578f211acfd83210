"""Shared by the families that know one chunk per rank only."""

from __future__ import annotations

from pipelane.errors import ScheduleError
from pipelane.schedule import Shape


def require_one_chunk(name: str, shape: Shape) -> None:
    """Raise ScheduleError unless the shape has one chunk per rank."""
    if shape.chunks != 1:
        raise ScheduleError(
            f"{name} has one chunk per rank, got chunks={shape.chunks}; use chunks=1 "
            "(every p >= 1 and m >= 1 works)"
        )
