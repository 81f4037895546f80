"""The part of a broadcast that maps class names to ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fcil_protocol.errors import SchemaMismatch
from fcil_protocol.messages.messages import RoundOpen
from fcil_protocol.payloads.builtin import EVALUATE, REGISTRY, REGISTRY_SCHEMA
from fcil_protocol.payloads.payload import Payload


def read_registry(part: Payload | None) -> dict[str, int]:
    """Return name -> id of the classes in the server's registry part.

    Raises:
        SchemaMismatch: the part is missing or not of the protocol's form.
    """
    if part is None:
        raise SchemaMismatch(f"the server's order names no part {REGISTRY!r}.")
    faults = REGISTRY_SCHEMA.check(part, {})
    if faults:
        raise SchemaMismatch(f"the server's part {REGISTRY!r}: {'; '.join(faults[:5])}.")
    names, ids = part.meta["names"], part.i64("class").tolist()
    assert isinstance(names, list), "the schema says so"
    if len(names) != len(ids):
        raise SchemaMismatch(
            f"the server's part {REGISTRY!r} has {len(names)} names for {len(ids)} ids."
        )
    return {str(name): int(number) for name, number in zip(names, ids, strict=True)}


@dataclass
class Learned:
    """Finds images that arrive too late: those of classes that earlier tasks have learned.

    They are tested and not trained (docs/decisions/0015).

    Attributes:
        names: classes of which this client holds such images.
    """

    names: set[str] = field(default_factory=set)
    _run: str = ""
    _counts: dict[str, int] = field(default_factory=dict)  # images trained with, or reported

    def unreported_names(
        self, order: RoundOpen, ids: Mapping[str, int], held: Mapping[str, int]
    ) -> list[str]:
        """Return the class names with images that have not been reported.

        Args:
            order: the round that the client is asked to do.
            ids: the class names that the client holds, with their ids.
            held: number of training images per class.
        """
        if order.run != self._run:
            self.names, self._run, self._counts = set(), order.run, {}
        past, now = set(order.past), set(order.classes)
        late = sorted(
            name
            for name, number in ids.items()
            if number in past and held.get(name, 0) > self._counts.get(name, 0)
        )
        training = [n for n, number in ids.items() if number in now and order.kind != EVALUATE]
        self._counts.update({name: held.get(name, 0) for name in (*late, *training)})
        self.names.update(late)
        return late
