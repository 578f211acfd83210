"""Count bytes and operations while torch runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

__all__ = ["LiveBytes", "Roofline", "flops_of", "storage_of"]


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """What identifies the memory behind a tensor, and its bytes; works on "meta" as well."""
    if tensor.layout is not torch.strided:
        return id(tensor), tensor.nbytes
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()


def flops_of(run: Callable[[], object]) -> int:
    """Floating-point operations of what ``run`` does."""
    counter = FlopCounterMode(display=False)
    with counter:
        run()
    return int(counter.get_total_flops())


class LiveBytes(TorchDispatchMode):
    """The bytes of all storages that are made while it is active and still alive.

    Attributes:
        peak: the most at any time, between two operations.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._known = {storage_of(tensor)[0] for tensor in known}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor) and one.layout is torch.strided:
                key, size = storage_of(one)
                if key not in self._known:
                    self._made[key] = StorageWeakRef(one.untyped_storage()), size
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        """Bytes alive now."""
        self._made = {key: kept for key, kept in self._made.items() if not kept[0].expired()}
        return sum(size for _, size in self._made.values())

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now()


class Roofline(TorchDispatchMode):
    """Seconds that operations take at least: computing, or moving their bytes, whichever is more.

    Source: Williams, Waterman and Patterson, "Roofline" (CACM 2009). Views move nothing.

    Args:
        flops: operations per second of the device.
        bandwidth: bytes per second of its memory.
    """

    def __init__(self, flops: float, bandwidth: float) -> None:
        super().__init__()
        self._flops, self._bandwidth = flops, bandwidth
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {storage_of(x)[0]: x for x in tree_leaves((args, kwargs)) if _is_dense(x)}
        made = [x for x in tree_leaves(result) if _is_dense(x)]
        if made and all(storage_of(x)[0] in given for x in made) and not _writes(func):
            return result  # a view
        moved = sum(x.nbytes for x in (*given.values(), *made))
        count = flop_registry.get(func._overloadpacket)
        work = count(*args, **kwargs, out_val=result) if count is not None else 0
        self.seconds += max(work / self._flops, moved / self._bandwidth)
        return result


def _is_dense(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _writes(func: Any) -> bool:
    return bool(func._schema.is_mutable)
