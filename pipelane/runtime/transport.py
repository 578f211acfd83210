"""Tensors between ranks: one channel per (sender, receiver, direction), receives posted ahead.

On the CPU all channels share one gloo group, whose messages carry tags. On CUDA each channel has
its own NCCL communicator, because NCCL has no tags and serialises what shares a communicator;
within a channel, receives are posted in the order of the sends (see ``pipelane.program``).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipelane.actions import Kind
from pipelane.program import Program
from pipelane.runtime.group import Ranks

__all__ = ["DTYPES", "Inbox", "Outbox", "Spec", "Transport", "decode_spec", "encode_spec"]

#: Receives kept posted on a channel beyond the one that is needed next ...
LOOKAHEAD = 2
#: ... and more than that while what is posted stays within so many bytes. Small messages are thus
#: posted in one burst at the start of a step: a receive wakes the peer's network thread, and on
#: tiny layers those wake-ups, spread over the step, cost more than the layers.
AHEAD_BYTES = 1 << 20
#: Sends under way on a channel before the oldest is waited for; more while they are small.
SENDS_AHEAD = 2
#: Most dimensions of a tensor that crosses a stage boundary.
MAX_DIMS = 10

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
_DTYPE_CODE = {dtype: code for code, dtype in enumerate(DTYPES)}


class Spec(NamedTuple):
    """What a message is: shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def encode_spec(spec: Spec) -> list[int]:
    """A spec as ``2 + MAX_DIMS`` numbers."""
    padding = [0] * (MAX_DIMS - len(spec.shape))
    return [_DTYPE_CODE[spec.dtype], len(spec.shape), *spec.shape, *padding]


def decode_spec(numbers: Sequence[int]) -> Spec:
    return Spec(tuple(numbers[2 : 2 + numbers[1]]), DTYPES[numbers[0]])


class Inbox:
    """The receiving end of one channel: slots in the order in which the peer sends.

    A slot is (stage, micro-batch). ``spec_of(slot)`` says what the message will be, or None if
    only the peer knows yet; then it sends the spec ahead, which is read when the slot is waited
    for. A gradient (``forward`` False) whose dtype cannot have one is never sent.
    """

    def __init__(
        self,
        slots: Sequence[tuple[int, int]],
        forward: bool,
        spec_of: Callable[[tuple[int, int]], Spec | None],
        receive: Callable[[torch.Tensor, tuple[int, int]], dist.Work],
        receive_spec: Callable[[tuple[int, int]], Spec],
        device: torch.device,
    ) -> None:
        self._slots = slots
        self._forward = forward
        self._index = {slot: index for index, slot in enumerate(slots)}
        self._spec_of = spec_of
        self._receive = receive
        self._receive_spec = receive_spec
        self._device = device
        self._posted = 0
        self._bytes = 0  # posted and not yet waited for
        self._works: dict[tuple[int, int], tuple[torch.Tensor, dist.Work]] = {}

    def post(self, slot: tuple[int, int]) -> None:
        """Post the receives up to this slot and the look-ahead, as far as specs are known."""
        last = self._index[slot] + LOOKAHEAD
        while self._posted < len(self._slots) and (
            self._posted <= last or self._bytes <= AHEAD_BYTES
        ):
            following = self._slots[self._posted]
            spec = self._spec_of(following)
            if spec is None:
                return
            self._post(following, spec)

    def wait(self, slot: tuple[int, int]) -> torch.Tensor | None:
        """The message of this slot, wholly received; None if there is none to expect."""
        index = self._index[slot]
        while self._posted <= index:
            following = self._slots[self._posted]
            self._post(following, self._spec_of(following) or self._receive_spec(following))
        posted = self._works.pop(slot, None)
        if posted is None:
            return None
        buffer, work = posted
        work.wait()
        self._bytes -= buffer.nbytes
        return buffer

    def _post(self, slot: tuple[int, int], spec: Spec) -> None:
        self._posted += 1
        if not self._forward and not (spec.dtype.is_floating_point or spec.dtype.is_complex):
            return
        buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
        self._bytes += buffer.nbytes
        self._works[slot] = (buffer, self._receive(buffer, slot))

    def restart(self) -> None:
        """Before each step."""
        self._posted = 0


