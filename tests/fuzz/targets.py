"""All targets. A new parser gets a function with ``@target`` in one of these modules."""

from fuzz import disk_targets, local_targets, wire_targets
from fuzz.harness import TARGETS

__all__ = ["MODULES", "TARGETS"]

MODULES = (wire_targets, disk_targets, local_targets)
