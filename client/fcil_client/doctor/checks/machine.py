"""Lines about the machine: system, cores, memory, a GPU shared by several clients, a Jetson."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fcil_client.doctor.checks.line import Line, failure, megabytes, ok, skipped, warning
from fcil_protocol.errors import OutOfMemory

TESTED = (("Linux", "x86_64"), ("Linux", "aarch64"))
SYSTEM = ("machine.system", "machine.cores", "machine.shared_gpu", "machine.jetson")


@dataclass(frozen=True)
class MachineFacts:
    """Facts about the machine.

    Attributes:
        cores: available to this process.
        quota: CPU time granted by its cgroup, in cores; None: no limit.
        available_bytes: memory available without swapping.
        limit_bytes, limit_used_bytes: of the cgroup's memory; None: no limit.
        jetson: the board's name; empty if it is none.
        l4t: release from /etc/nv_tegra_release.
    """

    system: str
    release: str
    arch: str
    python: str
    fcil: str
    cores: int
    quota: float | None
    total_bytes: int
    available_bytes: int
    limit_bytes: int | None = None
    limit_used_bytes: int = 0
    jetson: str = ""
    l4t: str = ""

    @property
    def free_bytes(self) -> int:
        """Memory available to a client."""
        if self.limit_bytes is None:
            return self.available_bytes
        return max(0, min(self.available_bytes, self.limit_bytes - self.limit_used_bytes))


def system_lines(facts: MachineFacts) -> list[Line]:
    """Return the line about system and versions."""
    words = f"{facts.system} {facts.release} on {facts.arch}, Python {facts.python}, fcil "
    words += facts.fcil
    if (facts.system, facts.arch) in TESTED:
        return [ok("machine.system", words)]
    tested = " and ".join(f"{s} on {a}" for s, a in TESTED)
    action = f"It may work; only {tested} are tested. Report what does not."
    return [warning("machine.system", words, action)]


def core_lines(facts: MachineFacts) -> list[Line]:
    """Compare the cores with the CPU time that a container grants."""
    text = f"{facts.cores} core{'s' * (facts.cores != 1)}"
    if facts.quota is None or facts.quota >= facts.cores:
        return [ok("machine.cores", text)]
    text += f", of which the container's limit grants {facts.quota:.2g}"
    threads = max(1, int(facts.quota))
    action = f"Start the client with --max-threads {threads}: more only wait for each other."
    return [warning("machine.cores", text, action)]


@dataclass(frozen=True)
class MemoryNeed:
    """Expected memory use of a client.

    Attributes:
        worker_bytes: of the worker with its backbone; measured, 0 if that was not possible.
        images_bytes: of the decoded images that are kept.
    """

    worker_bytes: int = 0
    images_bytes: int = 0


def memory_lines(facts: MachineFacts, need: MemoryNeed) -> list[Line]:
    """Compare free memory with the needs of backbone and images."""
    free = facts.free_bytes
    limit = " (the container's limit)" if facts.limit_bytes is not None else ""
    total = facts.total_bytes if facts.limit_bytes is None else facts.limit_bytes
    text = f"{megabytes(free)} free of {megabytes(min(total, facts.total_bytes))}{limit}"
    wanted = need.worker_bytes + need.images_bytes
    if not wanted:
        return [ok("machine.memory", text)]
    parts = [f"{megabytes(need.worker_bytes)} for the backbone"] * bool(need.worker_bytes)
    parts += [f"up to {megabytes(need.images_bytes)} for decoded images"] * bool(need.images_bytes)
    text += f"; a client takes {' and '.join(parts)}, and more in training"
    if free < need.worker_bytes:
        action = "Free memory, add swap, or use a smaller backbone on the server."
        return [failure("machine.memory", text, action, OutOfMemory.code)]
    if free < wanted:
        room = max(16, int((free - need.worker_bytes) / 1e6 / 2))
        action = f"Keep fewer decoded images: --memory-mb {room}"
        return [warning("machine.memory", text, action)]
    return [ok("machine.memory", text)]


def shared_gpu_lines(on_gpu: Mapping[str, Sequence[str]]) -> list[Line]:
    """Name the clients that share a GPU.

    Args:
        on_gpu: device -> names of this user's running clients that compute on it.
    """
    shared = {device: names for device, names in on_gpu.items() if len(names) > 1}
    if not shared:
        return [skipped("machine.shared_gpu", "no GPU is used by several clients of this user")]
    return [
        warning(
            "machine.shared_gpu",
            f"{len(names)} clients compute on {device}: {', '.join(sorted(names))}. Each holds a "
            "backbone of its own there: they are a swarm",
            "Let one process with one backbone run them all: fcil-client swarm --data DIR, where "
            "DIR holds their folders (docs/swarm.md); or give others another device "
            "(--device cuda:N or cpu).",
        )
        for device, names in sorted(shared.items())
    ]


@dataclass(frozen=True)
class JetsonNeed:
    """Support for a Jetson's GPU: True if torch sees it, and onnxruntime's providers."""

    torch_cuda: bool = False
    providers: Sequence[str] = field(default_factory=tuple)


def jetson_lines(facts: MachineFacts, have: JetsonNeed) -> list[Line]:
    """Return the line about a Jetson's GPU."""
    if not facts.jetson and not facts.l4t:
        return [skipped("machine.jetson", "this is no Jetson")]
    release = f", {facts.l4t}" if facts.l4t else ""
    text = f"{facts.jetson or 'a Jetson'}{release}"
    gpu = {"CUDAExecutionProvider", "TensorrtExecutionProvider"} & set(have.providers)
    if have.torch_cuda or gpu:
        return [ok("machine.jetson", f"{text}; its GPU can be used")]
    return [
        warning(
            "machine.jetson",
            f"{text}; nothing that is installed uses its GPU",
            "Install torch or onnxruntime-gpu from NVIDIA's index for this JetPack, and not "
            "the CPU builds of the public index; deploy/README.md says which. It works on the "
            "CPU meanwhile.",
        )
    ]


# --- system files ---------------------------------------------------------------------------


def jetson_model(text: str) -> str:
    """Return the board's name from /proc/device-tree/model if it is a Jetson's."""
    name = text.replace("\0", "").strip()
    known = ("Jetson", "Orin", "Xavier", "Tegra", "Thor")
    return name if any(word in name for word in known) else ""


def l4t_release(text: str) -> str:
    """Return ``L4T 36.4.0`` from the first line of /etc/nv_tegra_release."""
    match = re.search(r"R(\d+).*REVISION: ([\d.]+)", text)
    return f"L4T {match[1]}.{match[2]}" if match else ""
