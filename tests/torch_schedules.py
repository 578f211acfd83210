"""torch's own schedules, whose private tables the exchange of files is tested against."""

from __future__ import annotations

from typing import Any

import pytest


def torch_schedules() -> Any:
    """torch.distributed.pipelining.schedules; skips where torch is too old to have the tables."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    if not hasattr(schedules, "ScheduleDualPipeV"):
        pytest.skip("this torch keeps its schedules in another form")
    return schedules
