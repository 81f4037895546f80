"""Read the facts about this machine from the system."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path

import psutil

from fcil_adapters.resources import machine as limits
from fcil_client.doctor.checks import machine
from fcil_client.doctor.checks.machine import MachineFacts


def look(root: Path = Path("/")) -> MachineFacts:
    """Gather the facts that need no other process.

    Args:
        root: root of the system's own files.
    """
    memory = psutil.virtual_memory()
    share = limits.share(root)
    return MachineFacts(
        system=platform.system(),
        release=platform.release(),
        arch=platform.machine(),
        python=platform.python_version(),
        fcil=version("fcil"),
        cores=limits.allowed_cores(),
        quota=share.quota,
        total_bytes=int(memory.total),
        available_bytes=int(memory.available),
        limit_bytes=share.memory_bytes,
        limit_used_bytes=share.used_bytes,
        jetson=machine.jetson_model(_text(root / "proc/device-tree/model")),
        l4t=machine.l4t_release(_text(root / "etc/nv_tegra_release")),
    )


def nvidia_driver(root: Path = Path("/")) -> str:
    """Return the version of NVIDIA's kernel driver; empty without one."""
    words = _text(root / "proc/driver/nvidia/version").splitlines()
    if not words:
        return "" if not (root / "dev/nvidiactl").exists() else "of an unknown version"
    numbers = [word for word in words[0].split() if word[:1].isdigit() and "." in word]
    return numbers[0] if numbers else "of an unknown version"


def _text(path: Path) -> str:
    """Return a small file's text; empty if the system has no such file."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
