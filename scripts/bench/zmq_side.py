"""Bare ZeroMQ for `rounds.py`: one ROUTER, N DEALER processes, CURVE, chunks of 1 MiB.

The server sends S bytes to each client, each answers with S other bytes, and the server
writes all answers of a round to one file and syncs it.
"""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import zmq

CHUNK = 1 << 20


def _socket(context: zmq.Context, kind: int, own: tuple[bytes, bytes]) -> zmq.Socket:
    sock = context.socket(kind)
    sock.curve_publickey, sock.curve_secretkey = own
    sock.linger = 0
    return sock


def _chunks(size: int, fill: int) -> list[bytes]:
    body = os.urandom(min(size, CHUNK - 1)) + bytes([fill % 256])
    return [body[: min(CHUNK, size - at)] for at in range(0, size, CHUNK)]


def client(port: str, size: str, rounds: str, server_key: str) -> None:
    """Answer every round."""
    context = zmq.Context()
    sock = _socket(context, zmq.DEALER, zmq.curve_keypair())
    sock.curve_serverkey = bytes.fromhex(server_key)
    sock.connect(f"tcp://127.0.0.1:{port}")
    sock.send(b"here")
    for number in range(int(rounds)):
        got = 0
        while got < int(size):
            chunk = sock.recv()
            hashlib.sha256(chunk)
            got += len(chunk)
        for chunk in _chunks(int(size), number):
            sock.send(chunk)
    sock.recv()
    context.destroy(0)


def bare(case: Any, directory: Path) -> tuple[list[float], float, float]:
    """Return seconds of the rounds but the first, and memory at most."""
    from processes import peak_mb

    size = round(case.kilobytes * 1000)
    context = zmq.Context()
    public, secret = zmq.curve_keypair()
    sock = _socket(context, zmq.ROUTER, (public, secret))
    sock.curve_server = True
    port = sock.bind_to_random_port("tcp://127.0.0.1")
    code = f"import sys; sys.path[:0] = {sys.path!r}; import zmq_side as z"
    code += f"; z.client('{port}', '{size}', '{case.rounds}', '{public.hex()}')"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(case.clients)]
    routes = [sock.recv_multipart()[0] for _ in processes]
    seconds = []
    with (directory / "spool").open("wb") as file:
        for number in range(case.rounds):
            began = time.monotonic()
            for chunk in _chunks(size, number):
                for route in routes:
                    sock.send_multipart([route, chunk])
            left = size * case.clients
            while left:
                chunk = sock.recv_multipart()[1]
                hashlib.sha256(chunk)
                file.write(chunk)
                left -= len(chunk)
            file.flush()
            os.fdatasync(file.fileno())
            seconds.append(time.monotonic() - began)
    client_mb = max(peak_mb(p.pid) for p in processes)
    for route in routes:
        sock.send_multipart([route, b"over"])
    for process in processes:
        process.wait()
    context.destroy(0)
    return seconds[1:], peak_mb(os.getpid()), client_mb
