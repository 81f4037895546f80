"""Retries of a worker's failed work: once more, or with fewer images in one pass (torch-free).

`Effort` decides and remembers; `persist` carries its decisions out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fcil_adapters.contract import Progress
from fcil_adapters.worker.host import WorkerHost
from fcil_adapters.worker.memory_files import Blob
from fcil_adapters.worker.pipe import Blobs, Fields
from fcil_protocol.errors import OutOfMemory, WorkerDied, WorkerError

TRIES = 2  # of work whose worker died or stalled
UNKNOWN_BATCH = 256  # images in one pass where a method names no batch, and in evaluations


def batch_of(hparams: Any) -> int:
    """Return how many images a method takes at once if memory sets no limit."""
    batch = getattr(hparams, "batch_size", None)
    return batch if isinstance(batch, int) and batch > 0 else UNKNOWN_BATCH


@dataclass
class Effort:
    """Numbers of images that fit into one pass, by kind of work, and the reaction to a failure.

    Without IO. The numbers last as long as this object: the process, not the disk.

    Attributes:
        own: this side's setting of the most images in one pass; None: the entire batch.
        fits: kind of work -> images in one pass, where memory allows no more.
    """

    own: int | None = None
    fits: dict[str, int] = field(default_factory=dict)

    def most(self, work: str) -> int | None:
        """Return the most images in one pass; None: the entire batch."""
        return self.fits.get(work, self.own)

    def fewer(self, work: str, batch: int) -> bool:
        """Halve it after a lack of memory; return False if even one image does not fit.

        Args:
            work: kind of work.
            batch: images that it takes at once if memory sets no limit.
        """
        now = min(self.most(work) or batch, batch)
        if now <= 1:
            self.fits.pop(work, None)  # there may be memory again by the next round
            return False
        self.fits[work] = now // 2
        return True


def _quiet(_: str) -> None:
    return None


async def persist(
    host: WorkerHost,
    effort: Effort,
    op: str,
    fields: Fields,
    payloads: Blobs = (),
    *,
    batch: int = 1,
    on_progress: Callable[[Progress], None] | None = None,
    notify: Callable[[str], None] = _quiet,
) -> tuple[Fields, list[Blob]]:
    """Call an operation until it works or another try is useless.

    A lack of memory halves the images in one pass, down to one; the result is the same but for the
    order in which floating-point numbers are added. A worker that died or stalled gets a second try
    with nothing changed. Each try has a process of its own.

    Args:
        host: of the worker.
        effort: remembers the numbers that fit, by the kind in the fields' context.
        op: as for `WorkerHost.call`.
        fields: the same; a ``context`` in them gets its micro-batch here.
        payloads: the same.
        batch: images that work with a context takes at once if memory sets no limit.
        on_progress: as for `WorkerHost.call`.
        notify: called with a sentence about the next try.

    Raises:
        OutOfMemory: even one image at a time does not fit.
        WorkerDied, WorkerStalled: twice.
        FcilError: any other failure, at once.
    """
    context, deaths = fields.get("context"), 0
    work = op if context is None else str(context["kind"])
    while True:
        asked = fields
        if context is not None:
            asked = {**fields, "context": {**context, "micro_batch": effort.most(work)}}
        try:
            return await host.call(op, asked, payloads, on_progress=on_progress)
        except OutOfMemory as error:
            await host.stop()  # its memory is free when it is gone
            if context is None:
                raise
            if not effort.fewer(work, batch):
                raise OutOfMemory(
                    f"{error.message.rstrip('.')}, even with one image at a time.",
                    action=error.action,
                ) from error
            notify(f"{error.message} Trying again with {_images(effort.most(work))} in one pass")
        except WorkerDied as error:
            deaths += 1
            if deaths >= TRIES:
                raise _again(error, deaths) from error
            notify(f"{error.message} Trying once more")


def _images(count: int | None) -> str:
    return "one image" if count == 1 else f"{count} images"


def _again(error: WorkerError, times: int) -> WorkerError:
    return type(error)(f"{error.message} ({times} times)", action=error.action)
