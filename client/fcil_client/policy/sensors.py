"""Sensors of this device: power, heat and use by others."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from fcil_client.policy.policy import Facts, Heat

LOG = logging.getLogger("fcil_client")

ZONES = Path("/sys/class/thermal")
BEFORE_CRITICAL_C = 5.0  # if only the mark is known at which the system switches itself off
# Lower marks are of skins and fans, higher ones invalid: some drivers report a largest number.
_MARKS_C = (60.0, 130.0)
_TRIPS = ("hot", "passive", "critical")  # of a zone; the kernel slows the chip down at passive


class Sensors(Protocol):
    """A source of facts; tests have their own."""

    def read(self) -> Facts:
        """Return the current facts; called from a thread, one call at a time."""
        ...


@dataclass(frozen=True)
class Times:
    """Processor seconds since the start of the machine, over all cores.

    Attributes:
        busy: of all programs with niceness 0 or less, and of the kernel.
        own: of those, this client's, by process.
        total: including idle time and programs of low priority.
    """

    busy: float
    own: Mapping[int, float]
    total: float


def others_share(before: Times, after: Times) -> float | None:
    """Return the share of all cores used by other programs; None: the interval is too short."""
    total = after.total - before.total
    if total <= 0:
        return None
    mine = sum(max(0.0, s - before.own.get(pid, 0.0)) for pid, s in after.own.items())
    return min(1.0, max(0.0, (after.busy - before.busy - mine) / total))


class System:
    """The real machine, through psutil and Linux's thermal zones."""

    def __init__(self, *, use: bool = True, zones: Path = ZONES) -> None:
        """Read thermal zones from ``zones``; with ``use`` also use by others, which costs more."""
        self._use = use
        self._zones = zones
        self._before: Times | None = None

    def read(self) -> Facts:
        """Return the current facts."""
        local = time.localtime()
        battery = _told("sensors_battery")
        others, input_s = self._in_use() if self._use else (None, None)
        return Facts(
            minute=60 * local.tm_hour + local.tm_min,
            on_mains=None if battery is None else battery.power_plugged,
            charge=None if battery is None else float(battery.percent),
            others=others,
            input_s=input_s,
            heat=tuple(_heat(_told("sensors_temperatures") or {}, read_zones(self._zones))),
        )

    def _in_use(self) -> tuple[float | None, float | None]:
        before, self._before = self._before, _times()
        others = None if before is None else others_share(before, self._before)
        return others, _input_s()


def _told(name: str) -> Any:
    """Ask psutil; None if this system, or this build, has no such value."""
    try:
        return getattr(psutil, name)()
    except AttributeError:  # another system
        return None
    except Exception as error:  # a driver with an invalid answer must not end a client
        LOG.debug("psutil.%s: %r", name, error)
        return None


def _heat(told: dict[str, list[Any]], zones: Iterable[Heat]) -> list[Heat]:
    found = {
        (chip, one.label or str(number)): Heat(
            f"{chip} {one.label}".strip(), float(one.current), hot_threshold(one.high, one.critical)
        )
        for chip, sensors in told.items()
        for number, one in enumerate(sensors)
        if one.current is not None and math.isfinite(one.current)
    }
    names = {chip for chip, _ in found}
    return [*found.values(), *(zone for zone in zones if zone.name not in names)]


def hot_threshold(high: float | None, critical: float | None) -> float | None:
    """Return the °C at which a sensor's system calls it hot; None if it is not reported."""
    low, top = _MARKS_C
    marks = [m for m in (high, critical and critical - BEFORE_CRITICAL_C) if m and low <= m <= top]
    return float(min(marks)) if marks else None


def read_zones(folder: Path) -> list[Heat]:
    """Read thermal zones, in which many boards (Jetsons) report their temperatures."""
    found = []
    for zone in sorted(folder.glob("thermal_zone*")):
        now = _number(zone / "temp")
        if now is None:
            continue
        marks: dict[str, float] = {}
        for trip in zone.glob("trip_point_*_type"):
            kind = _text(trip)
            at = _number(trip.with_name(trip.name.replace("_type", "_temp")))
            if kind in _TRIPS and at is not None:
                marks[kind] = min(at, marks.get(kind, at))
        high = min((marks[k] for k in ("hot", "passive") if k in marks), default=None)
        name = _text(zone / "type") or zone.name
        found.append(Heat(name, now, hot_threshold(high, marks.get("critical"))))
    return found


def _number(path: Path) -> float | None:
    """Return a temperature; the files hold thousandths of a degree."""
    try:
        return int(_text(path)) / 1000
    except ValueError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # a zone may exist without a value
        return ""


def _times() -> Times:
    cpu = psutil.cpu_times()
    idle = cpu.idle + getattr(cpu, "iowait", 0.0)
    nice = getattr(cpu, "nice", 0.0)
    guests = getattr(cpu, "guest", 0.0) + getattr(cpu, "guest_nice", 0.0)  # within the others
    total = float(sum(cpu)) - guests
    return Times(total - idle - nice, _own_times(), total)


def _own_times() -> dict[int, float]:
    """Return processor seconds of this process and its workers, without low-priority ones."""
    own = {}
    me = psutil.Process()
    with contextlib.suppress(psutil.Error):
        for process in (me, *me.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                used = process.cpu_times()
                own[process.pid] = used.system + (used.user if process.nice() <= 0 else 0.0)
    return own


def _input_s() -> float | None:
    """Return the time since the last key press in any terminal, s."""
    now = time.time()
    ages = []
    for user in _told("users") or []:
        with contextlib.suppress(OSError, TypeError):
            ages.append(now - (Path("/dev") / user.terminal).stat().st_atime)
    return max(0.0, min(ages)) if ages else None
