"""Staging in another process of this machine: the subscriber's end, and the line between both."""

from weight_bus.remote.intake import RemoteIntake, RemoteUpdate
from weight_bus.remote.line import Line

__all__ = ["Line", "RemoteIntake", "RemoteUpdate"]
