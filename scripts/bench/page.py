"""What the page weighs, how soon it is seen, and what it costs the federation that it shows.

.venv/bin/python scripts/bench/page.py [--only weight,paint,load] [--loads 7] [--seconds 20]

- weight: the page and everything it loads, plain and as gzip would send it.
- paint: from the request to the first paint and to the last chart, in the system's Chromium.
- load: CPU of the server and of the page's process while rounds run, with 0, 20 and 200 browsers'
  streams wanted, and seconds per round with none and with 20, in turns within one federation.
"""

import argparse
import gzip
import itertools
import json
import selectors
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from playwright.sync_api import sync_playwright
from processes import children, cpu_s, peak_mb, status_mb

import page_kit
from browser import kit
from fcil_protocol.process import control_socket
from fcil_server.lab.local.demo import write_digits
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.reports.charts import assets
from fcil_server.reports.results.run_data import collect
from fcil_server.reports.sections import static_page

RUNS = {"small": page_kit.small, "long": page_kit.long}
STREAMS = (0, 20, 200)
TURNS = 5  # of 0 and of 20 pages
CLIENTS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="weight,paint,load")
    parser.add_argument("--loads", type=int, default=7, help="of each page; medians are told")
    parser.add_argument("--seconds", type=float, default=20, help="of rounds for each number")
    args = parser.parse_args()
    wanted = args.only.split(",")
    directory = Path(tempfile.mkdtemp(prefix="fcil-page-"))
    try:
        if {"weight", "paint"} & set(wanted):
            with ExitStack() as stack:
                doors = {
                    name: stack.enter_context(kit.ledger_door(directory / name, build))
                    for name, build in RUNS.items()
                }
                if "weight" in wanted:
                    weigh(doors)
                if "paint" in wanted:
                    paint(doors, args.loads)
        if "load" in wanted:
            load(directory / "federation", args.seconds)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


# Weight.


def weigh(doors: dict[str, kit.Door]) -> None:
    print("| what | bytes | as gzip |\n|---|---|---|")
    for name, door in doors.items():
        line(f"the page of the {name} run", fetch(door, "/"))
        for section in kit.SECTIONS:
            line(f"{name}: section {section}", fetch(door, f"/part/{section}"))
        line(f"{name}: frozen as report.html", frozen_report(door))
    parts = {name: assets.load(name)[0] for name in sorted(assets.NAMES)}
    for name, content in parts.items():
        line(name, content)
    line("all assets", b"".join(parts.values()))


def frozen_report(door: kit.Door) -> bytes:
    with Ledger(door.directory / LEDGER_NAME, read_only=True) as ledger:
        run = ledger.runs.newest()
        assert run is not None
        return static_page.report(collect(ledger, run.run_id)).encode()


def line(name: str, content: bytes) -> None:
    print(f"| {name} | {len(content):,} | {len(gzip.compress(content, 6)):,} |", flush=True)


