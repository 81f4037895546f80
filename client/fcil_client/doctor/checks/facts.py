"""DoctorFacts: what probes collect and checks look at.

Where something could not be found out, the fact is why: an error, or a `Skip`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fcil_client.state.home import Enrolment, Home, client_command
from fcil_protocol.errors import FcilError
from fcil_protocol.trust.ticket import Ticket


class Skip(Exception):
    """There is nothing to look at, or no way to; its text says why."""


@dataclass(frozen=True)
class MachineFacts:
    """Hardware and system of the machine."""

    system: str
    release: str
    arch: str
    python: str
    fcil: str
    cores: int  # that this process may run on
    quota: float | None  # cores' worth of time that its cgroup grants; None: no limit
    total_bytes: int
    available_bytes: int  # that can be had without swapping
    limit_bytes: int | None = None  # of its cgroup's memory; None: no limit
    limit_used_bytes: int = 0
    jetson: str = ""  # the board's name; empty if it is none
    l4t: str = ""  # of /etc/nv_tegra_release
    keep_bytes: int = 0  # most that a client's decoded images may take

    @property
    def free_bytes(self) -> int:
        """Memory that a client can have."""
        if self.limit_bytes is None:
            return self.available_bytes
        return max(0, min(self.available_bytes, self.limit_bytes - self.limit_used_bytes))


# --- what computes --------------------------------------------------------------------------


class Gpu(NamedTuple):
    """One device that torch sees."""

    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class TorchFacts:
    """Torch's report from a separate process."""

    version: str
    cuda: str = ""  # the version that it was built with; empty for a CPU build
    gpus: tuple[Gpu, ...] = ()
    why_not: str = ""  # a CUDA build sees no device


@dataclass(frozen=True)
class OnnxFacts:
    """Onnxruntime's report from a separate process."""

    version: str
    providers: Mapping[str, str]  # those it lists -> why one cannot be used; empty: it can


@dataclass(frozen=True)
class EngineFacts:
    """The installed engines and their abilities here. An error: one cannot be imported."""

    asked: str = "auto"  # with --engine
    device: str = "auto"  # with --device
    installed: Mapping[str, str] = field(default_factory=dict)  # distribution -> version
    torch: TorchFacts | FcilError | None = None
    onnx: OnnxFacts | FcilError | None = None
    driver: str = ""  # version of NVIDIA's kernel driver; empty without one
    jetson: bool = False  # NVIDIA's driver is another there

    @property
    def runtimes(self) -> list[str]:
        """The distributions that bring the package onnxruntime."""
        return sorted(self.installed.keys() - {"torch", "timm"})

    @property
    def torch_works(self) -> bool:
        """True if torch can run a backbone."""
        return isinstance(self.torch, TorchFacts) and "timm" in self.installed

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Devices that torch sees."""
        return self.torch.gpus if isinstance(self.torch, TorchFacts) else ()

    @property
    def usable(self) -> list[str]:
        """Providers of onnxruntime that made a session."""
        listed = self.onnx.providers if isinstance(self.onnx, OnnxFacts) else {}
        return [name for name, why in listed.items() if not why]


@dataclass(frozen=True)
class Loaded:
    """A backbone that was loaded here."""

    engine: str  # torch or onnx
    digest: str
    size: int  # of its images, pixels
    device: str  # in words
    probe: NDArray[np.float64]  # features of the shipped images, (4, d)
    loaded_s: float
    images_per_s: float  # of frozen passes
    peak_bytes: int  # memory of the process that had it


@dataclass(frozen=True)
class Wanted:
    """The backbone that a client is to use."""

    name: str
    digest: str  # of its weights; empty: not known
    source: str  # who says so, in words
    needed: bool = True  # the run's method uses one
    gradient: bool = False  # it trains, which needs torch
    weights: str = ""  # the file that they were taken from the last time, if one was given
    image_size: int | None = None  # side of its images; None: the model's own


@dataclass(frozen=True)
class BackboneFacts:
    """Requirements of the backbone, and the result of loading it."""

    expected: Wanted
    loaded: Loaded | FcilError | Skip
    reference: NDArray[Any] | None = None  # as `Loaded.probe` must be; None: not known here
    images: int = 0  # for training, in the folder


# --- images and disk ------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageFacts:
    """Contents of an image folder."""

    path: str
    form: str = "folder"  # or zip file
    error: FcilError | None = None  # why it cannot be used at all
    left_out: tuple[str, ...] = ()  # sentences: by the layout, and names refused
    unreadable: tuple[str, ...] = ()  # sentences about files that are no readable image
    files: int = 0  # that the layout takes
    unlooked: int = 0  # of these, not read for want of time
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # class -> side -> images
    duplicates: tuple[tuple[str, ...], ...] = ()  # one name in each class, of images in several
    notes: tuple[str, ...] = ()  # sentences about the split into sides
    enrolled: bool = False  # the split is the client's own; else the next one may fall otherwise

    def images(self, *sides: str) -> int:
        """Return how many images are on these sides."""
        return sum(n for counts in self.counts.values() for s, n in counts.items() if s in sides)


@dataclass(frozen=True)
class DiskFacts:
    """Reports of the file systems."""

    place: str  # the state's directory, or the nearest one above it that exists
    free_bytes: int  # that this user may use, and so the inodes
    free_inodes: int | None  # None: it counts none
    kind: str  # of the file system; empty: not known
    mount: str
    read_only: bool
    kept_s: float | FcilError  # until a small file was kept there
    temporary: str  # the directory for temporary files
    temporary_free_bytes: int | FcilError
    held_bytes: int = 0  # by this user's clients; as much again may come


# --- a client -------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemberFacts:
    """A client's identity from its directory, or the facts about a folder without one."""

    directory: str = ""  # empty: no folder is enrolled, or `data` is not
    data: str = ""
    enrolment: Enrolment | FcilError | None = None  # None: it is not, or no more
    former: str = ""  # who it was, if it has left
    fingerprint: str | FcilError = ""  # of its keys; empty: there is no key file
    changing: bool = False  # a change of keys was begun and not finished
    valid: tuple[float, float] | FcilError = (0.0, 0.0)  # of the certificate, unix seconds
    now_s: float = 0.0  # this machine's clock


