"""Messages between ranks: one channel per (sender, receiver, direction), receives posted ahead.

On the CPU all channels share one gloo group, whose messages carry tags. On CUDA each channel has
its own NCCL communicator, because NCCL has no tags and serialises what shares a communicator;
within a channel, receives are posted in the order of the sends (see ``pipelane.program``).
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from pipelane.program import Program
from pipelane.runtime.boundary import Boundary, Message
from pipelane.runtime.group import Ranks

__all__ = ["Edge", "Inbox", "Outbox", "Slot", "Transport"]

#: Receives kept posted on a channel beyond the one that is needed next ...
LOOKAHEAD = 2
#: ... and more than that while what is posted stays within so many bytes. Small messages are thus
#: posted in one burst at the start of a step: a receive wakes the peer's network thread, and on
#: tiny layers those wake-ups, spread over the step, cost more than the layers.
AHEAD_BYTES = 1 << 20
#: Sends under way on a channel before the oldest is waited for; more while they are small.
SENDS_AHEAD = 2

Edge: TypeAlias = tuple[int, int]
"""Two stages that exchange messages: activations from the first to the second, gradients back."""
Slot: TypeAlias = tuple[Edge, int]
"""A message of an edge: (edge, micro-batch)."""
#: A tensor under way: what waits for it, and the tensor.
Works: TypeAlias = list[tuple[Tensor, dist.Work]]


class Inbox:
    """The receiving end of one channel: slots in the order in which the peer sends.

    ``known(slot)`` says what the message will be, or None if only the peer knows yet; then it sends
    that ahead, and it is read when the slot is waited for. Of a gradient (``forward`` False) only
    the tensors that want one are sent.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        forward: bool,
        known: Callable[[Slot], Boundary | None],
        receive: Callable[[Tensor, Slot, int], dist.Work],
        receive_boundary: Callable[[Slot], Boundary],
        device: torch.device,
    ) -> None:
        self._slots = slots
        self._forward = forward
        self._index = {slot: index for index, slot in enumerate(slots)}
        self._known = known
        self._receive = receive
        self._receive_boundary = receive_boundary
        self._device = device
        self._posted = 0
        self._bytes = 0  # posted and not yet waited for
        self._works: dict[Slot, tuple[Boundary, Works]] = {}

    def post(self, slot: Slot) -> None:
        """Post the receives up to this slot and the look-ahead, as far as they are known."""
        last = self._index[slot] + LOOKAHEAD
        slots = self._slots
        while self._posted < len(slots) and (self._posted <= last or self._bytes <= AHEAD_BYTES):
            following = slots[self._posted]
            boundary = self._known(following)
            if boundary is None:
                return
            self._post(following, boundary)

    def wait(self, slot: Slot) -> Message:
        """The message of this slot, wholly received; of a gradient, all tensors that want one."""
        index = self._index[slot]
        while self._posted <= index:
            following = self._slots[self._posted]
            self._post(following, self._known(following) or self._receive_boundary(following))
        boundary, works = self._works.pop(slot)
        leaves = []
        for buffer, work in works:
            work.wait()
            self._bytes -= buffer.nbytes
            leaves.append(buffer)
        return Message(boundary.structure, leaves, boundary.grads)

    def _post(self, slot: Slot, boundary: Boundary) -> None:
        self._posted += 1
        works = []
        for place, spec in enumerate(boundary.specs):
            if self._forward or spec.grad:
                buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
                self._bytes += buffer.nbytes
                works.append((buffer, self._receive(buffer, slot, place)))
        self._works[slot] = boundary, works

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
        self._pending: deque[Works] = deque()
        self._bytes = 0

    def keep(self, works: Works, *, may_wait: bool) -> None:
        """Take charge of the tensors of one message."""
        self._pending.append(works)
        for tensor, _ in works:
            self._bytes += tensor.nbytes
        while may_wait and len(self._pending) > SENDS_AHEAD and self._bytes > AHEAD_BYTES:
            self._finish_oldest()

    def finish(self) -> None:
        """Wait for all, at the end of a step."""
        while self._pending:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        for tensor, work in self._pending.popleft():
            self._bytes -= tensor.nbytes
            work.wait()


