"""Collection of a federation's metrics from outside its server: ledger, control socket, /proc.

The server does as little as possible: it answers one short question. Everything else is read from
its files and from the system.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fcil_protocol.errors import FcilError
from fcil_protocol.process import control_socket
from fcil_server.ledger.databases.sqlite import LEDGER_NAME
from fcil_server.web.metrics.exposition import Snapshot, Usage, intake_name
from fcil_server.web.metrics.totals import Totals, TotalsReader

ASK_S = 3.0  # for the server to answer; a scraper gives up after 10 s


class MetricsSource:
    """Reads one federation.

    Its two halves are used by one thread each: `ask` waits for the server, `totals` for the ledger.

    Args:
        directory: of the federation.
        clients: number of members with metrics of their own; 0: none.
    """

    def __init__(self, directory: Path, *, clients: int = 0) -> None:
        self.directory = directory
        self._clients = clients
        self._reader: TotalsReader | None = None
        self._named: tuple[str, ...] = ()
        self._server: int | None = None  # its process id, as of its last answer
        self._version = version("fcil")

    def ask(self) -> dict[str, Any]:
        """Return the server's answer about itself.

        Raises:
            FcilError: it does not answer, with the reason in a sentence.
        """
        told = control_socket.ask(self.directory, "gauges", ASK_S, clients=list(self._named))
        self._server = int(told["pid"])
        return told

    def totals(self) -> Totals:
        """Return the totals of the ledger.

        Raises:
            FcilError: it cannot be read.
        """
        if self._reader is None:
            self._reader = TotalsReader(self.directory / LEDGER_NAME, clients=self._clients)
        try:
            totals = self._reader.read()
        except FcilError:
            self.close()  # another file may be in its place the next time
            raise
        self._named = tuple(totals.named)
        return totals

    def close(self) -> None:
        """Close the ledger."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def snapshot(self, totals: Totals, live: Mapping[str, Any] | None, began: float) -> Snapshot:
        """Return the metrics; the system's are read now.

        Args:
            totals: of the ledger.
            live: the server's answer; None if it did not answer.
            began: when their collection began, `time.monotonic`.
        """
        spool = self.directory / "runs" / totals.run.run_id / "spool" if totals.run else None
        processes = {"metrics": os.getpid(), "server": self._server}
        if live is not None:
            processes["worker"] = live["worker_pid"]
            for number, process in enumerate(live["intake"], 1):
                processes[intake_name(number)] = process["pid"]
        return Snapshot(
            version=self._version,
            totals=totals,
            live=live,
            usage={n: found for n, pid in processes.items() if (found := usage(pid)) is not None},
            disk=_disk(self.directory),
            spool_bytes=_size(spool) if spool is not None else 0,
            collect_s=time.monotonic() - began,
        )


def usage(pid: int | None) -> Usage | None:
    """Return the resources of a process of this user; None if it is gone, or without /proc."""
    if pid is None:
        return None
    place = Path("/proc") / str(pid)
    try:
        # The text before the last bracket is the process's name, which may contain anything.
        fields = (place / "stat").read_text(errors="replace").rpartition(")")[2].split()
        files = len(os.listdir(place / "fd"))  # noqa: PTH208 - only how many
    except OSError:
        return None
    user, system, pages = int(fields[11]), int(fields[12]), int(fields[21])
    if fields[0] == "Z":  # ended, and not yet reaped
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    return Usage(pages * os.sysconf("SC_PAGE_SIZE"), (user + system) / ticks, files)


def _disk(directory: Path) -> tuple[int, int] | None:
    try:
        found = shutil.disk_usage(directory)
    except OSError:
        return None
    return found.free, found.total


def _size(folder: Path) -> int:
    """Return the bytes of the files in a folder; files that vanish meanwhile do not count."""
    total = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    total += entry.stat(follow_symlinks=False).st_size
                except OSError:
                    continue
    except OSError:
        return total
    return total
