"""The complete examination: facts first, several at a time, then lines in reading order."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.backbones.known import EMBEDDED_DIGEST, embedded_file
from fcil_client.doctor import clients
from fcil_client.doctor.checks import (
    backbone,
    daemon,
    disk,
    engines,
    images,
    machine,
    membership,
    network,
)
from fcil_client.doctor.checks.backbone import BackboneFacts, Loaded, Wanted
from fcil_client.doctor.checks.engines import EngineFacts
from fcil_client.doctor.checks.images import ImageFacts
from fcil_client.doctor.checks.line import IDS, Line, guarded, of_client
from fcil_client.doctor.checks.machine import JetsonNeed, MachineFacts, MemoryNeed
from fcil_client.doctor.clients import ClientFacts
from fcil_client.doctor.probes import (
    client as look_client,
)
from fcil_client.doctor.probes import (
    disk as look_disk,
)
from fcil_client.doctor.probes import (
    engines as look_engines,
)
from fcil_client.doctor.probes import (
    images as look_images,
)
from fcil_client.doctor.probes import (
    machine as look_machine,
)
from fcil_client.doctor.probes.engines import Bench
from fcil_client.membership.enrol import join_files
from fcil_client.rounds.resources import resources
from fcil_client.state.home import Home
from fcil_client.swarm import status as swarm_status
from fcil_protocol.errors import FcilError

FORWARD_S = 90.0  # for loading and running a backbone: a cold disk and a small board are slow
PROGRESS_S = 2.0


@dataclass(frozen=True)
class Wishes:
    """Options of the command line."""

    data: Path | None = None
    server: str | None = None
    ticket: Path | None = None
    device: str = "auto"
    engine: str = "auto"
    weights: Path | None = None


class Examination:
    """One run of all checks.

    Args:
        wishes: of the command line.
        stdin: possible source of a ticket.
        say: shows the current step.
    """

    def __init__(self, wishes: Wishes, stdin: BinaryIO, say: Callable[[str], None]) -> None:
        self._wishes = wishes
        self._stdin = stdin
        self._say = say
        self._machine: MachineFacts | None = None
        self._images: ImageFacts | None = None
        self._known: list[Home] = []
        self._clients: list[ClientFacts] = []
        self._wanted: Wanted | None = None
        self._engines: EngineFacts | None = None
        self._loaded: Loaded | None = None
        self._shown = time.monotonic()

    def lines(self) -> list[Line]:
        """Return all lines, section by section."""
        with Bench() as bench, ThreadPoolExecutor(1) as beside:
            self._say("looking at this machine")
            about_machine = guarded(machine.SYSTEM, self._about_machine)
            # torch takes seconds to import, in its own process: meanwhile the other checks run.
            engine = beside.submit(guarded, engines.NAMES, lambda: self._about_engines(bench))
            self._say("looking at clients and their servers")
            homes = guarded(membership.NAMES, self._look_clients)
            per_client = guarded(network.NAMES, self._about_clients)
            self._say("looking at images")
            about_images = guarded(images.NAMES, self._about_images)
            about_engines = engine.result()
            self._say("running the backbone")
            about_backbone = guarded(backbone.NAMES, lambda: self._about_backbone(bench))
            about_disk = guarded(disk.NAMES, self._about_disk)
        memory = guarded(["machine.memory"], self._about_memory)
        last = guarded(["machine.shared_gpu"], self._about_sharing)
        jetson = guarded(["machine.jetson"], self._about_jetson)
        units = guarded(["daemon.unit"], lambda: daemon.unit_lines(look_client.look_units()))
        found = [
            *about_machine, *memory, *last, *jetson, *about_engines, *about_backbone,
            *about_images, *homes, *per_client, *about_disk, *units,
        ]  # fmt: skip
        return in_order(found)

    # --- the machine ------------------------------------------------------------------------

    def _about_machine(self) -> list[Line]:
        self._machine = look_machine.look()
        return [*machine.system_lines(self._machine), *machine.core_lines(self._machine)]

    def _about_memory(self) -> list[Line]:
        if self._machine is None:
            return []
        need = MemoryNeed()
        if self._loaded is not None:
            count = self._images.images("train", "select", "test") if self._images else 0
            pixels = count * self._loaded.size**2 * 3
            need = MemoryNeed(self._loaded.peak_bytes, min(pixels, resources().image_bytes))
        return machine.memory_lines(self._machine, need)

    def _about_jetson(self) -> list[Line]:
        if self._machine is None:
            return []
        have = JetsonNeed()
        if self._engines is not None:
            gpus = bool(self._engines.torch and self._engines.torch.gpus)
            have = JetsonNeed(gpus, self._engines.onnx.usable if self._engines.onnx else ())
        return machine.jetson_lines(self._machine, have)

    def _about_sharing(self) -> list[Line]:
        devices = {}
        for home in _all():
            status = look_client.look_daemon(home, "").status
            if status is not None:
                devices[str(status["name"])] = str(status.get("device") or "")
        return machine.shared_gpu_lines(membership.by_device(devices))

    def _about_engines(self, bench: Bench) -> list[Line]:
        jetson = bool(self._machine and self._machine.jetson)
        driver = look_machine.nvidia_driver()
        self._engines = look_engines.look(
            bench, self._wishes.engine, self._wishes.device, driver, jetson=jetson
        )
        return engines.lines(self._engines)

    # --- clients ----------------------------------------------------------------------------

    def _homes(self) -> list[Home]:
        data, server = self._wishes.data, self._wishes.server
        homes = Home.known(data) or Home.with_journal(data) if data is not None else _all()
        return [home for home in homes if server is None or _means(home, server)]

    def _look_clients(self) -> list[Line]:
        self._known = self._homes()
        found: list[Line] = []
        with ThreadPoolExecutor(8) as pool:
            for lines in pool.map(self._look_client, self._known):
                found += lines
        self._wanted = next((c.wanted for c in self._clients if c.wanted is not None), None)
        return found

    def _look_client(self, home: Home) -> list[Line]:
        def look() -> list[Line]:
            self._clients.append(clients.look(home))
            return []

        return of_client(home.directory.name, guarded(membership.NAMES, look))

    def _about_clients(self) -> list[Line]:
        ticket = None
        if self._wishes.ticket is not None:
            ticket = look_client.look_ticket(self._wishes.ticket, self._stdin)
        if not self._known:
            return self._about_stranger(ticket)
        found: list[Line] = []
        for client in self._clients:
            found += of_client(client.name, self._about_client(client))
        if ticket is not None:
            ticket, _ = clients.look_ticket(ticket)
        return [*found, membership.ticket_line(ticket)]

    def _about_client(self, client: ClientFacts) -> list[Line]:
        running = client.daemon.status is not None
        return [
            *guarded(membership.NAMES, lambda: membership.lines(client.member)),
            *guarded(network.NAMES, lambda: network.lines(client.network)),
            *guarded(["disk.caches"], lambda: disk.holding_lines(client.holding, running=running)),
            *guarded(daemon.NAMES, lambda: daemon.lines(client.daemon)),
        ]

    def _about_stranger(self, ticket: membership.TicketFacts | None) -> list[Line]:
        data, server = self._wishes.data, self._wishes.server
        way, ticket, wanted = clients.look_stranger(data, server, ticket)
        self._wanted = self._wanted or wanted
        who = membership.nobody() if data is None else membership.not_enrolled(str(data))
        return [
            *who,
            membership.ticket_line(ticket),
            *network.lines(way),
            *disk.no_holdings(),
            *daemon.no_client(),
        ]

    # --- images, backbone, disk -------------------------------------------------------------

    def _about_images(self) -> list[Line]:
        data, home = self._wishes.data, None
        if len(self._clients) == 1:
            home = self._clients[0].home
            data = data or self._clients[0].data
        if data is None:
            return images.no_folder(several=len(self._clients) > 1)
        self._images = look_images.look(data, home, self._scanned)
        return images.lines(self._images)

    def _scanned(self, done: int, total: int) -> None:
        if time.monotonic() - self._shown > PROGRESS_S:
            self._shown = time.monotonic()
            self._say(f"looking at images: {done:,} of {total:,}")

    def _about_backbone(self, bench: Bench) -> list[Line]:
        wanted = self._wanted or clients.embedded()
        facts = BackboneFacts(wanted, reference=_reference(wanted))
        if self._images is not None:
            facts = replace(facts, images=self._images.images("train"))
        if not wanted.needed:
            return backbone.lines(facts)
        if any(c.daemon.status and c.daemon.status.get("round") for c in self._clients):
            why = "a client works on a round now, and a second backbone would be in its way"
            return backbone.lines(replace(facts, skipped=why))
        try:
            self._loaded = self._forward(bench, wanted)
        except FcilError as error:
            return backbone.lines(replace(facts, error=error))
        return backbone.lines(replace(facts, loaded=self._loaded))

    def _forward(self, bench: Bench, wanted: Wanted) -> Loaded:
        bench.close()  # a child of its own, whose memory is that of one engine and the backbone
        weights = str(self._wishes.weights) if self._wishes.weights else wanted.weights
        fields = bench.ask(
            "forward",
            FORWARD_S,
            engine=self._wishes.engine,
            gradient=wanted.gradient,
            name=wanted.name,
            weights=weights or None,
            device=self._wishes.device,
        )
        return Loaded.from_fields(fields)

    def _about_disk(self) -> list[Line]:
        held = sum(sum(c.holding.sizes.values()) for c in self._clients)
        return disk.lines(look_disk.look(), held)


def in_order(found: list[Line]) -> list[Line]:
    """Return lines in reading order: by section, then by client, the machine's own first."""
    ids, named = list(IDS), ["", *dict.fromkeys(line.client for line in found if line.client)]
    sections = list(dict.fromkeys(name.partition(".")[0] for name in IDS))

    def place(line: Line) -> tuple[int, int, int]:
        return sections.index(line.section), named.index(line.client), ids.index(line.id)

    return sorted(found, key=place)


def _all() -> list[Home]:
    """Return all homes; of a swarm one, since its members share machine, worker and network."""
    homes = Home.all()
    inside = swarm_status.in_swarms(homes)
    first = {record.directory: where for where, record in reversed(inside.items())}
    return [h for h in homes if h.directory not in inside or h.directory in first.values()]


def _means(home: Home, server: str) -> bool:
    try:
        enrolment = home.enrolment()
    except FcilError:  # reported as damaged elsewhere
        return True
    if enrolment is None:
        return False
    names = [j.name for j in join_files() if j.federation == enrolment.federation]
    return server in (enrolment.federation, *enrolment.addresses, *names)


def _reference(wanted: Wanted) -> NDArray[np.float32] | None:
    """Return the features of the shipped images, if the package contains them."""
    if wanted.digest != EMBEDDED_DIGEST:
        return None
    features: NDArray[np.float32] = np.load(embedded_file(".probe.npy"))
    return features
