"""Names to schedules, through the entry-point group ``pipelane.schedules``.

pipelane's own schedules are found in the same way as those of any other distribution.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from pipelane.errors import PipelaneError, ScheduleError
from pipelane.schedule import Schedule, Shape

if TYPE_CHECKING:
    from pipelane.costs import Costs

__all__ = [
    "GROUP",
    "build_schedule",
    "default_chunks",
    "load_generator",
    "schedule_names",
    "takes",
]

GROUP = "pipelane.schedules"


@lru_cache(maxsize=1)
def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in sorted(entry_points(group=GROUP), key=lambda e: e.name)}


def schedule_names() -> list[str]:
    """The names of all installed schedules, sorted."""
    return list(_registered())


def load_generator(name: str) -> Callable[..., Schedule]:
    """The function registered under ``name``.

    Raises:
        ScheduleError: no such schedule, or its plug-in cannot be imported.
    """
    point = _registered().get(name.lower())
    if point is None:
        known = ", ".join(schedule_names()) or "none: reinstall torch-pipelane"
        raise ScheduleError(f"unknown schedule {name!r}; installed schedules: {known}")
    try:
        generator: Callable[..., Schedule] = point.load()
    except Exception as error:
        raise ScheduleError(
            f"schedule {name!r} ({point.value}) cannot be loaded: {error}"
        ) from error
    return generator


def build_schedule(
    name: str | Callable[..., Schedule],
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    costs: Costs | None = None,
    memory: Any = None,
) -> Schedule:
    """Build a schedule by name, or with a function ``(shape[, costs, memory]) -> Schedule``.

    Args:
        name: a name from :func:`schedule_names`, or a function.
        ranks: p, at least 1.
        microbatches: m, at least 1.
        chunks: v, stages per rank; if not given, as many as the costs have stages, else what the
            schedule takes by default (its attribute ``default_chunks``, 1 without).
        costs: per-stage costs, for schedules that depend on them.
        memory: bytes per rank that activations may take, for schedules that depend on it.

    Raises:
        ScheduleError: unknown name, impossible sizes, or the function failed or returned
            something else.
    """
    generator = load_generator(name) if isinstance(name, str) else name
    if chunks is None:
        chunks = default_chunks(generator)
        if costs is not None and Shape(ranks, 1) and costs.stages % ranks == 0:
            chunks = costs.stages // ranks
    shape = Shape(ranks, microbatches, chunks)
    label = name if isinstance(name, str) else getattr(name, "__name__", repr(name))
    if not callable(generator):
        raise ScheduleError(f"a schedule is a name or a function of a Shape, got {label}")
    optional = {"costs": costs, "memory": memory}
    try:
        schedule = generator(shape, **{key: optional[key] for key in _wanted(generator, optional)})
    except PipelaneError:
        raise
    except Exception as error:
        raise ScheduleError(
            f"schedule {label!r} failed for {shape}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            f"schedule {label!r} returned {type(schedule).__name__}, expected pipelane.Schedule"
        )
    if schedule.shape != shape:
        raise ScheduleError(f"schedule {label!r} was asked for {shape} and made {schedule.shape}")
    return schedule


def default_chunks(name: str | Callable[..., Schedule]) -> int:
    """The chunks per rank that a schedule takes if none are asked for."""
    generator = load_generator(name) if isinstance(name, str) else name
    return int(getattr(generator, "default_chunks", 1))


def takes(name: str | Callable[..., Schedule], *arguments: str) -> bool:
    """Whether a schedule is made for any of these: "costs", or "memory"."""
    generator = load_generator(name) if isinstance(name, str) else name
    return bool(_wanted(generator, arguments))


def _wanted(generator: Callable[..., Schedule], optional: Iterable[str]) -> list[str]:
    """Those of the optional arguments that the function takes."""
    try:
        parameters = inspect.signature(generator).parameters
    except ValueError:  # a callable written in C may not tell
        return []
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return [name for name in optional if any_keyword or name in parameters]
