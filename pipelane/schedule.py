"""What a schedule is: where each stage lives, and in which order each rank computes.

A schedule holds compute actions only. :mod:`pipelane.program` adds the communication,
:mod:`pipelane.check` decides whether it is valid. ``p`` ranks, ``m`` micro-batches and ``v``
chunks per rank give ``S = p * v`` stages.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelane.actions import Action, Kind, parse_action
from pipelane.errors import ScheduleError

__all__ = [
    "Schedule",
    "Shape",
    "looped_placement",
    "schedule_from_csv",
    "schedule_from_json",
    "snake_placement",
]


@dataclass(frozen=True)
class Shape:
    """The sizes of a pipeline: ``ranks`` (p), ``microbatches`` (m), ``chunks`` per rank (v)."""

    ranks: int
    microbatches: int
    chunks: int = 1

    def __post_init__(self) -> None:
        for name in ("ranks", "microbatches", "chunks"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ScheduleError(f"{name} must be a whole number, got {value!r}")
            if value < 1:
                raise ScheduleError(f"{name} must be at least 1, got {value}")

    @property
    def stages(self) -> int:
        """S = p * v."""
        return self.ranks * self.chunks


def looped_placement(shape: Shape) -> tuple[int, ...]:
    """Stage s on rank s mod p."""
    return tuple(stage % shape.ranks for stage in range(shape.stages))


def snake_placement(shape: Shape) -> tuple[int, ...]:
    """Down the ranks and up again: with two chunks a V, whose ends are both on rank 0."""
    p = shape.ranks
    return tuple(p - 1 - s % p if (s // p) % 2 else s % p for s in range(shape.stages))


@dataclass(frozen=True)
class Schedule:
    """Per rank, the order of its compute actions.

    Lists are taken as well as tuples. Nothing is checked here, see :func:`pipelane.check.check`.

    Attributes:
        name: what it is called in tables and messages.
        shape: ranks, micro-batches and chunks per rank.
        placement: ``placement[stage]`` is the rank that holds the stage.
        orders: ``orders[rank]`` lists the rank's compute actions, first to last.
    """

    name: str
    shape: Shape
    placement: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        # Equality and hashing need tuples; a function that makes a schedule may well use lists.
        object.__setattr__(self, "placement", tuple(self.placement))
        object.__setattr__(self, "orders", tuple(tuple(order) for order in self.orders))

    @classmethod
    def looped(cls, name: str, shape: Shape, orders: Iterable[Iterable[Action]]) -> Schedule:
        """A schedule whose stage s lives on rank s mod p (the usual placement)."""
        return cls(name, shape, looped_placement(shape), tuple(tuple(order) for order in orders))

    @property
    def splits_backward(self) -> bool:
        """Whether input gradient (I) and weight gradient (W) are separate actions."""
        return any(a.kind in (Kind.I, Kind.W) for o in self.orders for x in o for a in x.flat())

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that live on ``rank``, ascending."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def forward_only(self, microbatches: int | None = None) -> Schedule:
        """The same placement without any backward, for evaluation.

        Micro-batches go in groups of ``ranks``; each rank runs a whole group through one of its
        stages before the next stage, so that no rank waits for a micro-batch to come round.
        ``microbatches`` may be another number than this schedule's.
        """
        p, m = self.shape.ranks, self.shape.microbatches
        shape = Shape(p, m if microbatches is None else microbatches, self.shape.chunks)
        m = shape.microbatches
        own: list[list[int]] = [[] for _ in range(p)]
        for stage, rank in enumerate(self.placement):
            own[rank].append(stage)
        orders = tuple(
            tuple(
                Action(Kind.F, stage, i)
                for first in range(0, m, p)
                for stage in stages
                for i in range(first, min(first + p, m))
            )
            for stages in own
        )
        return Schedule(f"{self.name} (forward only)", shape, self.placement, orders)

    def to_csv(self) -> str:
        """One row per rank, one cell per compute action, as torch's schedules are written."""
        return rows_to_csv(self.orders)

    def to_json(self) -> str:
        """A JSON object with ``name``, sizes, ``placement`` and ``orders`` (action strings)."""
        return json.dumps(
            {
                "name": self.name,
                "ranks": self.shape.ranks,
                "microbatches": self.shape.microbatches,
                "chunks": self.shape.chunks,
                "placement": list(self.placement),
                "orders": [[str(action) for action in order] for order in self.orders],
            }
        )


