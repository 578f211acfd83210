"""A graph made ready for searching: whole items, bit masks, and reductions that lose nothing.

An **item** is what goes to one stage as a whole: a node, a colocation group, or nodes that order
each other in a circle. Sets of items are whole numbers used as bit masks. What passes between items
is a **cut**: a set of items, of which a stage pays the price once if it holds some but not all.
That is the same for a tensor and its gradient, for several consumers, and for tied weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from pipelane.costs import Link
from pipelane.errors import PartitionError
from pipelane.graph import Tensor, node_name, tensors_of, times_of

if TYPE_CHECKING:
    import networkx

__all__ = ["Charge", "Cut", "Item", "Problem", "assign", "problem_of", "reduced"]

#: Who pays for a tensor that leaves its stage: the sender and every receiver, or the sender only.
Charge = Literal["both", "sender"]


@dataclass(frozen=True)
class Item:
    """What goes to one stage as a whole. Times and bytes are for one micro-batch.

    Attributes:
        nodes: of the graph, in a topological order.
        names: what they are called.
        forward, input_grad, weight_grad: seconds; the backward is under ``input_grad`` where the
            graph knows it as a whole, and all is under ``forward`` where it knows one sum.
        seconds: of forward and whole backward.
        again: seconds of a second forward; a third of all where only a sum is known.
        parameter_bytes, static_bytes, activation_bytes: see :mod:`pipelane.graph`.
    """

    nodes: tuple[Hashable, ...]
    names: tuple[str, ...]
    forward: float
    input_grad: float
    weight_grad: float
    seconds: float
    again: float
    parameter_bytes: float
    static_bytes: float
    activation_bytes: float


@dataclass(frozen=True)
class Cut:
    """Items that a tensor joins; ``seconds`` and ``bytes`` of one transfer there and back."""

    items: int
    source: int
    seconds: float
    bytes: float


@dataclass(frozen=True)
class Problem:
    """Items in a topological order, what joins them, and what was taken out.

    Attributes:
        items: what is to be placed.
        before: per item, the mask of those that must not be in a later stage.
        cuts: what is paid for between stages.
        charge: who pays.
        ends: items taken out by :func:`reduced`, with the items that they follow.
    """

    items: tuple[Item, ...]
    before: tuple[int, ...]
    cuts: tuple[Cut, ...]
    charge: Charge = "both"
    ends: tuple[_End, ...] = ()

    @property
    def whole(self) -> int:
        """The mask of all items."""
        return (1 << len(self.items)) - 1

    @cached_property
    def after(self) -> tuple[int, ...]:
        """Per item, the mask of those that must not be in an earlier stage."""
        found = [0] * len(self.items)
        for item, mask in enumerate(self.before):
            for other in bits(mask):
                found[other] |= 1 << item
        return tuple(found)

    @cached_property
    def touching(self) -> tuple[tuple[Cut, ...], ...]:
        """Per item, the cuts that it is in."""
        found: list[list[Cut]] = [[] for _ in self.items]
        for cut in self.cuts:
            for item in bits(cut.items):
                found[item].append(cut)
        return tuple(map(tuple, found))

    @property
    def has_one_order(self) -> bool:
        """Whether each item waits for the one before."""
        return all(mask >> (item - 1) & 1 for item, mask in enumerate(self.before) if item)

    @property
    def is_plain_chain(self) -> bool:
        """One row of items, with transfers between neighbours only, both of whom pay."""
        return (
            self.charge == "both"
            and all(mask == (1 << item >> 1) for item, mask in enumerate(self.before))
            and all(cut.items == 0b11 << cut.source for cut in self.cuts)
        )

    def boundaries(self) -> list[float]:
        """Of a plain chain: seconds of what passes behind each item but the last."""
        found = [0.0] * (len(self.items) - 1)
        for cut in self.cuts:
            found[cut.source] += cut.seconds
        return found

    def refuse_empty_stages(self, stages: int) -> None:
        """Raise PartitionError if there are more stages than items."""
        if stages > len(self.items):
            raise PartitionError(
                f"{stages} stages for {len(self.items)} layers: every stage needs at least one; "
                f"use at most {len(self.items)} stages, or split the layers"
            )

    def transfers(self, stage: int) -> list[Cut]:
        """The cuts that a stage pays for."""
        seen = {id(cut): cut for item in bits(stage) for cut in self.touching[item]}
        return [
            cut
            for cut in seen.values()
            if cut.items & ~stage and (self.charge == "both" or stage >> cut.source & 1)
        ]

    def total(self, stage: int, key: str) -> float:
        """Sum of an attribute of the items of a stage."""
        values: Iterable[float] = (getattr(self.items[item], key) for item in bits(stage))
        return sum(values)


@dataclass(frozen=True)
class _End:
    """An item without time: before or behind all of ``near``, in the nearest of their stages."""

    item: Item
    near: frozenset[tuple[Hashable, ...]]
    first: bool


def bits(mask: int) -> Iterable[int]:
    """The items in a mask, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def problem_of(
    graph: networkx.DiGraph,
    *,
    link: Link | None = None,
    priced: bool = True,
    charge: Charge = "both",
    colocate: Iterable[Iterable[Hashable]] = (),
    shared: Iterable[tuple[tuple[Hashable, ...], float]] = (),
) -> Problem:
    """Contract what must stay together, and price what passes between.

    Args:
        graph: see :mod:`pipelane.graph`.
        link: what a tensor's bytes cost; free if not given.
        priced: False to leave communication out.
        charge: who pays for a tensor.
        colocate: groups beside those of the graph.
        shared: nodes whose stages pay ``seconds`` each if they are not all in one stage, such as
            replicated weights whose gradients are summed.

    The graph must be valid, see :func:`pipelane.graph.validate_graph`.
    """
    import networkx

    order = list(networkx.topological_sort(graph))
    place = {node: number for number, node in enumerate(order)}
    joined = networkx.DiGraph()
    joined.add_nodes_from(order)
    joined.add_edges_from(graph.edges)
    for group in (*graph.graph.get("colocate", ()), *colocate):
        members = list(group)
        for a, b in zip(members, (*members[1:], *members[:1]), strict=True):
            if a != b:
                joined.add_edge(a, b)
    circles = networkx.condensation(joined)
    # Of all topological orders the one nearest to the graph's own, so that names stay in order.
    ranked = networkx.lexicographical_topological_sort(
        circles, key=lambda c: min(place[node] for node in circles.nodes[c]["members"])
    )
    items: list[Item] = []
    number_of: dict[Hashable, int] = {}
    for circle in ranked:
        members = sorted(circles.nodes[circle]["members"], key=place.__getitem__)
        for node in members:
            number_of[node] = len(items)
        items.append(_item(graph, members))
    before = [0] * len(items)
    for a, b in graph.edges:
        if number_of[a] != number_of[b]:
            before[number_of[b]] |= 1 << number_of[a]
    cuts = _cuts(tensors_of(graph), number_of, link) if priced else []
    for nodes, seconds in shared:
        numbers = [number_of[node] for node in nodes]
        mask = _mask(numbers)
        if mask.bit_count() > 1 and seconds > 0:
            cuts.append(Cut(mask, min(numbers), seconds, 0.0))
    return Problem(tuple(items), tuple(before), tuple(cuts), charge)


