"""What ran when: the common type of simulated and of measured steps."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelane.actions import Action, Kind, parse_action
from pipelane.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Message", "Span", "Timeline"]

SCHEMA = 1


class Span(NamedTuple):
    """A compute action with its start and end in seconds since the step's start."""

    action: Action
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Message(NamedTuple):
    """A tensor on its way: F or B of ``stage`` (the producer), from one rank to another."""

    kind: Kind
    stage: int
    microbatch: int
    sender: int
    receiver: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Per rank, the spans of its compute actions in time order.

    Two meters, both always worth a look: **makespan** is the end of the last action, counted from
    0; **span** is the widest rank's own window (last end - first start), which is what matters
    when steps follow each other without a barrier.

    Attributes:
        name: what was run, for titles.
        placement: stage -> rank.
        microbatches: m.
        spans: per rank, its compute actions.
        messages: point-to-point transfers, if known.
        measured: True if it ran, False if it was simulated.
        unit: "s" or "" for unit costs.
    """

    name: str
    placement: tuple[int, ...]
    microbatches: int
    spans: tuple[tuple[Span, ...], ...]
    messages: tuple[Message, ...] = ()
    measured: bool = False
    unit: str = "s"

    @property
    def ranks(self) -> int:
        return len(self.spans)

    @cached_property
    def makespan(self) -> float:
        """Seconds from 0 to the end of the last action."""
        return max((row[-1].end for row in self.spans if row), default=0.0)

    @cached_property
    def windows(self) -> tuple[float, ...]:
        """Per rank, seconds from its first start to its last end."""
        return tuple(row[-1].end - row[0].start if row else 0.0 for row in self.spans)

    @property
    def span(self) -> float:
        """The widest rank's window, seconds."""
        return max(self.windows, default=0.0)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Per rank, seconds spent computing."""
        return tuple(sum(s.end - s.start for s in row) for row in self.spans)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Per rank, seconds idle within its own window."""
        return tuple(w - b for w, b in zip(self.windows, self.work, strict=True))

    @property
    def utilisation(self) -> tuple[float, ...]:
        """Per rank, work / makespan."""
        return tuple(w / self.makespan if self.makespan else 0.0 for w in self.work)

    @property
    def bubble_rate(self) -> float:
        """(span - work) / span of the widest rank; the Zero Bubble papers' bubble rate."""
        if not self.spans or not self.span:
            return 0.0
        widest = self.windows.index(self.span)
        return (self.span - self.work[widest]) / self.span

    @property
    def bubble_fraction(self) -> float:
        """(makespan - max work) / max work; GPipe's and Megatron-LM's bubble fraction."""
        most = max(self.work, default=0.0)
        return (self.makespan - most) / most if most else 0.0

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """Per rank, the most chunks of activations alive at once."""
        from pipelane.check import peak_activations

        return peak_activations([[s.action for s in row] for row in self.spans])

    def to_json(self) -> str:
        """A JSON object with a schema number; the reverse of :meth:`from_json`."""
        return json.dumps(
            {
                "schema": SCHEMA,
                "kind": "pipelane.timeline",
                "name": self.name,
                "placement": list(self.placement),
                "microbatches": self.microbatches,
                "measured": self.measured,
                "unit": self.unit,
                "spans": [[[str(s.action), s.start, s.end] for s in row] for row in self.spans],
                "messages": [[m.kind.value, *m[1:]] for m in self.messages],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Read what :meth:`to_json` wrote.

        Raises:
            ConfigError: not such an object, or written by a newer schema.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            if data["kind"] != "pipelane.timeline" or data["schema"] > SCHEMA:
                raise ConfigError(
                    f"not a timeline that this version reads: kind {data['kind']!r}, schema "
                    f"{data['schema']}; expected 'pipelane.timeline', schema <= {SCHEMA}"
                )
            return cls(
                name=data["name"],
                placement=tuple(data["placement"]),
                microbatches=data["microbatches"],
                spans=tuple(
                    tuple(Span(parse_action(a), float(s), float(e)) for a, s, e in row)
                    for row in data["spans"]
                ),
                messages=tuple(Message(Kind(k), *rest) for k, *rest in data["messages"]),
                measured=data["measured"],
                unit=data["unit"],
            )
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(f"not a timeline in JSON: {error!r}") from error

    def __rich__(self) -> RenderableType:
        from pipelane.views.terminal import TimelineView

        return TimelineView(self)

    def __str__(self) -> str:
        from pipelane.views.terminal import render_text

        return render_text(self)
