"""iCaRL's part of a broadcast (torch-free)."""

from __future__ import annotations

MEANS = "means"  # the part with the class means of all seen classes
