"""The alphabet of a pipeline: one action is one thing that one stage does for one micro-batch.

Text form (the one torch.distributed.pipelining prints and reads): ``2F3`` is stage 2, forward,
micro-batch 3; ``1SEND_F0`` sends the output of stage 1; ``2RECV_F0`` receives the input of
stage 2; ``(4F0;3B1)OVERLAP_F_B`` is a forward and a backward that run as one overlapped action.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from pipelane.errors import ScheduleError

__all__ = ["COMMUNICATION", "COMPUTE", "Action", "Kind", "parse_action"]


class Kind(str, Enum):
    """What an action does."""

    F = "F"  #: forward
    B = "B"  #: whole backward (input and weight gradient)
    I = "I"  # noqa: E741  #: input gradient
    W = "W"  #: weight gradient
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE_GRAD = "REDUCE_GRAD"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    OVERLAP = "OVERLAP_F_B"  #: a forward and a backward as one action

    # Enum hashes by name through a Python method; kinds are dictionary keys on hot paths.
    __hash__ = str.__hash__

    def __str__(self) -> str:
        return self.value

    @property
    def is_compute(self) -> bool:
        return self in COMPUTE

    @property
    def is_send(self) -> bool:
        return self is Kind.SEND_F or self is Kind.SEND_B

    @property
    def is_receive(self) -> bool:
        return self is Kind.RECV_F or self is Kind.RECV_B


# For loops over whole programs, where a property is too slow.
COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP})
COMMUNICATION = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})
_PER_STAGE = frozenset({Kind.REDUCE_GRAD, Kind.UNSHARD, Kind.RESHARD})


class Action(NamedTuple):
    """One action. ``microbatch`` is -1 for kinds that concern a whole stage (``UNSHARD`` ...).

    ``parts`` is empty but for ``OVERLAP``, whose ``stage`` and ``microbatch`` are -1.
    """

    kind: Kind
    stage: int
    microbatch: int = -1
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind.value}"
        number = "" if self.kind in _PER_STAGE else self.microbatch
        return f"{self.stage}{self.kind.value}{number}"

    def flat(self) -> Iterator[Action]:
        """The action itself, or its parts if it is an overlapped pair."""
        if self.parts:
            yield from self.parts
        else:
            yield self


_SINGLE = re.compile(
    r"(\d{1,9})(SEND_F|RECV_F|SEND_B|RECV_B|REDUCE_GRAD|UNSHARD|RESHARD|F|B|I|W)(\d{0,9})",
    re.ASCII,
)
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_HINT = "expected STAGE KIND MICROBATCH such as 2F3, 0B1 or 1SEND_F0"


def parse_action(text: str) -> Action:
    """Read an action from its text form; the reverse of ``str(action)``.

    Raises:
        ScheduleError: the text is not an action.
    """
    text = text.strip()
    if match := _SINGLE.fullmatch(text):
        stage, kind, number = match.groups()
        if (Kind(kind) in _PER_STAGE) == bool(number):
            need = "takes no" if number else "needs a"
            raise ScheduleError(f"bad action {text!r}: {kind} {need} micro-batch number; {_HINT}")
        return Action(Kind(kind), int(stage), int(number) if number else -1)
    if match := _OVERLAP.fullmatch(text):
        parts = tuple(parse_action(part) for part in match.group(1).split(";"))
        kinds = [part.kind for part in parts]
        if len(parts) != 2 or kinds[0] is not Kind.F or kinds[1] not in (Kind.B, Kind.I):
            raise ScheduleError(
                f"bad action {text!r}: an overlapped pair is one forward and one backward, "
                "such as (4F0;3B1)OVERLAP_F_B"
            )
        return Action(Kind.OVERLAP, -1, -1, parts)
    raise ScheduleError(f"bad action {text!r}: {_HINT}")
