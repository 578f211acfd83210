"""The norm of the gradients of a model that is spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipelane.errors import AnomalyError
from pipelane.runtime.boundary import DTYPES
from pipelane.runtime.group import Ranks

__all__ = ["ClipGroup"]


class ClipGroup:
    """Clips gradients as one process would.

    ``torch.nn.utils.clip_grad_norm_`` takes the norm of the parameters' norms. So each rank gives
    those of its own parameters, everybody has all of them in the model's order, and the norm of
    these is the same everywhere, and that of one process, to the last bit.

    Args:
        ranks: the pipeline's ranks.
        names: of all parameters of the model, in order, tied ones under their first name.
        own: this rank's parameters.
    """

    def __init__(
        self,
        ranks: Ranks,
        names: Sequence[str],
        own: Callable[[], Iterator[tuple[str, nn.Parameter]]],
    ) -> None:
        self._ranks = ranks
        self._place = {name: place for place, name in enumerate(names)}
        self._own = own

    @torch.no_grad()
    def __call__(
        self, max_norm: float, norm_type: float, error_if_nonfinite: bool, device: torch.device
    ) -> Tensor:
        """The norm before clipping; see ``Pipeline.clip_grad_norm_``."""
        count = len(self._place)
        table = torch.zeros(2, count, dtype=torch.float64)
        gradients = []
        for name, parameter in self._own():
            gradient = parameter.grad
            if gradient is None:
                continue
            gradients.append(gradient)
            place = self._place.get(name)
            if place is None:
                continue  # a copy of a tied weight, which counts at its first name
            norm = torch.linalg.vector_norm(gradient, norm_type)
            table[0, place] = norm.item()
            table[1, place] = 1 + DTYPES.index(norm.dtype)
        if self._ranks.size > 1 and count:
            # Of each column all but one rank give zeros, so the sum is exact.
            work = dist.all_reduce(table, group=self._ranks.control, async_op=True)
            assert work is not None
            self._ranks.finish(work, "the sum of gradient norms")
        norms = [
            torch.tensor(value, dtype=DTYPES[int(code) - 1])
            for value, code in zip(*table.tolist(), strict=True)
            if code
        ]
        if not norms:
            return torch.zeros((), device=device)
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        if error_if_nonfinite and not torch.isfinite(total):
            raise AnomalyError(
                f"the norm of the gradients is {total.item()}, so they cannot be clipped; look at "
                "the data and the learning rate, or build the pipeline with detect_anomaly=True "
                "for the layer where it begins"
            )
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))
        found: Tensor = total.to(device)
        return found