def _item(graph: networkx.DiGraph, members: Sequence[Hashable]) -> Item:
    parts = {node: _parts(graph.nodes[node]) for node in members}

    def total(key: str) -> float:
        return sum(part[key] for part in parts.values())

    parameters, static = total("parameter_bytes"), total("static_bytes")
    for tied in graph.graph.get("tied", ()):
        # Counted with each node, there once.
        again = max(0, sum(node in parts for node in tied.nodes) - 1)
        parameters -= again * tied.bytes
        static -= again * (tied.bytes if tied.static_bytes is None else tied.static_bytes)
    return Item(
        tuple(members),
        tuple(node_name(graph, node) for node in members),
        *map(total, ("forward", "input_grad", "weight_grad", "seconds", "again")),
        *map(float, (max(0.0, parameters), max(0.0, static), total("activation_bytes"))),
    )


def _parts(data: Mapping[str, float]) -> dict[str, float]:
    times = times_of(data)
    forward = times.get("seconds", times.get("forward", 0.0))
    whole = times.get("backward", 0.0)
    split = "input_grad" in times
    parts = {
        "forward": forward,
        "input_grad": times["input_grad"] if split else whole,
        "weight_grad": times["weight_grad"] if split else 0.0,
    }
    backward = whole if "backward" in times else parts["input_grad"] + parts["weight_grad"]
    parameters = data.get("parameter_bytes", 0.0)
    return parts | {
        "seconds": forward + backward,
        "again": forward / 3 if "seconds" in times else forward,
        "parameter_bytes": parameters,
        "static_bytes": data.get("static_bytes", parameters),
        "activation_bytes": data.get("activation_bytes", 0.0),
    }


