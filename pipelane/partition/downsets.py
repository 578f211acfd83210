"""Dynamic programme over downsets: the best partition of a graph, exactly.

A downset (ideal) is a set of items that holds all that must come before its members. The stages
of a partition, first to last, climb from the empty downset to the full one, and each stage is the
difference of two downsets: so the best partition into s stages up to a downset is found from those
into s - 1 stages up to its subsets (Tarnawski et al., "Efficient Algorithms for Device Placement
of DNN Graph Operators", NeurIPS 2020, section 4). The prefixes of one topological order are
downsets too: restricted to them the same programme cuts a chain.

What a stage S = J minus I pays between stages follows from the cuts that are open (partly inside)
at either end: those open at J, less those open at I that S does not touch, plus those open at I
that S completes. So the cost of one I to all J above it is a few operations on whole arrays.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Literal, NamedTuple

from pipelane.partition.problem import Problem, bits

if TYPE_CHECKING:
    import torch

__all__ = ["Found", "Lattice", "Rule", "Timeout", "all_downsets", "prefixes", "stage_time"]

#: Times are compared as whole numbers of this many steps of the total, so that sorting is exact.
_STEPS = 1 << 46

#: The slowest stage; the most bytes above a limit; the sum of squared times within the limit.
Objective = Literal["time", "excess", "even"]


@dataclass(frozen=True)
class Rule:
    """What one stage of the pipeline can do.

    Attributes:
        speed: of its rank; 2.0 computes in half the time that was measured.
        memory: bytes of its rank.
        in_flight: micro-batches whose activations it holds at its peak.
    """

    speed: float = 1.0
    memory: float = math.inf
    in_flight: int = 1

    def needs(self, static: float, activation: float) -> float:
        """Bytes of a stage at its peak."""
        return static + self.in_flight * activation


class Found(NamedTuple):
    """A partition: the masks of its stages, which of them recompute, and the slowest one's time."""

    stages: tuple[int, ...]
    recompute: tuple[bool, ...]
    value: float


class Timeout(Exception):
    """The time is over; nothing was proven."""


def prefixes(order: Sequence[int]) -> list[int]:
    """The downsets that are prefixes of a topological order."""
    masks = [0]
    for item in order:
        masks.append(masks[-1] | 1 << item)
    return masks


def all_downsets(problem: Problem, most: int) -> list[int] | None:
    """All downsets, or None if there are more than ``most``."""
    before, after = problem.before, problem.after
    start = sum(1 << item for item, mask in enumerate(before) if not mask)
    free = {0: start}  # downset -> items that may come next
    queue = [0]
    for downset in queue:
        rest = free[downset]
        while rest:
            low = rest & -rest
            rest ^= low
            larger = downset | low
            if larger in free:
                continue
            if len(queue) >= most:
                return None
            next_ = free[downset] ^ low
            for item in bits(after[low.bit_length() - 1]):
                if not before[item] & ~larger:
                    next_ |= 1 << item
            free[larger] = next_
            queue.append(larger)
    return queue


def stage_time(problem: Problem, stage: int, rule: Rule, recompute: bool = False) -> float:
    """Seconds of a stage for one micro-batch: computing on its rank, and what it transfers."""
    compute = problem.total(stage, "seconds")
    if recompute:
        compute += problem.total(stage, "again")
    return compute / rule.speed + sum(cut.seconds for cut in problem.transfers(stage))


class Lattice:
    """Downsets as arrays, sorted so that subsets come first.

    Args:
        problem: the items.
        masks: downsets, with the empty and the full one.
    """

    def __init__(self, problem: Problem, masks: Iterable[int]) -> None:
        import torch

        self.problem = problem
        items = problem.items
        total = sum(item.seconds for item in items)
        steps = [round(item.seconds / total * _STEPS) if total else 0 for item in items]
        grown = _grown(masks, steps, problem.before)
        self.masks = sorted(grown, key=lambda mask: (grown[mask][0], mask.bit_count()))
        self.steps = [grown[mask][0] for mask in self.masks]
        # The largest elements of a downset tell its supersets from other downsets.
        self._tops = [grown[mask][1] for mask in self.masks]
        self.per_second = _STEPS / total if total else 0.0
        self.inside = _membership(self.masks, len(items))
        members = self.inside.to(torch.float64)

        def sums(key: str) -> torch.Tensor:
            values = torch.tensor([getattr(item, key) for item in items], dtype=torch.float64)
            return values @ members

        self.seconds, self.again = sums("seconds"), sums("again")
        self.static, self.activation = sums("static_bytes"), sums("activation_bytes")
        self.sizes = members.sum(0)
        self.cuts = [cut for cut in problem.cuts if cut.seconds or cut.bytes]
        joined = torch.zeros(len(self.cuts), len(items), dtype=torch.float64)
        for row, cut in enumerate(self.cuts):
            joined[row, list(bits(cut.items))] = 1
        self.reached = (joined @ members).to(torch.int16)  # items of a cut inside a downset
        self.full = joined.sum(1).to(torch.int16)
        self.price = torch.tensor([cut.seconds for cut in self.cuts], dtype=torch.float64)
        self.size = torch.tensor([cut.bytes for cut in self.cuts], dtype=torch.float64)
        is_open = (self.reached > 0) & (self.reached < self.full[:, None])
        self.open_price = self.price @ is_open.to(torch.float64)
        self.open_at = is_open.T.contiguous()

    def __len__(self) -> int:
        return len(self.masks)

    def tops(self, position: int) -> list[int]:
        """The items of a downset behind which it has none."""
        return list(bits(self._tops[position]))


