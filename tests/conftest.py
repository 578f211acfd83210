"""Shared by all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Machines are shared and slow at times: examples have no deadline, tests have pytest-timeout.
settings.register_profile(
    "pipelane", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("pipelane")