class Outbox:
    """The sending end of one channel: keeps tensors until they have been sent.

    Sends are not waited for while what is under way is small. Beyond that the oldest is waited for,
    so that outputs do not pile up in front of a slow stage. That cannot deadlock: the lowering's
    certificate holds even if every send is waited for at its own place.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._bytes = 0

    def keep(self, work: dist.Work, tensor: torch.Tensor, *, may_wait: bool) -> None:
        self._pending.append((work, tensor))
        self._bytes += tensor.nbytes
        while may_wait and len(self._pending) > SENDS_AHEAD and self._bytes > AHEAD_BYTES:
            self._finish_oldest()

    def finish(self) -> None:
        """Wait for all, at the end of a step."""
        while self._pending:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        work, tensor = self._pending.popleft()
        self._bytes -= tensor.nbytes
        work.wait()


class Transport:
    """All channels of this rank.

    Args:
        ranks: the pipeline's ranks.
        placement: stage -> rank.
        device: where tensors live.
    """

    def __init__(self, ranks: Ranks, placement: Sequence[int], device: torch.device) -> None:
        self.ranks = ranks
        self.device = device
        self._stages = len(placement)
        self._groups: dict[tuple[int, int, bool], dist.ProcessGroup] = {}
        pairs = {(a, b) for a, b in itertools.pairwise(placement) if a != b}
        if device.type == "cpu":
            shared = ranks.new_data_group(range(ranks.size), "gloo")
            assert shared is not None
            for a, b in pairs:
                for key in ((a, b, True), (b, a, False)):
                    self._groups[key] = shared
        else:
            for a, b in sorted(pairs):
                for key in ((a, b, True), (b, a, False)):
                    made = ranks.new_data_group(sorted((a, b)), "nccl")
                    if made is not None:
                        self._groups[key] = made

    def sender(
        self, kind: Kind, stage: int, microbatch: int, peer: int
    ) -> Callable[..., dist.Work]:
        """A function that sends the result of this action to the peer."""
        forward = kind is Kind.SEND_F
        group = self._groups[self.ranks.rank, peer, forward]
        to, tag = self._address(group, peer), self._tag(forward, stage, microbatch)
        post = group.send

        def send(tensor: torch.Tensor) -> dist.Work:
            return post([tensor], to, tag)

        return send

    def spec_sender(self, stage: int, microbatch: int, peer: int) -> Callable[[Spec], dist.Work]:
        """A function that tells the peer what the stage's output for this micro-batch will be."""
        tag = self._tag(True, stage, microbatch)
        post = self.ranks.control.send

        def send(spec: Spec) -> dist.Work:
            return post([torch.tensor(encode_spec(spec), dtype=torch.int64)], peer, tag)

        return send

    def inboxes(
        self,
        program: Program,
        spec_of: Callable[[bool, tuple[int, int]], Spec | None],
        learn: Callable[[tuple[int, int], Spec], None],
    ) -> dict[tuple[int, bool], Inbox]:
        """This rank's receiving ends for a program, by (peer, is forward).

        ``spec_of(is forward, (receiving stage, micro-batch))`` gives a message's spec if known;
        ``learn`` is told each spec that came ahead of its tensor.
        """
        slots: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        for instruction in program.streams[self.ranks.rank]:
            if instruction.kind.is_receive:
                forward = instruction.kind is Kind.RECV_F
                slot = (instruction.stage, instruction.microbatch)
                slots.setdefault((instruction.peer, forward), []).append(slot)
        return {
            key: self._inbox(key[0], key[1], found, spec_of, learn) for key, found in slots.items()
        }

    def _inbox(
        self,
        peer: int,
        forward: bool,
        slots: Sequence[tuple[int, int]],
        spec_of: Callable[[bool, tuple[int, int]], Spec | None],
        learn: Callable[[tuple[int, int], Spec], None],
    ) -> Inbox:
        group = self._groups[peer, self.ranks.rank, forward]
        source, post, control = self._address(group, peer), group.recv, self.ranks.control
        step = -1 if forward else 1  # the producer is the stage before, or after

        def receive(buffer: torch.Tensor, slot: tuple[int, int]) -> dist.Work:
            return post([buffer], source, self._tag(forward, slot[0] + step, slot[1]))

        def receive_spec(slot: tuple[int, int]) -> Spec:
            numbers = torch.empty(2 + MAX_DIMS, dtype=torch.int64)
            control.recv([numbers], peer, self._tag(True, slot[0] - 1, slot[1])).wait()
            spec = decode_spec(numbers.tolist())
            learn(slot, spec)
            return spec

        return Inbox(
            slots, forward, lambda slot: spec_of(forward, slot), receive, receive_spec, self.device
        )

    def _tag(self, forward: bool, stage: int, microbatch: int) -> int:
        """A number per message of a step; control tags below 16 are for other uses."""
        return 16 + 2 * (microbatch * self._stages + stage) + forward

    def _address(self, group: dist.ProcessGroup, peer: int) -> int:
        return dist.get_group_rank(group, self.ranks.world[peer])
