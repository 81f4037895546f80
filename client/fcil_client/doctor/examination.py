"""The whole examination: probes collect facts, several at a time, and then all checks are run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.backbones.known import EMBEDDED_DIGEST, embedded_file
from fcil_client.doctor.checks.facts import (
    BackboneFacts,
    ClientFacts,
    DoctorFacts,
    EngineFacts,
    ImageFacts,
    Loaded,
    NetworkFacts,
    Skip,
    TicketFacts,
    Wanted,
)
from fcil_client.doctor.checks.findings import Finding, of_error
from fcil_client.doctor.checks.register import examine
from fcil_client.doctor.probes import clients, engines, images, system
from fcil_client.membership.enrol import home_is_of_server
from fcil_client.state.home import Home
from fcil_client.swarm import status as swarm_status
from fcil_protocol.errors import FcilError

T = TypeVar("T")
PROGRESS_S = 2.0


@dataclass(frozen=True)
class Wishes:
    """Requests from the command line."""

    data: Path | None = None
    server: str | None = None
    ticket: Path | None = None
    device: str = "auto"
    engine: str = "auto"
    weights: Path | None = None


class Examination:
    """One complete examination.

    Args:
        wishes: of the command line.
        stdin: where a ticket may come from.
        notify: shows the current subject.
    """

    def __init__(self, wishes: Wishes, stdin: BinaryIO, notify: Callable[[str], None]) -> None:
        self._wishes = wishes
        self._stdin = stdin
        self._notify = notify
        self._facts = DoctorFacts()
        self._broken: list[Finding] = []
        self._shown = time.monotonic()

    def findings(self) -> list[Finding]:
        """Return what all checks find, in the order of reading."""
        facts, guard = self._facts, self._guard
        with ThreadPoolExecutor(1) as beside:
            self._notify("checking this machine")
            facts.machine = guard("machine.system", system.look_machine)
            # torch takes seconds to import, in its own process: meanwhile the rest is looked at.
            engine = beside.submit(guard, "engine.installed", self._look_engines)
            self._notify("checking clients and their servers")
            homes = guard("membership.enrolment", self._homes) or []
            facts.ticket, way = guard("network.path", self._look_ticket) or (None, None)
            facts.clients = self._look_clients(homes) if homes else self._look_stranger(way)
            self._notify("checking images")
            facts.images = guard("images.folder", self._look_images)
            facts.engines = engine.result()
            self._notify("running the backbone")
            facts.backbone = guard("backbone.which", self._look_backbone)
            held = sum(sum(c.holding.sizes.values()) for c in facts.clients if c.holding)
            facts.disk = guard("disk.space", lambda: system.look_disk(held))
        facts.on_gpu = guard("machine.shared_gpu", _on_gpus)
        facts.units = guard("daemon.unit", system.look_units)
        return examine(facts, sorted(self._broken, key=lambda finding: finding.client))

    def _guard(self, check: str, probe: Callable[[], T], client: str = "") -> T | None:
        """Return what a probe collects; if it breaks, None, and a finding of the check named."""
        try:
            return probe()
        except Exception as error:
            self._broken.append(replace(of_error(error), id=check, client=client))
            return None

    def _look_engines(self) -> EngineFacts:
        machine, driver = self._facts.machine, system.nvidia_driver()
        jetson = bool(machine and machine.jetson)
        return engines.look(self._wishes.engine, self._wishes.device, driver, jetson=jetson)

    # --- clients ----------------------------------------------------------------------------

    def _homes(self) -> list[Home]:
        data, server = self._wishes.data, self._wishes.server
        homes = Home.known(data) or Home.with_journal(data) if data is not None else _all()
        return [home for home in homes if server is None or _is_of_server(home, server)]

    def _look_clients(self, homes: list[Home]) -> list[ClientFacts]:
        def look(home: Home) -> ClientFacts | None:
            name = home.directory.name
            return self._guard("membership.enrolment", lambda: clients.look(home), name)

        with ThreadPoolExecutor(8) as pool:
            return [client for client in pool.map(look, homes) if client is not None]

    def _look_stranger(self, way: NetworkFacts | None) -> list[ClientFacts]:
        data, server = self._wishes.data, self._wishes.server
        found = self._guard("network.path", lambda: clients.look_stranger(data, server, way))
        return [] if found is None else [found]

    def _look_ticket(self) -> tuple[TicketFacts, NetworkFacts | None]:
        source = self._wishes.ticket
        if source is None:
            return TicketFacts(), None
        return clients.try_ticket(clients.look_ticket(source, self._stdin))

    # --- images and backbone ----------------------------------------------------------------

    def _look_images(self) -> ImageFacts | Skip:
        known = self._facts.clients
        only = known[0] if len(known) == 1 else None
        data = self._wishes.data or (only.data if only else None)
        if data is not None:
            return images.look(data, only.home if only else None, self._scanned)
        why = "there are several clients; name a folder" if known[1:] else "no folder was named"
        return Skip(f"{why}: --data FOLDER")

    def _scanned(self, done: int, total: int) -> None:
        if time.monotonic() - self._shown > PROGRESS_S:
            self._shown = time.monotonic()
            self._notify(f"checking images: {done:,} of {total:,}")

    def _look_backbone(self) -> BackboneFacts:
        wanted = next((c.wanted for c in self._facts.clients if c.wanted), clients.embedded())
        found = self._facts.images
        train = found.images("train") if isinstance(found, ImageFacts) else 0
        return BackboneFacts(wanted, self._load(wanted), _reference(wanted), train)

    def _load(self, wanted: Wanted) -> Loaded | FcilError | Skip:
        if not wanted.needed:
            return Skip("no backbone is needed")
        daemons = [c.daemon for c in self._facts.clients if c.daemon]
        if any(daemon.status and daemon.status.get("round") for daemon in daemons):
            return Skip("a client is working on a round, and a second backbone would slow it down")
        given = replace(wanted, weights=str(self._wishes.weights or wanted.weights))
        try:
            return engines.load(given, self._wishes.engine, self._wishes.device)
        except FcilError as error:
            return error


def _all() -> list[Home]:
    """Return all homes; of a swarm one, since its members share machine, worker and network."""
    homes = Home.all()
    inside = swarm_status.swarms_of(homes)
    first = {record.directory: where for where, record in reversed(inside.items())}
    return [h for h in homes if h.directory not in inside or h.directory in first.values()]


def _is_of_server(home: Home, server: str) -> bool:
    try:
        return home_is_of_server(home, server)
    except FcilError:  # it is told as damaged
        return True


def _on_gpus() -> dict[str, list[str]]:
    found = (clients.look_daemon(home).status for home in _all())
    return by_device({str(s["name"]): str(s.get("device") or "") for s in found if s is not None})


def by_device(devices: Mapping[str, str]) -> dict[str, list[str]]:
    """Return GPU -> names of the clients on it, from what running clients say of their device."""
    found: dict[str, list[str]] = {}
    for name, words in devices.items():
        device = words.partition(" ")[0]
        if device.startswith("cuda"):
            found.setdefault("cuda:0" if device == "cuda" else device, []).append(name)
    return found


def _reference(wanted: Wanted) -> NDArray[np.float32] | None:
    """Return the features of the shipped images, where the package brings them."""
    if wanted.digest != EMBEDDED_DIGEST:
        return None
    features: NDArray[np.float32] = np.load(embedded_file(".probe.npy"))
    return features
