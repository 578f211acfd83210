"""The small messages around a step: what the batch is, and what the loss was."""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipelane.errors import ConfigError, InputError
from pipelane.runtime.boundary import DTYPES, Boundary, Spec
from pipelane.runtime.group import Ranks
from pipelane.trees import Rows

__all__ = ["BatchKinds", "Header", "LossMessage", "exchange_header", "kind_of"]

_HEADER_TAG, _LOSS_TAG = 1, 2


class Header(NamedTuple):
    """What the rank of the first stage announces.

    Attributes:
        kind: number of the kind of batch; see :class:`BatchKinds`.
        rows: of the batch.
    """

    kind: int
    rows: int


class BatchKind(NamedTuple):
    """All about a batch on which shapes may depend, but its number of rows.

    Attributes:
        boundary: structure and tensors; of those that are split, the shape of one row.
        split: per tensor, whether it is split by rows.
    """

    boundary: Boundary
    split: tuple[bool, ...]

    def __str__(self) -> str:
        specs = [
            Spec((-1, *spec.shape), spec.dtype) if split else spec
            for spec, split in zip(self.boundary.specs, self.split, strict=True)
        ]
        return str(Boundary(self.boundary.structure, tuple(specs))).replace("[-1", "[rows")


def kind_of(batch: Rows) -> BatchKind:
    """The kind of a batch."""
    specs = [
        Spec(tuple(leaf.shape[1:] if split else leaf.shape), leaf.dtype, leaf.requires_grad)
        for leaf, split in zip(batch.leaves, batch.split, strict=True)
    ]
    return BatchKind(Boundary(batch.structure, tuple(specs)), tuple(batch.split))


class BatchKinds:
    """Numbers for kinds of batches, the same on all ranks: told once, with the first such batch."""

    def __init__(self) -> None:
        self._number: dict[Hashable, int] = {}
        self._kinds: list[BatchKind] = []

    def number(self, kind: BatchKind) -> tuple[int, bool]:
        """Its number, and whether it is new."""
        known = self._number.get(kind)
        if known is not None:
            return known, False
        return self.add(kind), True

    def add(self, kind: BatchKind) -> int:
        """Give it the next number."""
        self._number[kind] = len(self._kinds)
        self._kinds.append(kind)
        return len(self._kinds) - 1

    def __getitem__(self, number: int) -> BatchKind:
        return self._kinds[number]


def exchange_header(
    ranks: Ranks,
    first: int,
    number: int,
    training: bool,
    kinds: BatchKinds,
    own: Rows | None,
    refused: str | None,
) -> Header:
    """Pass the header from the rank of the first stage along all ranks.

    It travels ahead of the data and each rank hands it on at once, so it costs the pipeline
    nothing but one small message per rank; a new kind of batch adds a second one.

    Args:
        ranks: the pipeline's ranks.
        first: rank of the first stage.
        number: this rank's number of the call.
        training: what this rank was called for.
        kinds: learns a new kind of batch.
        own: the batch, on ``first``.
        refused: why the batch cannot be used, on ``first``.

    Raises:
        InputError: the first rank refused its batch; raised on every rank, and the pipeline stays
            usable.
        ConfigError: the ranks are not in the same call.
        PipelineFailure: a peer failed.
    """
    place = (ranks.rank - first) % ranks.size
    text = torch.empty(0, dtype=torch.uint8)
    if place == 0:
        kind, rows = 0, 0
        if own is not None:
            found = kind_of(own)
            (kind, new), rows = kinds.number(found), own.count
            if new and ranks.size > 1:
                text = torch.frombuffer(bytearray(pickle.dumps(found)), dtype=torch.uint8)
        numbers = torch.tensor([number, training, own is not None, kind, rows, len(text)])
        if refused is not None and ranks.size > 1:
            ranks.leave_note(f"refused/{number}", refused)
    else:
        before = (ranks.rank - 1) % ranks.size
        numbers = torch.zeros(6, dtype=torch.int64)
        ranks.receive(numbers, before, _HEADER_TAG, "the step's header")
        if length := int(numbers[5]):
            text = torch.empty(length, dtype=torch.uint8)
            ranks.receive(text, before, _HEADER_TAG, "the step's header")
    if place < ranks.size - 1:
        after = (ranks.rank + 1) % ranks.size
        ranks.send(numbers, after, _HEADER_TAG, "the step's header")
        if len(text):
            ranks.send(text, after, _HEADER_TAG, "the step's header")
    step, is_training, accepted, kind, rows, _ = numbers.tolist()
    if place and len(text):
        kinds.add(pickle.loads(bytes(text.tolist())))
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
    return Header(kind, rows)


class LossMessage:
    """The step's loss and metrics, from the rank of the last stage to all others."""

    def __init__(self, ranks: Ranks, source: int, device: torch.device) -> None:
        self._ranks, self._source, self._device = ranks, source, device
        self._buffer = torch.zeros(3, dtype=torch.float64)
        self._work: dist.Work | None = None

    def expect(self) -> None:
        """Post the receive, at the start of a step."""
        if self._ranks.rank != self._source:
            self._work = self._ranks.control.recv([self._buffer], self._source, _LOSS_TAG)

    def tell(self, loss: Tensor, metrics: Mapping[str, Tensor]) -> None:
        """On the rank of the last stage: send them to all others."""
        ranks = self._ranks
        if ranks.size == 1:
            return
        text = torch.empty(0, dtype=torch.uint8)
        if metrics:
            plain = {name: (value.item(), value.dtype) for name, value in metrics.items()}
            text = torch.frombuffer(bytearray(pickle.dumps(plain)), dtype=torch.uint8)
        message = torch.tensor(
            [loss.item(), DTYPES.index(loss.dtype), len(text)], dtype=torch.float64
        )
        for peer in range(ranks.size):
            if peer != ranks.rank:
                ranks.send(message, peer, _LOSS_TAG, "the step's loss")
                if len(text):
                    ranks.send(text, peer, _LOSS_TAG, "the step's metrics")

    def hear(self) -> tuple[Tensor, dict[str, Tensor]]:
        """On the others: what was told, equal to the last bit."""
        assert self._work is not None
        ranks = self._ranks
        ranks.finish(self._work, f"the receive of the step's loss from rank {self._source}")
        value, code, length = self._buffer.tolist()
        metrics: dict[str, Any] = {}
        if length:
            text = torch.empty(int(length), dtype=torch.uint8)
            ranks.receive(text, self._source, _LOSS_TAG, "the step's metrics")
            metrics = pickle.loads(bytes(text.tolist()))
        loss = torch.tensor(value, dtype=DTYPES[int(code)], device=self._device)
        return loss, {
            name: torch.tensor(one, dtype=dtype, device=self._device)
            for name, (one, dtype) in metrics.items()
        }
