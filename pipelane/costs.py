"""What actions and messages cost: seconds and bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipelane.actions import Kind
from pipelane.errors import ConfigError

__all__ = ["Costs", "Link"]


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
        weight_grad: seconds of W; a whole backward B takes ``input_grad + weight_grad``.
        boundary_bytes: bytes sent from stage s to s + 1 (the gradient back has the same size);
            one entry per boundary, ``stages - 1`` in all; empty means 0.
        activation_bytes: bytes held from F to B or I, per stage; empty means 0.
        weight_grad_bytes: bytes of these held on from I to W; empty means all of them.
        link: the connection between any two ranks.
        links: exceptions to it, by (sender rank, receiver rank).
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    boundary_bytes: tuple[float, ...] = ()
    activation_bytes: tuple[float, ...] = ()
    weight_grad_bytes: tuple[float, ...] = ()
    link: Link = field(default_factory=Link)
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)

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
        }
        for name, length in expected.items():
            values: Sequence[float] = getattr(self, name)
            optional = name.endswith("_bytes")
            if len(values) != length and not (optional and not values):
                raise ConfigError(f"costs.{name} has {len(values)} entries, expected {length}")
            for index, value in enumerate(values):
                if not (math.isfinite(value) and value >= 0):
                    raise ConfigError(f"costs.{name}[{index}] must be finite and >= 0, got {value}")

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

    @property
    def stages(self) -> int:
        return len(self.forward)

    def backward(self, stage: int) -> float:
        """Seconds of a whole backward, I and W together."""
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

    def link_between(self, sender: int, receiver: int) -> Link:
        return self.links.get((sender, receiver), self.link)
