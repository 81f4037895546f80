"""One server and very many connected clients: seconds of a round, memory, lag of the loop.

The clients are the protocol's own pieces in a few processes (sockets, sessions, ciphers and
transfers are real; nothing is trained and nothing is kept on disk). Each fetches the round's
broadcast, opens it, and sends an update of S bytes, sealed. In a federation they have machines
of their own: here they yield to the server where both want a core (nice 10).

.venv/bin/python scripts/bench/many_clients.py [--clients 1000] [--kilobytes 100] [--rounds 3]
    [--relay pass|sums]: all clients are behind one relay, which passes updates on or adds them up
    [--intake N]: N intake processes hold the connections
    [--ledger postgresql://USER@HOST/DATABASE]: the ledger is there, not in a file
    [--absent N]: N more members never connect

scripts/bench/many_hosts.py runs it on several hosts, with an object store.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from processes import PeakMemory, children, cpu_s, is_intake, peak_mb, status_mb
from thin_client import CLASSES, Thin

from fcil_protocol.ids import new_client_id
from fcil_protocol.link.dial import dial
from fcil_protocol.link.enrol_with_ticket import show
from fcil_protocol.link.zmq_link import Links
from fcil_protocol.process import control_socket
from fcil_protocol.trust.keys import PrivateKeys
from fcil_protocol.trust.ticket import Ticket
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import RunStatus
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.storage.move_ledger import move_ledger

METHOD = Path(__file__).parent / "payload_method"
LAG = ("loop_lag_max_s", "loop_lag_p99_s")


async def _some(members: list[dict[str, str]], values: int, rounds: int) -> None:
    clients = [Thin(m, rounds) for m in members]
    links = Links(len(clients))
    await asyncio.gather(*(c.run(values, links) for c in clients))
    links.close()
    refused = [text for c in clients for text in c.refused]
    counts = ("acked", "fetched", "unfetched")
    told = {name: sum(getattr(c, name) for c in clients) for name in counts}
    print(json.dumps({**told, "refused": refused[:5]}), flush=True)


def _enrol(federation: LocalFederation, count: int) -> list[dict[str, str]]:
    members = []
    for number in range(count):
        seed = os.urandom(32)
        keys = PrivateKeys.derive(seed, b"bench")
        public = {k: v.hex() for k, v in keys.public.to_fields().items()}
        reply = control_socket.ask(
            federation.federation, "enrol_local", name=f"c{number}", keys=public
        )
        members.append(
            {
                "seed": seed.hex(),
                "client": reply["client_id"],
                "certificate": reply["certificate"],
                "address": reply["addresses"][0],
            }
        )
    return members


def add_absent(directory: Path, count: int) -> None:
    """Enrol members whose keys are discarded."""
    with Ledger(directory / LEDGER_NAME) as ledger, ledger.transaction():
        for number in range(count):
            keys = (os.urandom(32) for _ in range(3))
            named = dict(zip(("curve", "signing", "sealing"), keys, strict=True))
            ledger.clients.add(new_client_id(), f"absent{number}", **named)


def _ticket(federation: LocalFederation, name: str, **extra: Any) -> Ticket:
    reply = control_socket.ask(federation.federation, "enrol", name=name, lasts_s=3600.0, **extra)
    return Ticket.from_text(reply["ticket"])


class Site:
    """A relay's process, and clients behind it."""

    def __init__(self, federation: LocalFederation, *, sums: bool) -> None:
        self.federation = federation
        self.directory = federation.directory / "relay"
        ticket = federation.directory / "relay.ticket"
        ticket.write_text(_ticket(federation, "site", relay=True).to_text())
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        command = [sys.executable, "-P", "-m", "fcil_server", "relay", "--dir", str(self.directory)]
        command += ["--ticket", str(ticket), "--listen", address, *(["--sums"] if sums else [])]
        paths = {"PYTHONPATH": os.pathsep.join((str(METHOD), os.environ.get("PYTHONPATH", "")))}
        self.process = subprocess.Popen(command, env={**federation.environment(), **paths})
        federation.until("relay")

    def enrol(self, count: int) -> list[dict[str, str]]:
        """Enrol clients with tickets; a door admits newcomers a few at a time."""
        return asyncio.run(self._enrol(count))

    async def _enrol(self, count: int) -> list[dict[str, str]]:
        members = []
        for number in range(count):
            seed = os.urandom(32)
            keys = PrivateKeys.derive(seed, b"bench")
            ticket = _ticket(self.federation, f"c{number}", via="site")
            answer, _ = await show(ticket, keys, ticket.addresses[0], dial)
            members.append(
                {
                    "seed": seed.hex(),
                    "client": answer.client,
                    "certificate": answer.certificate.hex(),
                    "address": ticket.addresses[0],
                    "link_key": ticket.server_key.hex(),
                }
            )
        return members

    def stop(self) -> None:
        """Stop the relay, and say what it did."""
        used, peak = cpu_s(self.process.pid), peak_mb(self.process.pid)
        counts = control_socket.ask(self.directory, "status")
        print(f"relay: {used:.1f} CPU s, {peak:.0f} MB at most; {counts['sums']} sums of "
              f"{counts['added']} updates; uplink {counts['uplink_sent'] / 1e6:.1f} MB up, "
              f"{counts['uplink_received'] / 1e6:.1f} MB down")  # fmt: skip
        self.process.send_signal(signal.SIGINT)
        self.process.wait()


