"""pipelane: pipeline-parallel scheduling for PyTorch.

Names are imported when first used, so that ``import pipelane`` stays fast and planning works
without loading torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelane.actions import Action as Action
    from pipelane.actions import Kind as Kind
    from pipelane.catalogue import build_schedule as build_schedule
    from pipelane.catalogue import schedule_names as schedule_names
    from pipelane.check import Certificate as Certificate
    from pipelane.check import check as check
    from pipelane.costs import Costs as Costs
    from pipelane.costs import Link as Link
    from pipelane.launch import launch as launch
    from pipelane.partition import Partition as Partition
    from pipelane.partition import partition as partition
    from pipelane.pipeline import Pipeline as Pipeline
    from pipelane.plan import Plan as Plan
    from pipelane.plan import plan as plan
    from pipelane.profile import Profile as Profile
    from pipelane.profile import profile as profile
    from pipelane.program import Program as Program
    from pipelane.program import lower as lower
    from pipelane.reference import reference as reference
    from pipelane.runtime.scaler import GradScaler as GradScaler
    from pipelane.schedule import Schedule as Schedule
    from pipelane.schedule import Shape as Shape
    from pipelane.simulate import simulate as simulate
    from pipelane.skips import pop as pop
    from pipelane.skips import skippable as skippable
    from pipelane.skips import stash as stash
    from pipelane.timeline import Timeline as Timeline
    from pipelane.trees import Inputs as Inputs
    from pipelane.trees import Shared as Shared

__version__ = "0.1.0"

_HOME = {
    "Action": "actions",
    "Kind": "actions",
    "build_schedule": "catalogue",
    "schedule_names": "catalogue",
    "Certificate": "check",
    "check": "check",
    "Costs": "costs",
    "Link": "costs",
    "launch": "launch",
    "Partition": "partition",
    "partition": "partition",
    "Pipeline": "pipeline",
    "Plan": "plan",
    "plan": "plan",
    "Profile": "profile",
    "profile": "profile",
    "Program": "program",
    "lower": "program",
    "reference": "reference",
    "GradScaler": "runtime.scaler",
    "Schedule": "schedule",
    "Shape": "schedule",
    "simulate": "simulate",
    "pop": "skips",
    "skippable": "skips",
    "stash": "skips",
    "Timeline": "timeline",
    "Inputs": "trees",
    "Shared": "trees",
}

__all__ = [*_HOME, "__version__", "errors"]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("pipelane.errors")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'pipelane' has no attribute {name!r}")
    value = getattr(import_module(f"pipelane.{home}"), name)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """Keeps ``pipelane.check`` the function, also after the module pipelane.check was imported.

    The import system binds a submodule to its package under its own name, which would hide the
    public function of the same name.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted(__all__)