def _grown(
    masks: Iterable[int], values: Sequence[int], before: Sequence[int]
) -> dict[int, tuple[int, int]]:
    """For each downset the sum of its items' values, and its largest elements as a mask.

    Both follow from a downset that lacks one item: the one just seen, or the one without the last
    item, which always is a downset, because items are in a topological order.
    """
    found: dict[int, tuple[int, int]] = {0: (0, 0)}
    last = 0
    for mask in masks:
        if mask in found:
            continue
        new = mask & ~last
        if last & ~mask or new & (new - 1):
            new = 1 << (mask.bit_length() - 1)
        smaller = mask ^ new
        if smaller in found:
            item = new.bit_length() - 1
            total, tops = found[smaller]
            found[mask] = total + values[item], tops & ~before[item] | new
        else:
            total = sum(values[item] for item in bits(mask))
            below = 0
            for item in bits(mask):
                below |= before[item]
            found[mask] = total, mask & ~below
        last = mask
    return found


def _membership(masks: Sequence[int], items: int) -> torch.Tensor:
    """``[item, downset]``: whether the item is inside."""
    import torch

    width = (items + 7) // 8
    packed = bytearray(b"".join(mask.to_bytes(width, "little") for mask in masks))
    table = torch.frombuffer(packed, dtype=torch.uint8).view(len(masks), width)
    spread = (table[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return spread.view(len(masks), 8 * width)[:, :items].T.contiguous().bool()


class _Search:
    """One run of the programme; see :func:`search`."""

    def __init__(
        self,
        lattice: Lattice,
        rules: Sequence[Rule],
        exactly: bool,
        limit: float,
        recompute: bool,
        objective: Objective,
        deadline: float,
    ) -> None:
        import torch

        self.torch = torch
        self.lattice = lattice
        self.rules = rules
        self.exactly = exactly
        self.limit = limit
        self.recompute = recompute
        self.objective = objective
        self.deadline = deadline
        stages, count = len(rules), len(lattice)
        self.best = torch.full((stages + 1, count), math.inf, dtype=torch.float64)
        self.best[0, 0] = -math.inf if objective == "excess" else 0.0
        self.cut = torch.zeros((stages + 1, count), dtype=torch.int32)
        self.again = torch.zeros((stages + 1, count), dtype=torch.bool)
        self.limited = any(rule.memory < math.inf for rule in rules)

    def run(self) -> Found | None:
        lattice, stages = self.lattice, len(self.rules)
        whole = lattice.steps[-1]
        # The least that must be inside after s stages, so that the others can hold the rest.
        least = [0.0] * (stages + 1)
        rest = 0.0
        for s in range(stages - 1, -1, -1):
            rest += self._reach(s)
            least[s] = whole - rest if rest < math.inf else 0.0
        for start in range(len(lattice) - 1):
            if not start & 63 and perf_counter() > self.deadline:
                raise Timeout
            column = self.best[:stages, start].tolist()
            most = math.inf if self.objective == "even" else self.limit
            active = [s for s, value in enumerate(column) if value < most]
            if active and (active := [s for s in active if lattice.steps[start] >= least[s]]):
                low = min(least[s + 1] for s in active)
                high = lattice.steps[start] + max(self._reach(s) for s in active)
                self._extend(start, active, column, low, high)
        return self._result()

    def _reach(self, s: int) -> float:
        """Steps of work that stage s can take at most, and some for rounding."""
        if self.objective == "excess" or self.limit == math.inf:
            return math.inf
        lattice = self.lattice
        return self.limit * self.rules[s].speed * lattice.per_second + len(lattice.problem.items)

    def _extend(
        self, start: int, active: list[int], column: list[float], low: float, high: float
    ) -> None:
        """Offer all stages that begin behind one downset."""
        torch, lattice = self.torch, self.lattice
        begin = max(start + 1, bisect_left(lattice.steps, low))
        end = len(lattice) if high == math.inf else bisect_right(lattice.steps, high)
        if begin >= end:
            return
        tops = lattice.tops(start)
        if tops:
            above = lattice.inside[tops, begin:end].all(0).nonzero().squeeze(1) + begin
        else:
            above = torch.arange(begin, end)
        if not len(above):
            return
        compute = lattice.seconds[above] - lattice.seconds[start]
        transfer, received = self._between(start, above)
        static = activation = None
        if self.limited or self.objective == "excess":
            static = lattice.static[above] - lattice.static[start]
            activation = lattice.activation[above] - lattice.activation[start]
        for s in active:
            rule = self.rules[s]
            again = None
            if self.objective != "excess":
                time = compute / rule.speed if rule.speed != 1.0 else compute
                if transfer is not None:
                    time = time + transfer
                if static is not None and activation is not None and rule.memory < math.inf:
                    fits = static + rule.in_flight * activation <= rule.memory
                    if self.recompute:
                        held = static + activation
                        if received is not None:
                            held = held + rule.in_flight * received
                        twice = time + (lattice.again[above] - lattice.again[start]) / rule.speed
                        again = ~fits & (held <= rule.memory)
                        time = torch.where(again, twice, time)
                        fits = fits | again
                    time = torch.where(fits, time, math.inf)
            else:
                assert static is not None
                assert activation is not None
                time = static + rule.in_flight * activation
                if self.recompute:
                    held = static + activation
                    if received is not None:
                        held = held + rule.in_flight * received
                    time = torch.minimum(time, held)
                time = time - rule.memory
            if self.objective == "even":
                value = torch.where(time <= self.limit, column[s] + time * time, math.inf)
                better = value < self.best[s + 1, above]
            else:
                value = time.clamp(min=column[s])
                better = (value < self.best[s + 1, above]) & (value < self.limit)
            where = above[better]
            if len(where):
                self.best[s + 1, where] = value[better]
                self.cut[s + 1, where] = start
                if again is not None:
                    self.again[s + 1, where] = again[better]

    def _between(
        self, start: int, above: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What a stage from ``start`` to each of ``above`` transfers: seconds, received bytes."""
        torch, lattice = self.torch, self.lattice
        if not lattice.cuts:
            return None, None
        transfer = lattice.open_price[above]
        rows = lattice.open_at[start].nonzero().squeeze(1)
        if not len(rows):
            return transfer, None
        reached = lattice.reached[rows][:, above]
        price = lattice.price[rows]
        still = (reached < lattice.full[rows, None]).to(torch.float64)
        if lattice.problem.charge == "sender":
            return transfer - price @ still, None
        touched = (reached != lattice.reached[rows, start, None]).to(torch.float64)
        received = lattice.size[rows] @ touched if self.recompute else None
        return transfer + price @ (touched - still), received

    def _result(self) -> Found | None:
        stages = len(self.rules)
        ends = self.best[:, -1].tolist()
        wanted = [stages] if self.exactly else range(1, stages + 1)
        s = min(wanted, key=lambda k: (ends[k], k))
        if ends[s] == math.inf:
            return None
        value = ends[s]
        masks, position, made, again = self.lattice.masks, len(self.lattice) - 1, [], []
        while s:
            before = int(self.cut[s, position])
            made.append(masks[position] & ~masks[before])
            again.append(bool(self.again[s, position]))
            s, position = s - 1, before
        return Found(tuple(reversed(made)), tuple(reversed(again)), value)


def search(
    lattice: Lattice,
    rules: Sequence[Rule],
    *,
    exactly: bool,
    limit: float = math.inf,
    recompute: bool = False,
    objective: Objective = "time",
    deadline: float = math.inf,
) -> Found | None:
    """The best partition whose stages are differences of the lattice's downsets.

    Args:
        lattice: the downsets.
        rules: one per stage, first to last.
        exactly: as many stages as rules; else any number, the first rules holding.
        limit: only what is below this value is looked for.
        recompute: stages that do not fit may keep only their input and run forward twice.
        objective: what is minimised; with "even", ``limit`` holds for each stage's time.
        deadline: on the clock of ``time.perf_counter``.

    Returns:
        The best one, or None if there is none below ``limit``: that is a proof for the lattice.

    Raises:
        Timeout: past the deadline.
    """
    return _Search(lattice, rules, exactly, limit, recompute, objective, deadline).run()