def fetch(door: kit.Door, path: str) -> bytes:
    name, value = door.cookie()
    request = urllib.request.Request(door.origin + path, headers={"Cookie": f"{name}={value}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


# Paint.

ENTRIES = """() => ({
  paint: performance.getEntriesByName('first-contentful-paint')[0].startTime,
  charts: performance.getEntriesByName('fcil-charts')[0].startTime,
  answer: performance.getEntriesByType('navigation')[0].responseEnd,
  bytes: performance.getEntriesByType('resource').reduce((n, e) => n + e.transferSize,
    performance.getEntriesByType('navigation')[0].transferSize),
})"""


def paint(doors: dict[str, kit.Door], loads: int) -> None:
    print(f"\nms after the request, medians of {loads} loads by a fresh browser (and the range)\n")
    print("| run | HTML is there | first paint | charts are drawn | bytes moved |")
    print("|---|---|---|---|---|")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=kit.chromium(), args=kit.FLAGS)
        for name, door in doors.items():
            found = [one_load(kit.Chromium(browser), door) for _ in range(loads + 1)][1:]
            cells = [middle([f[key] for f in found]) for key in ("answer", "paint", "charts")]
            print(f"| {name} | {' | '.join(cells)} | {found[-1]['bytes']:,} |", flush=True)
        browser.close()


def one_load(chromium: kit.Chromium, door: kit.Door) -> dict[str, float]:
    visit = chromium.visit(door.origin, cookie=door.cookie())
    visit.page.goto(door.origin)
    visit.ready()
    visit.page.wait_for_function(
        "() => performance.getEntriesByName('first-contentful-paint').length > 0"
    )
    found: dict[str, float] = visit.page.evaluate(ENTRIES)
    chromium.close()
    return found


def middle(numbers: list[float]) -> str:
    return f"{statistics.median(numbers):.0f} ({min(numbers):.0f} to {max(numbers):.0f})"


# Load.


class Readers:
    """Open streams that read what comes and do nothing with it: pages without a browser."""

    def __init__(self, url: str, cookie: str, count: int) -> None:
        self._stop = threading.Event()
        self._ready = selectors.DefaultSelector()
        self.refused = 0
        self.bytes = 0
        parts = urlsplit(url)
        for _ in range(count):
            sock = socket.create_connection((parts.hostname, parts.port), timeout=30)
            head = f"GET /stream HTTP/1.1\r\nHost: {parts.netloc}\r\nCookie: {cookie}\r\n\r\n"
            sock.sendall(head.encode())
            if b" 200 " in sock.recv(4096).partition(b"\r\n")[0]:
                sock.setblocking(False)
                self._ready.register(sock, selectors.EVENT_READ)
            else:
                self.refused += 1
                sock.close()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._stop.is_set():
            for key, _ in self._ready.select(0.2):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                data = sock.recv(1 << 16)
                self.bytes += len(data)
                if not data:
                    self._ready.unregister(sock)
                    sock.close()

    @property
    def open(self) -> int:
        return len(self._ready.get_map())

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for key in list(self._ready.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._ready.close()


SETTINGS = {
    "method.name": "running_mean",
    "tasks.schedule": "listed",
    "tasks.classes": '[["0", "1", "2", "3"]]',
    "round.rounds_per_task": "100000",
    "round.min_clients": str(CLIENTS),
    "run.plots": "false",
}


@contextmanager
def federation_at(directory: Path) -> Iterator[tuple[LocalFederation, str]]:
    """Yield a federation whose rounds go on for ever, and a session's cookie."""
    folders = write_digits(directory / "data", CLIENTS)
    with LocalFederation(directory) as federation:
        options = [a for k, v in SETTINGS.items() for a in ("-c", f"{k}={v}")]
        federation.serve("--page", "127.0.0.1:0", *options)
        for folder in folders:
            federation.join(folder.name, folder)
        federation.until("update")
        name, value = kit.Door(federation.federation, "").cookie()
        yield federation, f"{name}={value}"


COLUMNS = (
    "streams wanted",
    "open",
    "refused",
    "rounds",
    "s per round",
    "server: % of a core",
    "page: % of a core",
    "ms of CPU per round: server, page",
    "MB sent",
    "page: MB",
)


def load(directory: Path, seconds: float) -> None:
    with federation_at(directory) as (federation, cookie):
        page = kit.page_of(federation)
        server = control_socket.ask(federation.federation, "gauges")["pid"]
        at = Measured(federation, int(server), int(page["pid"]))
        print(f"\n{CLIENTS} clients, a numpy method, rounds without a pause; {seconds:g} s each\n")
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
        for count in STREAMS:
            row(at, page["address"], cookie, count, seconds)
        print(f"\nthe page's process had {peak_mb(at.page):.0f} MB at most\n")
        turns(at, page["address"], cookie, seconds)


class Measured:
    """Rounds and CPU of a federation between two moments."""

    def __init__(self, federation: LocalFederation, server: int, page: int) -> None:
        self.server, self.page = server, page
        self._workers = [pid for pid in children(server) if pid != page]
        self._ledger = federation.federation / LEDGER_NAME

    def rounds(self, since: float, until: float) -> list[float]:
        """Return the seconds from one round's close to the next's in a time."""
        with Ledger(self._ledger, read_only=True) as ledger:
            run = ledger.runs.newest()
            assert run is not None
            closed = [r.closed_at for r in ledger.rounds.all(run.run_id) if r.closed_at]
        inside = [t for t in closed if since <= t <= until]
        return [b - a for a, b in itertools.pairwise(inside)]

    def during(self, seconds: float) -> tuple[list[float], float, float]:
        """Return rounds, and CPU seconds of the server (with its worker) and of the page."""
        began, before = time.time(), self._cpu()
        time.sleep(seconds)
        after, ended = self._cpu(), time.time()
        return self.rounds(began, ended), after[0] - before[0], after[1] - before[1]

    def _cpu(self) -> tuple[float, float]:
        return sum(map(cpu_s, [self.server, *self._workers])), cpu_s(self.page)


def row(at: Measured, url: str, cookie: str, count: int, seconds: float) -> None:
    readers = Readers(url, cookie, count)
    time.sleep(2)  # what a new stream is sent at once is not a round's
    sent = readers.bytes
    rounds, server, page = at.during(seconds)
    mb = (readers.bytes - sent) / 1e6
    n = max(1, len(rounds))
    print(
        f"| {count} | {readers.open} | {readers.refused} | {len(rounds)} "
        f"| {statistics.median(rounds):.3f} | {100 * server / seconds:.0f} "
        f"| {100 * page / seconds:.0f} | {1000 * server / n:.1f}, {1000 * page / n:.1f} "
        f"| {mb:.1f} | {status_mb(at.page):.0f} |",
        flush=True,
    )
    readers.close()


def turns(at: Measured, url: str, cookie: str, seconds: float) -> None:
    """Tell seconds per round with 20 pages and with none, in turns, for the machine varies."""
    pairs = []
    for _ in range(TURNS):
        without = at.during(seconds)[0]
        readers = Readers(url, cookie, 20)
        time.sleep(1)
        with_pages = at.during(seconds)[0]
        readers.close()
        pairs.append((statistics.median(without), statistics.median(with_pages)))
    ratios = [b / a for a, b in pairs]
    print("s per round without and with 20 pages, in turns:", json.dumps(
        [[round(a, 4), round(b, 4)] for a, b in pairs]))  # fmt: skip
    print(f"ratio, median of {TURNS}: {middle_ratio(ratios)}")


def middle_ratio(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


if __name__ == "__main__":
    subprocess.run(["uptime"], check=False)
    main()
