"""Checks of collected facts, one function each, and nothing but that: they ask no system.

Every module registers its checks where it is imported, so all are imported here.
"""

from fcil_client.doctor.checks import (
    daemon,
    disk,
    engines,
    images,
    machine,
    membership,
    network,
)

__all__ = ["daemon", "disk", "engines", "images", "machine", "membership", "network"]
