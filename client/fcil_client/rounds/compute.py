"""The workplace of a client: its own worker process, or one shared by a swarm."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fcil_adapters.contract import BackboneInfo, backbone_info
from fcil_adapters.worker.host import WorkerHost
from fcil_adapters.worker.pipe import Fields
from fcil_adapters.worker.retry import Effort, persist
from fcil_client.rounds.options import ClientOptions
from fcil_client.rounds.resources import resources
from fcil_protocol.messages.messages import BackboneClaim
from fcil_protocol.payloads.payload import unpack

WORKER_IDLE_S = 600.0
AT_ONCE = 3  # rounds between opening their broadcast and sealing their update


@dataclass(frozen=True)
class LoadedBackbone:
    """A backbone that the worker has loaded, as the worker describes it.

    Attributes:
        device: for people.
        claim: digest, preprocessing and probe features, as in a Hello.
    """

    device: str
    info: BackboneInfo
    claim: BackboneClaim


class Workplace:
    """A worker process, and the facts learned about it.

    The worker does one thing at a time, in the order of requests; for all its clients it keeps one
    backbone warm, and decoded images up to one limit.

    Args:
        options: the resources that it may use.
        log: file for the worker's output.
        remembers: request the description of a backbone once, for many clients that need the same.

    Attributes:
        host: the worker.
        effort: number of images that fit into one pass, as far as failures have shown.
        resources: its share of the machine.
        turn: held by the caller of the worker, retries included.
        room: held by a round while its broadcast, state and update are in memory. It is granted in
            the order of requests, so the rounds of many clients take fair turns.
    """

    def __init__(self, options: ClientOptions, log: Path, *, remembers: bool = False) -> None:
        self.effort = Effort(options.micro_batch)
        self.resources = resources(
            threads=options.threads,
            nice=options.nice,
            bound=options.max_memory,
            image_bytes=options.image_bytes,
        )
        self.host = WorkerHost(
            "fcil_client.rounds.worker",
            name="client",
            threads=self.resources.threads,
            nice=options.nice,
            memory_bytes=options.max_memory,
            idle_s=WORKER_IDLE_S,
            stall_s=options.work_timeout_s or None,
            log=log,
        )
        self.turn = asyncio.Lock()
        self.room = asyncio.Semaphore(AT_ONCE)
        self._remembers = remembers
        self._asking = asyncio.Lock()
        self._run = ""
        self._known: tuple[Fields, LoadedBackbone] | None = None

    def suspend(self, still: bool) -> None:
        """Suspend the worker, or let it resume."""
        (self.host.rest.suspend if still else self.host.rest.resume)()

    def enter(self, run: str) -> None:
        """Forget the pass sizes of another run, which has another method or backbone."""
        if run != self._run:
            self._run = run
            self.effort.fits.clear()

    async def backbone(self, fields: Fields) -> LoadedBackbone:
        """Have the worker load a backbone and compute its probe features.

        Args:
            fields: the backbone, as `Engine.backbone` expects it.

        Raises:
            FcilError: it cannot be loaded.
        """
        async with self._asking:
            # Every later call names its backbone and is refused if another one is loaded by then.
            if self._known is None or self._known[0] != fields or not self._remembers:
                async with self.turn:
                    reply, blobs = await persist(self.host, self.effort, "backbone", fields)
                info = backbone_info.backbone_from_fields(reply["info"])
                probe = unpack(blobs[0]).f32("probe")
                claim = BackboneClaim(
                    digest=info.digest,
                    preprocessing=backbone_info.preprocessing_digest(info.preprocessing),
                    probe=np.ascontiguousarray(probe, dtype="<f4").tobytes(),
                )
                self._known = (fields, LoadedBackbone(str(reply["description"]), info, claim))
            return self._known[1]
