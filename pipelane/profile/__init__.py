"""Seconds and bytes of each layer of a chain."""

from pipelane.profile.measure import profile
from pipelane.profile.types import LayerProfile, Profile, SharedParameter

__all__ = ["LayerProfile", "Profile", "SharedParameter", "profile"]
