"""Every exception that pipelane raises on purpose.

Each message says what was wrong, where (rank, stage, micro-batch or layer) and what to do.
All classes derive from :class:`PipelaneError`; those for bad input also derive from
``ValueError``, so that code which does not know pipelane can still catch them.
"""

from __future__ import annotations

__all__ = [
    "AnomalyError",
    "BoundaryError",
    "CheckError",
    "ConfigError",
    "InputError",
    "LaunchError",
    "LossError",
    "ModelError",
    "PartitionError",
    "PipelaneError",
    "PipelineFailure",
    "ProfileError",
    "ScheduleError",
]


class PipelaneError(Exception):
    """Base class of all errors raised by pipelane."""


class ConfigError(PipelaneError, ValueError):
    """An argument is wrong, or ranks were given different arguments."""


class ScheduleError(PipelaneError, ValueError):
    """A schedule is unknown, malformed, or impossible for the given sizes."""


class CheckError(ScheduleError):
    """A schedule is incomplete, breaks a dependency, or can deadlock."""


class ModelError(PipelaneError, ValueError):
    """The model cannot be cut into stages as it is."""


class ProfileError(PipelaneError, ValueError):
    """A layer could not be profiled."""


class PartitionError(PipelaneError, ValueError):
    """No partition exists for the given layers, stages and memory."""


class InputError(PipelaneError, ValueError):
    """A batch or a target does not fit the pipeline."""


class LossError(PipelaneError, ValueError):
    """The loss function did not return what a loss function must return."""


class AnomalyError(PipelaneError, ArithmeticError):
    """A value or a gradient is not finite, found with ``detect_anomaly=True``."""


class BoundaryError(PipelaneError, ValueError):
    """A stage produced a value that cannot be sent to the next stage."""


class PipelineFailure(PipelaneError, RuntimeError):
    """Another rank failed, or a peer did not answer within the timeout."""


class LaunchError(PipelaneError, RuntimeError):
    """A process started by the local launcher failed.

    Attributes:
        rank: the rank that failed first.
        failures: rank -> traceback or how the process ended, for all that failed.
    """

    def __init__(self, message: str, rank: int, failures: dict[int, str]) -> None:
        super().__init__(message)
        self.rank = rank
        self.failures = failures