def _yield_to_the_server() -> None:
    os.nice(10)
    with contextlib.suppress(OSError):  # Linux may weigh sessions, and niceness only within one
        os.setsid()
        Path("/proc/self/autogroup").write_text("10")


def raise_limits() -> None:
    """Let this process and its children open as many files as the system permits."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@dataclass(frozen=True)
class Places:
    """Where the processes run, if not all on this host.

    Attributes:
        federation: has the server.
        enter: words before a command that let it run where the clients are.
        settings: of the server, for its addresses and its object store.
        env: of the server, for its object store.
    """

    federation: LocalFederation
    enter: Sequence[str] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


def measure(args: argparse.Namespace, directory: Path, places: Places | None = None) -> None:
    """Measure one federation in a directory, and print what was found."""
    places = places or Places(LocalFederation(directory))
    settings = {
        "method.name": "payload",
        "method.kilobytes": args.kilobytes,
        "tasks.schedule": "listed",
        "tasks.classes": json.dumps([list(CLASSES)]),
        "round.rounds_per_task": args.rounds,
        "round.min_clients": args.clients,
        "run.evaluate": "false",
        "federation.intake": str(args.intake),
        "privacy.relay_sums": json.dumps(args.relay == "sums"),
        **places.settings,
    }
    paths = os.pathsep.join((str(METHOD), os.environ.get("PYTHONPATH", "")))
    env = {**places.env, "PYTHONPATH": paths}
    with contextlib.ExitStack() as at_end:  # the clients end with this, whatever happens
        with places.federation as federation:
            given = [a for k, v in settings.items() for a in ("-c", f"{k}={v}")]
            federation.serve(*given, env=env)
            if args.ledger:
                federation.kill_server()
                move_ledger(federation.federation, args.ledger, "benchmark")
                federation.serve(*given, env=env)
            if args.absent:
                federation.kill_server()
                add_absent(federation.federation, args.absent)
                started = time.monotonic()
                federation.serve(*given, env=env)
                print(
                    f"starts with {args.absent} more members in {time.monotonic() - started:.1f} s"
                )
            assert federation.server is not None
            pid = federation.server.pid
            site = Site(federation, sums=args.relay == "sums") if args.relay else None
            members = site.enrol(args.clients) if site else _enrol(federation, args.clients)
            empty = status_mb(pid) or 0.0
            together = at_end.enter_context(PeakMemory(pid, every_s=0.2))
            step = -(-len(members) // args.processes)
            groups = [members[i : i + step] for i in range(0, len(members), step)]
            began = time.monotonic()
            values = round(args.kilobytes * 250)
            command = [*places.enter, sys.executable, __file__]
            command += ["--group", str(values), "--rounds", str(args.rounds)]
            processes = [
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
                for _ in groups
            ]
            for process, group in zip(processes, groups, strict=True):
                at_end.callback(process.kill)
                assert process.stdin is not None
                process.stdin.write(json.dumps(group).encode())
                process.stdin.close()
            to_start: float | None = None
            own_to_start = 0.0
            while True:
                moment = _moment(federation.federation)
                if to_start is None and moment.opened:
                    to_start = _cpu_of_all(pid)
                    own_to_start = cpu_s(pid)
                if moment.done:
                    break
                if time.monotonic() - began > args.timeout_s:
                    raise SystemExit(f"not done: {federation.last_words('server')}")
                time.sleep(0.1)
            peak, used, own = peak_mb(pid), _cpu_of_all(pid), cpu_s(pid)
            intake = [peak_mb(p) for p in children(pid) if is_intake(p)]
            worker = max((peak_mb(p) for p in children(pid) if not is_intake(p)), default=0.0)
            if site is not None:
                site.stop()
        said = []
        for process in processes:
            assert process.stdout is not None
            said.append(json.loads(process.stdout.read() or b"{}"))
            process.wait()
    with Ledger(federation.federation / LEDGER_NAME, read_only=True) as ledger:
        run = ledger.runs.newest()
        assert run is not None
        rows = ledger.rounds.all(run.run_id)
        counted = [len(ledger.updates.of_round(r.key)) for r in rows]
    seconds = [(r.closed_at or 0) - r.opened_at for r in rows]
    lag = [f"{r.metrics[k] * 1e3:.0f}" for k in LAG for r in rows if k in r.metrics]
    print(f"clients {args.clients}, {args.kilobytes:g} kB each, {args.rounds} rounds")
    print(f"all connected and first round open after {rows[0].opened_at - _wall(began):.1f} s")
    print(f"seconds of a round: {', '.join(f'{s:.1f}' for s in seconds)}")
    print(f"lag of the loop, ms, at most and p99: {', '.join(lag) or 'not measured'}")
    print(f"updates in a round: {counted}; acknowledged {sum(s.get('acked', 0) for s in said)}")
    if "parts.store" in places.settings:
        fetched, failed = (sum(s.get(k, 0) for s in said) for k in ("fetched", "unfetched"))
        print(f"from the object store: {fetched / 1e6:.1f} MB, {failed} fetches failed")
    print(f"refused: {[t for s in said for t in s.get('refused', [])] or 'nothing'}")
    memory = f"{empty:.0f} MB before, {peak:.0f} MB at most; its worker {worker:.0f} MB"
    print(f"server: {memory}; {used:.1f} CPU s")
    print(f"the server and all its processes: {together.mb:.0f} MB at most")
    assert to_start is not None, "a run that is done has opened a round"
    each = (used - to_start) / sum(counted) * 1e3
    alone = (own - own_to_start) / sum(counted) * 1e3
    print(f"of which from the first round on, for each update: {each:.1f} ms")
    print(f"of that the server's own process: {alone:.1f} ms")
    if intake:
        print(f"intake processes: {', '.join(f'{mb:.0f}' for mb in intake)} MB at most")


class _Moment(NamedTuple):
    """What the ledger says of the run.

    Attributes:
        opened: its first round has been opened.
    """

    opened: bool
    done: bool


def _moment(directory: Path) -> _Moment:
    """Return the run's progress; the server is not asked, since it would spend time on that."""
    with Ledger(directory / LEDGER_NAME, read_only=True) as ledger:
        run = ledger.runs.newest()
        if run is None:
            return _Moment(opened=False, done=False)
        opened = bool(ledger.rounds.newest(run.run_id, 1))
        return _Moment(opened, run.status is RunStatus.DONE)


def _cpu_of_all(pid: int) -> float:
    """Return the CPU seconds of a process and of its children, ended or not."""
    return cpu_s(pid) + sum(cpu_s(child) for child in children(pid))


def _wall(monotonic: float) -> float:
    return time.time() - (time.monotonic() - monotonic)


def arguments(about: str | None) -> argparse.ArgumentParser:
    """Return the options of a measurement."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--kilobytes", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=900)
    parser.add_argument("--relay", choices=("pass", "sums"))
    parser.add_argument("--intake", type=int, default=0)
    parser.add_argument("--ledger")
    parser.add_argument("--absent", type=int, default=0)
    return parser


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--group", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    raise_limits()
    if args.group:
        _yield_to_the_server()
        asyncio.run(_some(json.load(sys.stdin), args.group, args.rounds))
        return
    directory = Path(tempfile.mkdtemp(prefix="fcil-many-"))
    try:
        measure(args, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
