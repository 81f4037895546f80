"""A round's updates as a method's server half reads them in the worker: pulled as they are needed.

The daemon opens updates on request, small ones several at a time. The worker requests the next ones
before it uses the current ones, so that the daemon opens them meanwhile. Opened updates are kept
for the next pass as long as they fit; so memory does not depend on the number of clients, and few
rounds open an update twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from fcil_adapters.contract import Update
from fcil_adapters.contract.half_precision import EXACT, Forms
from fcil_adapters.worker.loop import Call, Question
from fcil_adapters.worker.memory_files import Blob
from fcil_protocol.errors import WireError
from fcil_protocol.ids import ClientId
from fcil_protocol.payloads.builtin import without_training_metrics
from fcil_protocol.payloads.payload import Payload, unpack
from fcil_server.aggregation.staleness import Move, unmoved

# Size of opened updates that stay for further passes: 55 of LoRA with a head, 1 of HePCo's largest
# pools. To open an update of 30 MB again takes less than 0.1 s of CPU
# (docs/benchmarks/aggregation-cost.md).
KEPT_BYTES = 48 << 20
# Of an update that does not stay, tensors up to this size are copied, so that a reference to a
# count or a row does not keep all of it in memory.
COPIED_BYTES = 64 << 10
MOST_ASKED = 32  # updates in one request; the answer holds the first of them, at least one


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
    """`contract.Updates`, pulled from the daemon when their turn comes.

    In addition to the kept ones, those of one answer are in use and those of the next on their way:
    a large update each, or several small ones.

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
        coming = self._ask(missing, 0)
        came: deque[Blob] = deque()
        for number, client in zip(self.numbers, self.clients, strict=True):
            if missing and missing[0] == number:
                if not came:
                    assert coming is not None, "it was asked for"
                    came.extend(self._receive(coming, len(missing)))
                    coming = self._ask(missing, len(came))
                missing.popleft()
                blob = came.popleft()
                payload = self.kept.offer(number, without_training_metrics(unpack(blob)), len(blob))
                del blob  # freed with the last view of it
            else:
                payload = self.kept.payloads[number]
            update = Update(client, self.move(number, self.forms.widen(payload)))
            self.look(update)
            yield update

    def _ask(self, missing: deque[int], received: int) -> Question | None:
        """Ask for the missing updates after those that were received."""
        numbers = list(islice(missing, received, received + MOST_ASKED))
        return self.call.ask_ahead({"updates": numbers}) if numbers else None

    def _receive(self, coming: Question, missing: int) -> list[Blob]:
        _fields, payloads = self.call.answer(coming)
        asked = min(missing, MOST_ASKED)
        if not 1 <= len(payloads) <= asked:
            raise WireError(f"1 to {asked} updates were expected, got {len(payloads)}.")
        return payloads

    def without(self, excluded: Collection[ClientId]) -> PulledUpdates:
        """Return the updates of all other clients."""
        rows = zip(self.clients, self.samples, self.numbers, strict=True)
        kept = [row for row in rows if row[0] not in excluded]
        clients, samples, numbers = zip(*kept, strict=True)
        return replace(self, clients=clients, samples=samples, numbers=numbers)
