"""The two small messages of a step: what it works on (first stage to all), and its loss (last
stage to all)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipelane.errors import ConfigError, InputError
from pipelane.runtime.group import Ranks
from pipelane.runtime.transport import DTYPES, MAX_DIMS, Spec, decode_spec, encode_spec

__all__ = ["Header", "LossMessage", "exchange_header"]

_HEADER_TAG, _LOSS_TAG = 1, 2
_LENGTH = 4 + 2 + MAX_DIMS


class Header(NamedTuple):
    """What the rank of the first stage announces.

    Attributes:
        step: number of the step, to notice ranks that are out of step with each other.
        training: whether it is ``step`` or ``forward``.
        batch: spec of the whole batch; None if the batch was refused.
    """

    step: int
    training: bool
    batch: Spec | None


def exchange_header(
    ranks: Ranks, first: int, number: int, training: bool, own: Spec | None, refused: str | None
) -> Header:
    """Pass the header from the rank of the first stage along all ranks.

    It travels ahead of the data and each rank hands it on at once, so it costs the pipeline
    nothing but one small message per rank.

    Args:
        ranks: the pipeline's ranks.
        first: rank of the first stage.
        number: this rank's step number.
        training: what this rank was called for.
        own: spec of the batch, on ``first``.
        refused: why the batch cannot be used, on ``first``.

    Raises:
        InputError: the first rank refused its batch; raised on every rank, and the pipeline stays
            usable.
        ConfigError: the ranks are not in the same call.
        PipelineFailure: a peer failed.
    """
    place = (ranks.rank - first) % ranks.size
    numbers = torch.zeros(_LENGTH, dtype=torch.int64)
    if place == 0:
        shape = encode_spec(own) if own is not None else [0] * (2 + MAX_DIMS)
        numbers[:] = torch.tensor([number, training, own is not None, 0, *shape])
        if refused is not None and ranks.size > 1:
            ranks.leave_note(f"refused/{number}", refused)
    else:
        ranks.receive(numbers, (ranks.rank - 1) % ranks.size, _HEADER_TAG, "the step's header")
    if place < ranks.size - 1:
        ranks.send(numbers, (ranks.rank + 1) % ranks.size, _HEADER_TAG, "the step's header")
    step, is_training, accepted, _, *spec = numbers.tolist()
    if (step, bool(is_training)) != (number, training):
        error = ConfigError(
            f"rank {ranks.rank} is in {'step' if training else 'forward'} number {number}, but "
            f"rank {first} in {'step' if is_training else 'forward'} number {step}: every rank "
            "must call step and forward the same number of times, in the same order"
        )
        ranks.announce({"message": str(error), "rank": ranks.rank, "instruction": "header"})
        raise error
    if not accepted:
        raise InputError(refused if refused is not None else ranks.read_note(f"refused/{number}"))
    return Header(step, bool(is_training), decode_spec(spec))


class LossMessage:
    """The step's loss, from the rank of the last stage to all others."""

    def __init__(self, ranks: Ranks, source: int, device: torch.device) -> None:
        self._ranks, self._source, self._device = ranks, source, device
        self._buffer = torch.zeros(2, dtype=torch.float64)
        self._work: dist.Work | None = None

    def expect(self) -> None:
        """Post the receive, at the start of a step."""
        if self._ranks.rank != self._source:
            self._work = self._ranks.control.recv([self._buffer], self._source, _LOSS_TAG)

    def share(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of the weighted micro-batch losses, equal on every rank to the last bit."""
        ranks = self._ranks
        if ranks.rank == self._source:
            total = losses[0]
            for loss in losses[1:]:
                total = total + loss
            message = torch.tensor([total.item(), DTYPES.index(total.dtype)], dtype=torch.float64)
            for peer in range(ranks.size):
                if peer != ranks.rank:
                    ranks.send(message, peer, _LOSS_TAG, "the step's loss")
            return total
        assert self._work is not None
        ranks.finish(self._work, f"the receive of the step's loss from rank {self._source}")
        value, code = self._buffer.tolist()
        return torch.tensor(value, dtype=DTYPES[int(code)], device=self._device)
