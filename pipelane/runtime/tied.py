"""Parameters that layers of several stages share (tied weights).

Every stage that has one holds a copy. A step's own gradients of the copies are summed in the order
of the stages and added to what each copy had accumulated before: so the copies' gradients, and with
them the copies after any optimizer's step, stay equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipelane.errors import ModelError
from pipelane.runtime.group import Ranks

__all__ = ["Tie", "TiedWeights", "find_ties"]


class Tie(NamedTuple):
    """A parameter with several names, perhaps in several stages.

    Attributes:
        name: its first name in the model.
        names: all of its names in the model, in order.
        stages: the stages that have it, in order.
    """

    name: str
    names: tuple[str, ...]
    stages: tuple[int, ...]


def find_ties(layers: Sequence[tuple[str, nn.Module]], sizes: Sequence[int]) -> list[Tie]:
    """The parameters, found by identity, that the model has under several names.

    Raises:
        ModelError: parameters of two stages are different objects in the same memory.
    """
    home = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    names: dict[int, list[str]] = {}
    stages: dict[int, list[int]] = {}
    memory: dict[tuple[int, int], tuple[int, str, int]] = {}
    for (layer, module), stage in zip(layers, home, strict=True):
        for key, parameter in module.named_parameters(prefix=layer, remove_duplicate=False):
            names.setdefault(id(parameter), []).append(key)
            where = stages.setdefault(id(parameter), [])
            if parameter.device.type != "meta" and parameter.numel():
                place = parameter.data_ptr(), parameter.numel()
                other, first, at = memory.setdefault(place, (id(parameter), key, stage))
                if other != id(parameter) and at != stage:
                    raise ModelError(
                        f"{first} in stage {at} and {key} in stage {stage} are two parameters in "
                        "the same memory, which would become two; tie them as one: assign the "
                        "parameter "
                        f"itself, not its data, or put both layers into one stage"
                    )
            if stage not in where:
                where.append(stage)
    return [
        Tie(names[key][0], tuple(names[key]), tuple(where))
        for key, where in stages.items()
        if len(names[key]) > 1
    ]


class _Member(NamedTuple):
    """A tie as this rank has it: the copy here (its stages share it), and who takes part."""

    tie: Tie
    copy: nn.Parameter
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None


class TiedWeights:
    """The ties of one pipeline, as this rank has them.

    Args:
        ranks: the pipeline's ranks.
        ties: the same on every rank.
        placement: stage -> rank.
        copies: this rank's copy of each, by the tie's name; its stages share one.
        device: where they are.
    """

    def __init__(
        self,
        ranks: Ranks,
        ties: Sequence[Tie],
        placement: Sequence[int],
        copies: dict[str, nn.Parameter],
        device: torch.device,
    ) -> None:
        self._ranks = ranks
        self._members: list[_Member] = []
        self._before: dict[str, Tensor | None] = {}
        backend = "gloo" if device.type == "cpu" else "nccl"
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for tie in ties:
            members = tuple(sorted({placement[stage] for stage in tie.stages}))
            if len(members) == 1:
                continue
            if members not in groups:
                groups[members] = ranks.new_data_group(members, backend)
            if ranks.rank in members:
                self._members.append(_Member(tie, copies[tie.name], members, groups[members]))

    def begin(self) -> None:
        """Before a step: put aside what was accumulated and is equal in all copies."""
        for name, copy in self._copies():
            if name in self._before and copy.grad is None:
                self._before[name] = None  # it was zeroed since
            elif name not in self._before:  # else the last step left what it made to this one
                self._before[name], copy.grad = copy.grad, None

    def forget(self) -> None:
        """Let go of what was accumulated before, as ``zero_grad`` does."""
        self._before.clear()

    def _copies(self) -> Iterator[tuple[str, nn.Parameter]]:
        for member in self._members:
            yield member.tie.name, member.copy

    def reductions(self, wanted: Callable[[], bool]) -> Iterator[tuple[int, Callable[[], None]]]:
        """One operation per tie, in the same order on all members, with its stage here."""
        for member in self._members:

            def op(member: _Member = member) -> None:
                if wanted():
                    self._reduce(member)

            yield member.tie.stages[0], op

    @torch.no_grad()
    def _reduce(self, member: _Member) -> None:
        copy = member.copy
        before = self._before.pop(member.tie.name, None)
        if not copy.requires_grad:
            copy.grad = before
            return
        own = copy.grad if copy.grad is not None else torch.zeros_like(copy)
        found = [torch.empty_like(own) for _ in member.ranks]
        dist.all_gather(found, own.contiguous(), group=member.group)
        whole = before
        for one in found:
            whole = one if whole is None else whole.add_(one)
        copy.grad = whole
