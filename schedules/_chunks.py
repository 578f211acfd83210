"""What a schedule says about chunks per rank, and how it is cut to fewer micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pipelane.actions import Action
from pipelane.errors import ScheduleError
from pipelane.schedule import Shape

Generator = TypeVar("Generator", bound=Callable[..., object])


def default_chunks(chunks: int) -> Callable[[Generator], Generator]:
    """Mark a schedule with the chunks per rank that it takes if none are asked for."""

    def mark(generator: Generator) -> Generator:
        generator.default_chunks = chunks  # type: ignore[attr-defined]
        return generator

    return mark


def require_chunks(name: str, shape: Shape, chunks: int) -> None:
    """Raise ScheduleError unless each rank has exactly so many stages."""
    if shape.chunks != chunks:
        word = "one chunk" if chunks == 1 else f"{chunks} chunks"
        raise ScheduleError(
            f"{name} has {word} per rank, got chunks={shape.chunks}; use chunks={chunks} "
            "(every p >= 1 and m >= 1 works)"
        )


def cut(order: list[Action], microbatches: int) -> list[Action]:
    """Leave out what belongs to further micro-batches; half a pair becomes a plain action."""
    kept = []
    for action in order:
        whole = list(action.flat())
        parts = [part for part in whole if part.microbatch < microbatches]
        if len(parts) == len(whole):
            kept.append(action)
        else:
            kept += parts
    return kept