def _cuts(
    tensors: Iterable[Tensor], number_of: Mapping[Hashable, int], link: Link | None
) -> list[Cut]:
    """Tensors between items; several with the same ends are one."""
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for tensor in tensors:
        source = number_of[tensor.source]
        mask = _mask([source, *(number_of[node] for node in tensor.consumers)])
        if mask.bit_count() < 2:
            continue
        seconds = tensor.seconds
        if link is not None:
            # A link replaces what a file says about the time of a transfer.
            seconds = 2 * (link.latency + tensor.bytes / link.bandwidth)
        before = found.get((mask, source), (0.0, 0.0))
        found[mask, source] = (before[0] + seconds, before[1] + tensor.bytes)
    return [Cut(mask, source, *found[mask, source]) for mask, source in found]


def _mask(numbers: Iterable[int]) -> int:
    mask = 0
    for number in numbers:
        mask |= 1 << number
    return mask


def reduced(problem: Problem, *, memory: bool) -> Problem:
    """Take out items without time that some best partition has beside a neighbour.

    Three rules, each of which moves an item without making any stage slower:

    - An end (nothing before it, or nothing behind it) with one neighbour goes there, if all that
      is paid for it is paid for the neighbour too.
    - A beginning whose only transfer goes to exactly its neighbours is in the stage of the first of
      them; an end without transfers is in the stage of the last of them.
    - All takers of one transfer go to its source, if what they pass on costs no more than it (and
      the other way round: all that a taker alone is given).

    Valid for "at most k stages"; with exactly k stages such an item may be needed to fill one.

    Args:
        problem: what to reduce.
        memory: whether bytes count; then items that hold some are kept.
    """
    work = _Reduction(problem, memory)
    while work.round():
        pass
    return work.result() if work.ends else problem


