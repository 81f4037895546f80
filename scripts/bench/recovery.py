"""Time until a federation works again after its server was killed (kill -9) in an open round.

    .venv/bin/python scripts/bench/recovery.py --clients 20 --times 5

Seconds after the kill, medians, until the new process listens, until every client has a session
again, and until the round is closed. Beside it the floor: a bare ROUTER with as many DEALERs
under CURVE, with the same options for reconnecting and nothing above them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import zmq

from fcil_protocol.process import control_socket
from fcil_server.lab.local.demo import write_digits
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger

SETTINGS = {
    "method.name": "running_mean",
    "tasks.schedule": "listed",
    "tasks.classes": [["0", "1"]],
    "round.rounds_per_task": 1000,
    "round.deadline_s": 86_400.0,
    "round.grace_s": 600.0,
}
EVENT_WAIT_S = 120.0

# --- the federation -------------------------------------------------------------------------


def federation_times(clients: int, times: int) -> list[tuple[float, float, float]]:
    """Seconds until it listens, until all have sessions, until a round closes; each time."""
    directory = Path(tempfile.mkdtemp(prefix="fcil-recovery-"))
    given = SETTINGS | {"round.min_clients": clients, "round.quorum": clients}
    arguments = []
    for key, value in given.items():
        text = value if isinstance(value, str) else json.dumps(value)
        arguments += ["-c", f"{key}={text}"]
    rows = []
    try:
        data = write_digits(directory / "data", clients)
        with LocalFederation(directory) as federation:
            federation.serve(*arguments)
            for path in data:
                federation.join(path.name, path, "--threads", "1")
            federation.until("update", timeout_s=EVENT_WAIT_S)
            for _ in range(times):
                federation.until("update", timeout_s=EVENT_WAIT_S)
                killed = time.time()
                federation.kill_server()
                federation.serve(*arguments)
                listening, here = _sessions(federation, clients, killed)
                rows.append((listening, here, _closed(federation, killed) - killed))
                print("  " + "  ".join(f"{x:.2f}" for x in rows[-1]), flush=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return rows


def _sessions(federation: LocalFederation, clients: int, killed: float) -> tuple[float, float]:
    """Read the new server's notes until every client has a session."""
    heard, listening, here = 0, 0.0, set[str]()
    while True:
        news = control_socket.ask(federation.federation, "notes", EVENT_WAIT_S, after=heard)
        heard = news["last"]
        for note in news["notes"]:
            if note["code"] == "serving":
                listening = note["at"] - killed
            elif note["code"] == "connected":
                here.add(note["text"].split()[0])
                if len(here) == clients:
                    return listening, note["at"] - killed


def _closed(federation: LocalFederation, killed: float) -> float:
    """When the first round since then, the one that was open, has its result in the ledger."""
    while True:
        with Ledger(federation.federation / LEDGER_NAME, read_only=True) as ledger:
            run = ledger.runs.newest()
            assert run is not None
            ends = [r.closed_at for r in ledger.rounds.all(run.run_id) if r.closed_at]
        later = [at for at in ends if at > killed]
        if later:
            return later[0]
        time.sleep(0.02)


# --- the floor ------------------------------------------------------------------------------


def _router(port: int, secret: str, public: str) -> None:
    """A server that counts who says something, and says when all have."""
    context = zmq.Context()
    sock = context.socket(zmq.ROUTER)
    sock.curve_server = True
    sock.curve_secretkey, sock.curve_publickey = secret.encode(), public.encode()
    sock.bind(f"tcp://127.0.0.1:{port}")
    print("listening", time.time(), flush=True)
    seen: set[bytes] = set()
    while True:
        who, clients = sock.recv_multipart()
        seen.add(who)
        if len(seen) == int(clients):
            print("complete", time.time(), flush=True)


def _start_router(port: int, secret: bytes, public: bytes) -> subprocess.Popen[str]:
    keys = ["--router", str(port), secret.decode(), public.decode()]
    return subprocess.Popen([sys.executable, __file__, *keys], stdout=subprocess.PIPE, text=True)


def _said(process: subprocess.Popen[str], word: str) -> float:
    assert process.stdout is not None
    while True:
        line = process.stdout.readline().split()
        if line and line[0] == word:
            return float(line[1])


def _dealers(context: zmq.Context[Any], clients: int, port: int, server: bytes) -> dict[Any, Any]:
    """Monitor and socket of each client."""
    dealers = {}
    for n in range(clients):
        sock = context.socket(zmq.DEALER)
        sock.routing_id = f"dealer-{n}".encode()
        sock.reconnect_ivl, sock.reconnect_ivl_max, sock.immediate = 200, 5000, 1
        sock.curve_publickey, sock.curve_secretkey = zmq.curve_keypair()
        sock.curve_serverkey = server
        monitor = sock.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        dealers[monitor] = sock
        sock.connect(f"tcp://127.0.0.1:{port}")
    return dealers


def floor_times(clients: int, times: int) -> list[tuple[float, float]]:
    """Seconds until a bare ROUTER listens again, and until all bare DEALERs have spoken."""
    probe = zmq.Context().socket(zmq.REP)
    port = probe.bind_to_random_port("tcp://127.0.0.1")
    probe.close()
    public, secret = zmq.curve_keypair()
    command = [sys.executable, __file__, "--dealers", str(clients), str(port), public.decode()]
    dealers = subprocess.Popen(command)
    rows = []
    router = _start_router(port, secret, public)
    try:
        _said(router, "complete")
        for _ in range(times):
            killed = time.time()
            router.kill()
            router.wait()
            router = _start_router(port, secret, public)
            rows.append((_said(router, "listening") - killed, _said(router, "complete") - killed))
    finally:
        for process in (dealers, router):
            process.kill()
            process.wait()
    return rows


def _hello(clients: int, port: int, server: str) -> None:
    """Clients that say hello whenever they are connected (again)."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4096)
    dealers = _dealers(context, clients, port, server.encode())
    poller = zmq.Poller()
    for monitor in dealers:
        poller.register(monitor, zmq.POLLIN)
    while True:
        for monitor, _ in poller.poll():
            monitor.recv_multipart()
            dealers[monitor].send(str(clients).encode())


# --- the table ------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--router", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--dealers", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.router:
        _router(int(args.router[0]), *args.router[1:])
    if args.dealers:
        _hello(int(args.dealers[0]), int(args.dealers[1]), args.dealers[2])
    whole, bare = (
        [
            statistics.median(column)
            for column in zip(*measure(args.clients, args.times), strict=True)
        ]
        for measure in (federation_times, floor_times)
    )
    print(f"seconds after kill -9 of the server, {args.clients} clients, median of {args.times}")
    print(f"{'':12} {'listens':>9} {'all here':>9} {'round closed':>13}")
    print(f"{'fcil':12} {whole[0]:9.2f} {whole[1]:9.2f} {whole[2]:13.2f}")
    print(f"{'bare ZeroMQ':12} {bare[0]:9.2f} {bare[1]:9.2f} {'':>13}")


if __name__ == "__main__":
    main()
