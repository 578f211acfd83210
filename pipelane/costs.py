"""What actions and messages cost: seconds and bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from pipelane.actions import Kind
from pipelane.errors import ConfigError
from pipelane.files import json_object

__all__ = ["Costs", "Link"]

SCHEMA = 1
_KIND = "pipelane.costs"
_LISTS = (
    "forward", "input_grad", "weight_grad", "boundary_bytes", "activation_bytes",
    "weight_grad_bytes", "whole_backward",
)  # fmt: skip
_OPTIONAL = _LISTS[3:]


@dataclass(frozen=True)
class Link:
    """A directed connection: a message takes ``latency + bytes / bandwidth`` seconds.

    Messages on one link follow each other: the link is taken for ``bytes / bandwidth``.

    Attributes:
        latency: seconds.
        bandwidth: bytes per second.
    """

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise ConfigError(f"link latency must be finite and >= 0 s, got {self.latency}")
        if not self.bandwidth > 0:
            raise ConfigError(f"link bandwidth must be > 0 bytes/s, got {self.bandwidth}")


@dataclass(frozen=True)
class Costs:
    """Costs of one micro-batch, per stage.

    Attributes:
        forward: seconds of F, one entry per stage.
        input_grad: seconds of I.
        weight_grad: seconds of W.
        boundary_bytes: bytes sent from stage s to s + 1 (the gradient back has the same size);
            one entry per boundary, ``stages - 1`` in all; empty means 0.
        activation_bytes: bytes held from F to B or I, per stage; empty means 0.
        weight_grad_bytes: bytes of these held on from I to W; empty means all of them.
        whole_backward: seconds of a whole backward B, which may be less than its two halves apart;
            empty means ``input_grad + weight_grad``.
        link: the connection between any two ranks.
        links: exceptions to it, by (sender rank, receiver rank).
        skip_bytes: pairs ((stage, later stage), bytes) of what goes straight between stages that
            are no neighbours.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    boundary_bytes: tuple[float, ...] = ()
    activation_bytes: tuple[float, ...] = ()
    weight_grad_bytes: tuple[float, ...] = ()
    whole_backward: tuple[float, ...] = ()
    link: Link = field(default_factory=Link)
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    skip_bytes: tuple[tuple[tuple[int, int], float], ...] = ()

    def __post_init__(self) -> None:
        stages = len(self.forward)
        if stages < 1:
            raise ConfigError("costs need at least one stage")
        expected = {
            "forward": stages,
            "input_grad": stages,
            "weight_grad": stages,
            "boundary_bytes": stages - 1,
            "activation_bytes": stages,
            "weight_grad_bytes": stages,
            "whole_backward": stages,
        }
        for name, length in expected.items():
            values: Sequence[float] = getattr(self, name)
            optional = name in _OPTIONAL
            if len(values) != length and not (optional and not values):
                raise ConfigError(f"costs.{name} has {len(values)} entries, expected {length}")
            for index, value in enumerate(values):
                if not (math.isfinite(value) and value >= 0):
                    raise ConfigError(f"costs.{name}[{index}] must be finite and >= 0, got {value}")
        for (a, b), size in self.skip_bytes:
            if not (a >= 0 and a + 1 < b < stages and math.isfinite(size) and size >= 0):
                raise ConfigError(
                    f"costs.skip_bytes: {size} bytes from stage {a} to stage {b}; expected a "
                    f"number >= 0 and two of {stages} stages that are no neighbours"
                )

    @classmethod
    def unit(
        cls,
        stages: int,
        *,
        forward: float = 1.0,
        input_grad: float = 1.0,
        weight_grad: float = 1.0,
        latency: float = 0.0,
    ) -> Costs:
        """Equal stages; F = I = W = 1 s and free communication unless given."""
        if stages < 1:
            raise ConfigError(f"stages must be at least 1, got {stages}")
        return cls(
            (forward,) * stages,
            (input_grad,) * stages,
            (weight_grad,) * stages,
            link=Link(latency),
        )

    def split(self, placement: Sequence[int]) -> Costs:
        """Costs of one stage per rank, for several stages per rank, as if layers were alike.

        Each stage of a rank takes an equal share of it. What crosses a boundary between two
        neighbouring ranks keeps its size; between others it is as large as the largest.

        Args:
            placement: the rank of each stage, on as many ranks as there are stages here.

        Raises:
            ConfigError: a placement on another number of ranks.
        """
        if self.skip_bytes:
            raise ConfigError("costs with skips are of these very stages and cannot be split up")
        if set(placement) != set(range(self.stages)):
            raise ConfigError(
                f"costs are for {self.stages} stages, one per rank, and the placement "
                f"{list(placement)} is on other ranks"
            )
        count = [list(placement).count(rank) for rank in range(self.stages)]

        def shared(values: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(values[rank] / count[rank] for rank in placement) if values else ()

        boundary = []
        for a, b in pairwise(placement) if self.boundary_bytes else ():
            near = abs(a - b) == 1
            boundary.append(self.boundary_bytes[min(a, b)] if near else max(self.boundary_bytes))
        return replace(
            self,
            forward=shared(self.forward),
            input_grad=shared(self.input_grad),
            weight_grad=shared(self.weight_grad),
            boundary_bytes=tuple(boundary),
            activation_bytes=shared(self.activation_bytes),
            weight_grad_bytes=shared(self.weight_grad_bytes),
            whole_backward=shared(self.whole_backward),
        )

    def to_json(self) -> str:
        """A JSON object; the reverse of :meth:`from_json`."""

        def link(one: Link) -> dict[str, float | None]:
            unlimited = one.bandwidth == math.inf
            return {"latency": one.latency, "bandwidth": None if unlimited else one.bandwidth}

        data: dict[str, object] = {"kind": _KIND, "schema": SCHEMA}
        data |= {name: list(getattr(self, name)) for name in _LISTS}
        data["link"] = link(self.link)
        data["links"] = [
            {"from": sender, "to": receiver, **link(one)}
            for (sender, receiver), one in self.links.items()
        ]
        if self.skip_bytes:
            data["skip_bytes"] = [[a, b, size] for (a, b), size in self.skip_bytes]
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str, where: str = "costs") -> Costs:
        """Read costs: ``forward``, ``input_grad`` and ``weight_grad`` as lists of seconds.

        All else may be left out: ``boundary_bytes``, ``activation_bytes``,
        ``weight_grad_bytes``, ``whole_backward``, ``link`` (an object with ``latency`` and
        ``bandwidth``), ``links`` (a list of such with ``from`` and ``to``) and ``skip_bytes`` (a
        list of [stage, later stage, bytes]).

        Args:
            text: the JSON object.
            where: what to call it in messages, such as its file.

        Raises:
            ConfigError: not such an object; names what is wrong.
        """
        data = json_object(text, where)
        known = {"kind", "schema", "link", "links", "skip_bytes", *_LISTS}
        unknown = [key for key in data if key not in known]
        if unknown or data.get("kind", _KIND) != _KIND or data.get("schema", 1) != SCHEMA:
            raise ConfigError(
                f"{where}: not costs that this version reads"
                + (f", unknown {unknown[0]!r}" if unknown else "")
            )
        try:
            lists = {
                name: tuple(float(value) for value in data[name])
                for name in _LISTS
                if name in data or name not in _OPTIONAL
            }
            links = {
                (int(entry["from"]), int(entry["to"])): _link(entry)
                for entry in data.get("links", ())
            }
            skips = tuple(
                ((int(a), int(b)), float(size)) for a, b, size in data.get("skip_bytes", ())
            )
            link = _link(data.get("link", {}))
            return cls(**lists, link=link, links=links, skip_bytes=skips)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{where}: not costs in JSON: {error!r}") from error

    @property
    def stages(self) -> int:
        return len(self.forward)

    def backward(self, stage: int) -> float:
        """Seconds of a whole backward."""
        if self.whole_backward:
            return self.whole_backward[stage]
        return self.input_grad[stage] + self.weight_grad[stage]

    def seconds(self, kind: Kind, stage: int) -> float:
        """Seconds of a single compute action: F, B, I or W."""
        if kind is Kind.F:
            return self.forward[stage]
        if kind is Kind.B:
            return self.backward(stage)
        if kind is Kind.I:
            return self.input_grad[stage]
        if kind is Kind.W:
            return self.weight_grad[stage]
        raise ConfigError(f"costs know F, B, I and W, not {kind}")

    @property
    def held_bytes(self) -> tuple[float, ...]:
        """Bytes of a micro-batch from F to B or I, per stage."""
        return self.activation_bytes or (0.0,) * self.stages

    @property
    def kept_bytes(self) -> tuple[float, ...]:
        """Bytes of a micro-batch from I to W, per stage."""
        return self.weight_grad_bytes or self.held_bytes

    def link_between(self, sender: int, receiver: int) -> Link:
        return self.links.get((sender, receiver), self.link)

    def hop(self, placement: Sequence[int], stage: int, to: int) -> float:
        """Seconds of a message from a stage to a neighbour, 0 on one rank."""
        sender, receiver = placement[stage], placement[to]
        if sender == receiver:
            return 0.0
        link = self.link_between(sender, receiver)
        size = self.boundary_bytes[min(stage, to)] if self.boundary_bytes else 0.0
        return link.latency + size / link.bandwidth


def _link(entry: Mapping[str, float | None]) -> Link:
    bandwidth = entry.get("bandwidth")
    latency = entry.get("latency", 0.0)
    return Link(float(latency or 0.0), math.inf if bandwidth is None else float(bandwidth))