@dataclass(frozen=True)
class TicketFacts:
    """A ticket that was given, and what could be learned of it without using it."""

    ticket: Ticket | FcilError | None = None  # None: none was given
    asked: bool = False  # the server that it names answered
    answer: FcilError | None = None  # its refusal; None: it would take it
    used_here: str = ""  # the client of this user that came in with it
    now_s: float = 0.0  # this machine's clock


@dataclass(frozen=True)
class AddressFacts:
    """One HOST:PORT, as far as TCP goes."""

    address: str
    resolved: tuple[str, ...] = ()  # IP addresses of the host
    name_fault: str = ""  # why there are none
    took_s: float | None = None  # until a connection stood; None: none did
    number: int = 0  # errno of why


@dataclass(frozen=True)
class ServerFacts:
    """Answer of the server, or of a process that speaks for it."""

    told: str | FcilError | Skip  # the answer, the refusal, or why nobody was asked
    waits: bool = False  # there is no session, and it may come by itself
    # How far this clock is behind the server's, at least and at most; None: not known.
    clock_s: Sequence[float] | None = None


@dataclass(frozen=True)
class NetworkFacts:
    """The way from one client, or one ticket, to its server; without addresses there is none."""

    server: ServerFacts
    addresses: Sequence[AddressFacts] = ()
    relay: bool = False
    leave: str = client_command("leave", "FOLDER", "--without-server")  # if the server is gone


@dataclass(frozen=True)
class HoldingFacts:
    """Contents of a client's directory."""

    sizes: Mapping[str, int] = field(default_factory=dict)  # what -> bytes
    outbox: int = 0  # number of updates that wait
    outbox_age_s: float = 0.0  # of the oldest
    running: bool = False  # the client, so it sends them


@dataclass(frozen=True)
class DaemonFacts:
    """Report of a client's daemon."""

    status: Mapping[str, Any] | None  # its own; None: it does not run, or does not answer
    installed: str  # version of fcil that this doctor is of
    hangs: bool = False  # it runs and does not answer
    start: str = ""  # the command that starts it


@dataclass(frozen=True)
class ClientFacts:
    """DoctorFacts about one client, or about a folder without one: no home, holding or daemon."""

    member: MemberFacts
    network: NetworkFacts
    wanted: Wanted | None = None  # the backbone that its run uses; None: nobody says
    home: Home | None = None
    holding: HoldingFacts | None = None
    daemon: DaemonFacts | None = None

    @property
    def name(self) -> str:
        """Its name, or the directory's where it has none; empty where it is no client yet."""
        if isinstance(self.member.enrolment, Enrolment):
            return self.member.enrolment.name
        return self.member.former or (self.home.directory.name if self.home else "")

    @property
    def data(self) -> Path | None:
        """Its folder, if that is known."""
        enrolment = self.member.enrolment
        return Path(enrolment.data) if isinstance(enrolment, Enrolment) else None


@dataclass
class DoctorFacts:
    """All that was collected. None: no probe has looked at it, or the probe broke."""

    machine: MachineFacts | None = None
    engines: EngineFacts | None = None
    backbone: BackboneFacts | None = None
    images: ImageFacts | Skip | None = None
    disk: DiskFacts | None = None
    ticket: TicketFacts | None = None
    clients: list[ClientFacts] = field(default_factory=list)
    units: Mapping[str, Mapping[str, str]] | Skip | None = None  # systemd's -> properties
    on_gpu: Mapping[str, Sequence[str]] | None = None  # device -> this user's running clients
