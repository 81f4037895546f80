"""A round's updates as a method's server half reads them in the worker: pulled one by one.

The daemon opens an update on request. The worker requests the next one before it uses the current
one, so that the daemon opens it meanwhile. Opened updates are kept for the next pass as long as
they fit; so memory does not depend on the number of clients, and few rounds open an update twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace

from fcil_adapters.contract import Update
from fcil_adapters.contract.half_precision import EXACT, Forms
from fcil_adapters.worker.loop import Call, Question
from fcil_adapters.worker.memory_files import Blob
from fcil_protocol.errors import WireError
from fcil_protocol.ids import ClientId
from fcil_protocol.payloads.builtin import without_training_metrics
from fcil_protocol.payloads.payload import Payload, unpack
from fcil_server.aggregation.staleness import Move, unmoved

# Size of opened updates that stay for further passes: 110 of LoRA with a head, 3 of HePCo's largest
# pools. To open an update of 30 MB again takes less than 0.1 s of CPU
# (docs/benchmarks/aggregation-cost.md).
KEPT_BYTES = 96 << 20
# Of an update that does not stay, tensors up to this size are copied, so that a reference to a
# count or a row does not keep all of it in memory.
COPIED_BYTES = 64 << 10


@dataclass
class Kept:
    """Opened updates that stay in memory for further passes: the first that fit.

    The choice does not change the number of openings; the last ones would be needed last.
    """

    payloads: dict[int, Payload] = field(default_factory=dict)
    size: int = 0  # bytes

    def offer(self, number: int, payload: Payload, size: int) -> Payload:
        """Keep an update if there is room; return the payload to use."""
        if number in self.payloads:
            return self.payloads[number]
        if self.size + size > KEPT_BYTES:
            return _apart(payload)
        self.payloads[number] = payload
        self.size += size
        return payload


def _apart(payload: Payload) -> Payload:
    """Copy the small tensors, whose views would keep the large ones in memory."""
    tensors = {
        name: array.copy() if array.nbytes <= COPIED_BYTES else array
        for name, array in payload.tensors.items()
    }
    return replace(payload, tensors=tensors)


@dataclass(frozen=True)
class PulledUpdates:
    """`contract.Updates`, each pulled from the daemon when its turn comes.

    In addition to the kept ones, one update is in use and one on its way.

    Attributes:
        numbers: the daemon's number of each one.
        look: receives each update as it comes.
        forms: their form on the wire; methods get float32.
        kept: updates that further passes need not pull again.
        move: moves an update, by its number, from the state it starts from to the current one.
    """

    call: Call
    clients: tuple[ClientId, ...]
    samples: tuple[int, ...]
    numbers: tuple[int, ...]
    look: Callable[[Update], None] = lambda _update: None
    forms: Forms = EXACT
    kept: Kept = field(default_factory=Kept)
    move: Move = unmoved

    def __len__(self) -> int:
        return len(self.clients)

    def __iter__(self) -> Iterator[Update]:
        missing = deque(n for n in self.numbers if n not in self.kept.payloads)
        coming = self._ask(missing)
        for number, client in zip(self.numbers, self.clients, strict=True):
            if missing and missing[0] == number:
                assert coming is not None, "it was asked for"
                blob = self._receive(coming)
                missing.popleft()
                coming = self._ask(missing)
                payload = self.kept.offer(number, without_training_metrics(unpack(blob)), len(blob))
                del blob  # freed with the last view of it
            else:
                payload = self.kept.payloads[number]
            update = Update(client, self.move(number, self.forms.widen(payload)))
            self.look(update)
            yield update

    def _ask(self, missing: deque[int]) -> Question | None:
        """Ask for the next missing update."""
        return self.call.ask_ahead({"update": missing[0]}) if missing else None

    def _receive(self, coming: Question) -> Blob:
        _fields, payloads = self.call.answer(coming)
        if len(payloads) != 1:
            raise WireError(f"an update is one payload, got {len(payloads)}.")
        return payloads.pop()

    def without(self, excluded: Collection[ClientId]) -> PulledUpdates:
        """Return the updates of all other clients."""
        rows = zip(self.clients, self.samples, self.numbers, strict=True)
        kept = [row for row in rows if row[0] not in excluded]
        clients, samples, numbers = zip(*kept, strict=True)
        return replace(self, clients=clients, samples=samples, numbers=numbers)
