"""Classes and image counts of a client's folder, and their announcement."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fcil_protocol.payloads.payload import Payload


@dataclass
class Inventory:
    """Result of a scan; class names and counts are announced to the server."""

    train: dict[str, int] = field(default_factory=dict)
    test: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Every class with an image on either side, sorted."""
        return sorted({*self.train, *self.test})

    def counts(self) -> dict[str, dict[str, int]]:
        """Return class name -> images for training and for testing."""
        return {n: {"train": self.train.get(n, 0), "test": self.test.get(n, 0)} for n in self.names}

    def announceable(self, least: int) -> Inventory:
        """Return the classes that may be announced if one needs ``least`` images on a side."""
        train, test = (
            {name: n for name, n in side.items() if n >= least} for side in (self.train, self.test)
        )
        return Inventory(train, test)

    def payload(self) -> Payload:
        """Return the announcement; it keeps ``payloads.builtin.INVENTORY_SCHEMA``."""
        names = self.names
        return Payload(
            {
                "train": np.array([self.train.get(n, 0) for n in names], np.int64),
                "test": np.array([self.test.get(n, 0) for n in names], np.int64),
            },
            {"names": names},
        )