class _Reduction:
    """A problem whose items are being taken out."""

    def __init__(self, problem: Problem, memory: bool) -> None:
        self.problem = problem
        self.before = list(problem.before)
        self.after = list(problem.after)
        self.cuts = [cut for cut in problem.cuts if cut.seconds]
        self.alive = set(range(len(problem.items)))
        self.ends: list[_End] = []
        self.idle = {
            number
            for number, item in enumerate(problem.items)
            if not item.seconds and not (memory and (item.static_bytes or item.activation_bytes))
        }

    def round(self) -> bool:
        """Try every item once; whether one was taken out."""
        changed = False
        for item in sorted(self.idle & self.alive):
            if item in self.alive and len(self.alive) > 1:
                changed |= self._end(item) or self._relay(item)
        return changed

    def _end(self, item: int) -> bool:
        before, after = self.before[item], self.after[item]
        if before and after:
            return False
        near = before or after
        if not near:
            return False
        cuts = [cut.items for cut in self.cuts if cut.items >> item & 1]
        if near.bit_count() == 1:
            if all(cut & near for cut in cuts):
                self._absorb(item, near.bit_length() - 1)
                return True
            return False
        one_for_all = len(cuts) == 1 and cuts[0] == near | 1 << item and not before
        if cuts and not (one_for_all and self.problem.charge == "both"):
            return False
        self._drop(item, near, first=not before)
        return True

    def _relay(self, item: int) -> bool:
        """Move all takers of what one source gives, or all givers of what one taker takes."""
        for near, back in ((self.before, self.after), (self.after, self.before)):
            if near[item].bit_count() != 1:
                continue
            host = near[item].bit_length() - 1
            joint = next(
                (c for c in self.cuts if c.items >> item & 1 and c.items >> host & 1), None
            )
            if joint is None:
                continue
            movers = joint.items & ~(1 << host)
            forward = back is self.after
            if not forward and movers.bit_count() > 1:
                continue
            if (forward and joint.source != host) or (not forward and joint.source != item):
                continue
            if not all(i in self.idle and near[i] == 1 << host for i in bits(movers)):
                continue
            others = [c for c in self.cuts if c is not joint and c.items & movers]
            if sum(c.seconds for c in others) > joint.seconds:
                continue
            for mover in list(bits(movers)):
                self._absorb(mover, host)
            return True
        return False

    def _absorb(self, item: int, host: int) -> None:
        """Put an item into another one's stage for good."""
        one, to = 1 << item, 1 << host
        cuts = []
        for cut in self.cuts:
            if cut.items & one:
                source = host if cut.source == item else cut.source
                cut = replace(cut, items=cut.items & ~one | to, source=source)
            if cut.items.bit_count() > 1:
                cuts.append(cut)
        self.cuts = cuts
        for table, mirror in ((self.before, self.after), (self.after, self.before)):
            for other in bits(table[item]):
                mirror[other] &= ~one
                if other != host:
                    mirror[other] |= to
                    table[host] |= 1 << other
            table[item] = 0
        self.alive.discard(item)
        nodes = self.problem.items[host].nodes
        self.ends.append(_End(self.problem.items[item], frozenset([nodes]), True))

    def _drop(self, item: int, near: int, first: bool) -> None:
        """Take an item out; it follows the first or the last of its neighbours."""
        one = 1 << item
        cuts = []
        for cut in self.cuts:
            if cut.items & one:
                source = near.bit_length() - 1 if cut.source == item else cut.source
                cut = replace(cut, items=cut.items & ~one, source=source)
            if cut.items.bit_count() > 1:
                cuts.append(cut)
        self.cuts = cuts
        for table, mirror in ((self.before, self.after), (self.after, self.before)):
            for other in bits(table[item]):
                mirror[other] &= ~one
            table[item] = 0
        self.alive.discard(item)
        nodes = frozenset(self.problem.items[other].nodes for other in bits(near))
        self.ends.append(_End(self.problem.items[item], nodes, first))

    def result(self) -> Problem:
        kept = sorted(self.alive)
        new = {number: position for position, number in enumerate(kept)}

        def moved(mask: int) -> int:
            return _mask(new[item] for item in bits(mask))

        return Problem(
            tuple(self.problem.items[number] for number in kept),
            tuple(moved(self.before[number]) for number in kept),
            tuple(replace(c, items=moved(c.items), source=new[c.source]) for c in self.cuts),
            self.problem.charge,
            tuple(self.ends),
        )


def assign(problem: Problem, stages: Sequence[int]) -> dict[tuple[Hashable, ...], int]:
    """The stage of every item, those that were taken out included.

    Args:
        problem: reduced or not.
        stages: masks of items, in order.
    """
    found = {
        problem.items[item].nodes: stage for stage, mask in enumerate(stages) for item in bits(mask)
    }
    for end in reversed(problem.ends):
        near = [found[nodes] for nodes in end.near]
        found[end.item.nodes] = min(near) if end.first else max(near)
    return found
