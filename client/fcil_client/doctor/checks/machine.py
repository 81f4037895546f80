"""Checks of the machine: system, cores, memory, a GPU that several clients share, a Jetson."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fcil_client.doctor.checks.facts import (
    DoctorFacts,
    EngineFacts,
    ImageFacts,
    Loaded,
    MachineFacts,
)
from fcil_client.doctor.checks.findings import Finding, failure, megabytes, ok, skipped, warning
from fcil_client.doctor.checks.register import of_facts
from fcil_protocol.errors import OutOfMemory

TESTED = (("Linux", "x86_64"), ("Linux", "aarch64"))

check = of_facts(lambda facts: facts.machine)


@check("machine.system", "system, processor, Python and fcil")
def system(facts: MachineFacts) -> Finding:
    text = f"{facts.system} {facts.release} on {facts.arch}, Python {facts.python}, "
    text += f"fcil {facts.fcil}"
    if (facts.system, facts.arch) in TESTED:
        return ok(text)
    tested = " and ".join(f"{s} on {a}" for s, a in TESTED)
    return warning(text, f"It may work; only {tested} are tested. Report what does not work.")


@check("machine.cores", "cores that this user's processes may use")
def cores(facts: MachineFacts) -> Finding:
    text = f"{facts.cores} core{'s' * (facts.cores != 1)}"
    if facts.quota is None or facts.quota >= facts.cores:
        return ok(text)
    text += f", of which the container's limit grants {facts.quota:.2g}"
    threads = max(1, int(facts.quota))
    return warning(
        text,
        f"Start the client with --max-threads {threads}: more threads only wait for each other.",
    )


def _memory(facts: DoctorFacts) -> tuple[MachineFacts, int, int] | None:
    """Return the machine, and bytes that backbone and decoded images take; 0: not known."""
    if facts.machine is None:
        return None
    loaded = facts.backbone.loaded if facts.backbone is not None else None
    if not isinstance(loaded, Loaded):
        return facts.machine, 0, 0
    count = 0
    if isinstance(facts.images, ImageFacts):
        count = facts.images.images("train", "select", "test")
    pixels = count * loaded.size**2 * 3
    return facts.machine, loaded.peak_bytes, min(pixels, facts.machine.keep_bytes)


@of_facts(_memory)("machine.memory", "free memory against what the backbone and the images need")
def memory(facts: tuple[MachineFacts, int, int]) -> Finding:
    machine, worker, images = facts
    free, limit, total = machine.free_bytes, "", machine.total_bytes
    if machine.limit_bytes is not None:
        limit, total = " (the container's limit)", min(total, machine.limit_bytes)
    text = f"{megabytes(free)} free of {megabytes(total)}{limit}"
    if not worker + images:
        return ok(text)
    parts = [f"{megabytes(worker)} for the backbone"] * bool(worker)
    parts += [f"up to {megabytes(images)} for decoded images"] * bool(images)
    text += f"; a client takes {' and '.join(parts)}, and more in training"
    if free < worker:
        remedy = "Free memory, add swap, or use a smaller backbone on the server."
        return failure(text, remedy, OutOfMemory)
    if free < worker + images:
        room = max(16, int((free - worker) / 1e6 / 2))
        return warning(text, f"Keep fewer decoded images: --memory-mb {room}")
    return ok(text)


@of_facts(lambda facts: facts.on_gpu)(
    "machine.shared_gpu", "several clients of this user that compute on one GPU"
)
def shared_gpu(on_gpu: Mapping[str, Sequence[str]]) -> Finding | list[Finding]:
    shared = {device: names for device, names in on_gpu.items() if len(names) > 1}
    if not shared:
        return skipped("no GPU is used by several clients of this user")
    return [
        warning(
            f"{len(names)} clients compute on {device}: {', '.join(sorted(names))}. Each holds a "
            "backbone of its own there: they are a swarm",
            "Let one process with one backbone run them all: fcil-client swarm --data DIR, where "
            "DIR holds their folders (docs/swarm.md); or give others another device "
            "(--device cuda:N or cpu).",
        )
        for device, names in sorted(shared.items())
    ]


def _jetson(facts: DoctorFacts) -> tuple[MachineFacts, EngineFacts] | None:
    return (facts.machine, facts.engines or EngineFacts()) if facts.machine else None


@of_facts(_jetson)("machine.jetson", "a Jetson, and the packages it needs")
def jetson(facts: tuple[MachineFacts, EngineFacts]) -> Finding:
    machine, engines = facts
    if not machine.jetson and not machine.l4t:
        return skipped("this is not a Jetson")
    text = f"{machine.jetson or 'a Jetson'}{f', {machine.l4t}' if machine.l4t else ''}"
    if engines.gpus or {"CUDAExecutionProvider", "TensorrtExecutionProvider"} & {*engines.usable}:
        return ok(f"{text}; its GPU can be used")
    return warning(
        f"{text}; nothing installed here uses its GPU",
        "Install torch or onnxruntime-gpu from NVIDIA's index for this JetPack, and not "
        "the CPU builds of the public index; deploy/README.md says which. It works on the "
        "CPU meanwhile.",
    )
