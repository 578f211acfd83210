"""V-Half and V-Min: one building block, repeated; its stretch sets the memory."""

from __future__ import annotations

from pipelane.schedule import Schedule, Shape, snake_placement

from ._blocks import block, reordered, repeated
from ._chunks import default_chunks, require_chunks


@default_chunks(2)
def v_half(shape: Shape, *, plain: bool = False) -> Schedule:
    """A V whose activations live about half as long as 1F1B's longest ones.

    Source: controllable memory (arXiv 2405.15362, sections 3.2 and 3.3). In the block a
    micro-batch takes two units from rank to rank downwards and one upwards, forwards and
    backwards alike.

    Memory: about p + 2 chunks, half of 1F1B's; bubble about 3 p units of 6 m with
    the head and the tail reordered (the default), which the plain repetition does not reach.

    Args:
        shape: any p and m, two chunks.
        plain: keep the repeated block as it is.
    """
    return _repeated("v-half", shape, (2, 1, 2, 1), plain)


@default_chunks(2)
def v_min(shape: Shape, *, plain: bool = False) -> Schedule:
    """A V whose activations live as short as the way allows: about a third of 1F1B's.

    Source: controllable memory (arXiv 2405.15362, sections 3.2 and 3.3). In the block a
    micro-batch takes one unit from rank to rank all the way.

    Memory: about 2 p / 3 + 2 chunks, a third of 1F1B's; bubble about 4 p units of 6 m. It needs
    stages that take nearly the same time: any delay goes all the way through.

    Args:
        shape: any p and m, two chunks.
        plain: keep the repeated block as it is.
    """
    return _repeated("v-min", shape, (1, 1, 1, 1), plain)


def _repeated(name: str, shape: Shape, pace: tuple[int, int, int, int], plain: bool) -> Schedule:
    require_chunks(name, shape, 2)
    p, m = shape.ranks, shape.microbatches
    placement = snake_placement(shape)
    pattern = block(p, pace)
    orders = [repeated(pattern, rank, p, m) for rank in range(p)]
    if not plain:
        orders = reordered(orders, placement, m)
    return Schedule(name, shape, placement, tuple(map(tuple, orders)))
