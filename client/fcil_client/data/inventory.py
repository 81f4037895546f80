"""What a client's folder holds, and what of it is announced."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fcil_protocol.payloads.payload import Payload


@dataclass
class Inventory:
    """What a scan found; class names and counts are told to the server."""

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

    def told(self, least: int) -> Inventory:
        """Return what may be announced if a class needs ``least`` images on a side."""
        train, test = (
            {name: n for name, n in side.items() if n >= least} for side in (self.train, self.test)
        )
        return Inventory(train, test)

    def payload(self) -> Payload:
        """Return what is announced; it keeps ``payloads.builtin.INVENTORY_SCHEMA``."""
        names = self.names
        return Payload(
            {
                "train": np.array([self.train.get(n, 0) for n in names], np.int64),
                "test": np.array([self.test.get(n, 0) for n in names], np.int64),
            },
            {"names": names},
        )