class Transport:
    """All channels of this rank.

    Args:
        ranks: the pipeline's ranks.
        placement: stage -> rank.
        edges: pairs of stages that exchange messages; the same on every rank.
        device: where tensors live.
    """

    def __init__(
        self, ranks: Ranks, placement: Sequence[int], edges: Iterable[Edge], device: torch.device
    ) -> None:
        self.ranks = ranks
        self.device = device
        self._placement = placement
        self._number = {edge: number for number, edge in enumerate(edges)}
        self._groups: dict[tuple[int, int, bool], dist.ProcessGroup] = {}
        pairs = {
            (placement[a], placement[b]) for a, b in self._number if placement[a] != placement[b]
        }
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
        self, forward: bool, edge: Edge, microbatch: int, microbatches: int
    ) -> Callable[[Sequence[Tensor | None]], Works]:
        """A function that sends the tensors of one message; those that are None stay here."""
        peer = self._placement[edge[1] if forward else edge[0]]
        group = self._groups[self.ranks.rank, peer, forward]
        to, first, stride = (
            self._address(group, peer),
            *self._tags(forward, edge, microbatch, microbatches),
        )
        post = group.send

        def send(tensors: Sequence[Tensor | None]) -> Works:
            tag, works = first, []
            for tensor in tensors:
                if tensor is not None:
                    works.append((tensor, post([tensor], to, tag)))
                tag += stride
            return works

        return send

    def boundary_sender(
        self, forward: bool, edge: Edge, microbatch: int, microbatches: int
    ) -> Callable[[Boundary], Works]:
        """A function that tells the receiver of a message what it will be."""
        peer = self._placement[edge[1] if forward else edge[0]]
        tag, _ = self._tags(forward, edge, microbatch, microbatches)
        post = self.ranks.control.send

        def send(boundary: Boundary) -> Works:
            text = torch.frombuffer(bytearray(pickle.dumps(boundary)), dtype=torch.uint8)
            length = torch.tensor([len(text)])
            return [(one, post([one], peer, tag)) for one in (length, text)]

        return send

    def inboxes(
        self,
        program: Program,
        known: Callable[[bool, Slot], Boundary | None],
        learn: Callable[[bool, Slot, Boundary], None],
    ) -> dict[tuple[int, bool], Inbox]:
        """This rank's receiving ends for a program, by (peer, is forward).

        ``known(is forward, slot)`` gives what a message will be, if that is known; ``learn`` is
        told what came ahead of its message.
        """
        slots: dict[tuple[int, bool], list[Slot]] = {}
        for instruction in program.streams[self.ranks.rank]:
            if instruction.kind.is_receive:
                edge, forward = instruction.edge
                slots.setdefault((instruction.peer, forward), []).append(
                    (edge, instruction.microbatch)
                )
        return {
            (peer, forward): self._inbox(peer, forward, found, program.microbatches, known, learn)
            for (peer, forward), found in slots.items()
        }

    def _inbox(
        self,
        peer: int,
        forward: bool,
        slots: Sequence[Slot],
        microbatches: int,
        known: Callable[[bool, Slot], Boundary | None],
        learn: Callable[[bool, Slot, Boundary], None],
    ) -> Inbox:
        group = self._groups[peer, self.ranks.rank, forward]
        source, post, control = self._address(group, peer), group.recv, self.ranks.control
        tags = {slot: self._tags(forward, *slot, microbatches) for slot in slots}

        def receive(buffer: Tensor, slot: Slot, place: int) -> dist.Work:
            tag, stride = tags[slot]
            return post([buffer], source, tag + place * stride)

        def receive_boundary(slot: Slot) -> Boundary:
            length = torch.empty(1, dtype=torch.int64)
            control.recv([length], peer, tags[slot][0]).wait()
            text = torch.empty(int(length), dtype=torch.uint8)
            control.recv([text], peer, tags[slot][0]).wait()
            boundary: Boundary = pickle.loads(bytes(text.tolist()))
            learn(forward, slot, boundary)
            return boundary

        return Inbox(
            slots,
            forward,
            lambda slot: known(forward, slot),
            receive,
            receive_boundary,
            self.device,
        )

    def _tags(
        self, forward: bool, edge: Edge, microbatch: int, microbatches: int
    ) -> tuple[int, int]:
        """The tag of a message's first tensor, and the step to the next one's.

        Tags are numbers of their own within a step; those below 16 are for other uses.
        """
        count = len(self._number)
        tag = 16 + 2 * (microbatch * count + self._number[edge]) + forward
        return tag, 2 * microbatches * count

    def _address(self, group: dist.ProcessGroup, peer: int) -> int:
        return dist.get_group_rank(group, self.ranks.world[peer])