def rows_to_csv(rows: Sequence[Sequence[Action]]) -> str:
    """Rows of actions as CSV text."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([[str(a) for a in row] for row in rows])
    return out.getvalue()


def read_rows(path: Path) -> list[list[str]]:
    """The cells of a CSV file, a row per rank, without empty lines at the end.

    Raises:
        ScheduleError: the file cannot be read.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets write a BOM
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(f"cannot read the schedule {path}: {error}") from error
    while rows and not rows[-1]:
        rows.pop()
    return rows


def schedule_from_csv(source: str | Path, *, name: str | None = None) -> Schedule:
    """Read a schedule from a CSV file, one row per rank.

    Accepts torch.distributed.pipelining's files in both of its forms: compute actions only, with
    empty cells where a rank idles, or with communication actions, which are dropped here because
    pipelane derives its own. Sizes and placement follow from the actions. Empty lines at the end
    do not count.

    Raises:
        ScheduleError: the file cannot be read, or a cell is not an action, or a stage is on two
            ranks; the message names file, row and column.
    """
    path = Path(source)
    return schedule_from_rows(read_rows(path), name=name or path.stem, where=str(path))


def schedule_from_rows(
    rows: Sequence[Sequence[str]], *, name: str, where: str = "schedule"
) -> Schedule:
    """Build a schedule from rows of action strings; sizes and placement follow from them."""
    orders: list[tuple[Action, ...]] = []
    owner: dict[int, int] = {}
    microbatches = 0
    for rank, row in enumerate(rows):
        order: list[Action] = []
        for column, cell in enumerate(row):
            if not cell.strip():
                continue
            try:
                action = parse_action(cell)
            except ScheduleError as error:
                raise ScheduleError(
                    f"{where}, row {rank + 1}, cell {column + 1}: {error}"
                ) from None
            if not action.kind.is_compute:
                continue
            for part in action.flat():
                if owner.setdefault(part.stage, rank) != rank:
                    raise ScheduleError(
                        f"{where}, row {rank + 1}, cell {column + 1}: stage {part.stage} is also "
                        f"on rank {owner[part.stage]}; a stage lives on exactly one rank"
                    )
                microbatches = max(microbatches, part.microbatch + 1)
            order.append(action)
        orders.append(tuple(order))
    if not owner:
        raise ScheduleError(f"{where}: no compute action found; expected one row per rank")
    ranks, stages = len(orders), max(owner) + 1
    if len(owner) < stages:
        missing = next(stage for stage in range(stages) if stage not in owner)
        raise ScheduleError(f"{where}: stage {missing} appears on no rank")
    if stages % ranks:
        raise ScheduleError(
            f"{where}: {stages} stages on {ranks} ranks; every rank must hold the same number"
        )
    shape = Shape(ranks, microbatches, stages // ranks)
    return Schedule(name, shape, tuple(owner[s] for s in range(stages)), tuple(orders))


def schedule_from_json(text: str) -> Schedule:
    """Read what :meth:`Schedule.to_json` wrote.

    Raises:
        ScheduleError: the text is not such an object.
    """
    try:
        data = json.loads(text)
        shape = Shape(data["ranks"], data["microbatches"], data["chunks"])
        orders = tuple(tuple(parse_action(cell) for cell in row) for row in data["orders"])
        placement = tuple(data["placement"])
        if not all(type(rank) is int for rank in placement):
            raise ScheduleError(f"not a schedule in JSON: placement {placement} is not all ranks")
        return Schedule(str(data["name"]), shape, placement, orders)
    except ScheduleError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ScheduleError(f"not a schedule in JSON: {error!r}") from error
