"""Two hosts and a lossy line between them: real TCP, in namespaces, with no rights needed.

    unshare -rn python tests/system/hosts/lossy.py DIRECTORY KILOBYTES LOSS DELAY_S

A server on one host and a client on the other learn one round with updates of this size; the
line drops packets at random. Prints one line of JSON. This kernel needs no traffic shaper:
each host's only network device is a TUN device, and what one host sends a thread here reads
and writes, or does not write, to the other's.
"""

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tests"))

from fcil_server.lab.local.federation import LocalFederation  # noqa: E402
from fcil_server.ledger.enums import Direction, UpdateStatus  # noqa: E402
from fcil_server.reports.results.run_data import collect  # noqa: E402
from system.kit import open_ledger, write_client  # noqa: E402
from system.payload_kit import ENV, one_round  # noqa: E402

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000
SERVER, CLIENT, PORT = "10.99.0.1", "10.99.0.2", 7710
MTU = 1500


def device(name, own, other):
    """Make this thread's host's device; return its descriptor."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    for command in (
        "ip link set lo up",
        f"ip addr add {own} peer {other} dev {name}",
        f"ip link set {name} mtu {MTU} up",
    ):
        subprocess.run(command.split(), check=True)
    return fd


class Line(threading.Thread):
    """Carries packets between two devices, late, and not all of them."""

    def __init__(self, one, two, loss, delay_s, seed=0):
        super().__init__(daemon=True)
        self.ends = {one: two, two: one}
        self.loss, self.delay_s = loss, delay_s
        self.random = random.Random(seed)
        self.carried = self.dropped = 0

    def run(self):
        waiting = []
        while True:
            timeout = max(0, waiting[0][0] - time.monotonic()) if waiting else None
            for fd in select.select(list(self.ends), [], [], timeout)[0]:
                packet = os.read(fd, 2 * MTU)
                if self.random.random() < self.loss:
                    self.dropped += 1
                    continue
                self.carried += 1
                due = time.monotonic() + self.delay_s
                heapq.heappush(waiting, (due, self.carried, self.ends[fd], packet))
            while waiting and waiting[0][0] <= time.monotonic():
                os.write(waiting[0][2], waiting[0][3])
                heapq.heappop(waiting)


class Host(threading.Thread):
    """A thread in a network namespace of its own; what it starts runs there."""

    def __init__(self, name, own, other):
        super().__init__(daemon=True)
        self.made, self.go, self.started = (threading.Event() for _ in range(3))
        self.name_, self.own, self.other = name, own, other
        self.work = None

    def run(self):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        self.fd = device(self.name_, self.own, self.other)
        self.made.set()
        self.go.wait()
        self.work()
        self.started.set()


def main(directory, kilobytes, loss, delay_s):
    host = Host("t1", CLIENT, SERVER)
    host.start()
    if not host.made.wait(60):
        sys.exit("no second host")
    line = Line(device("t0", SERVER, CLIENT), host.fd, loss, delay_s)
    line.start()
    with LocalFederation(directory, port=PORT) as federation:
        told = [f"{SERVER}:{PORT}"]
        federation.serve(
            "--until-done",
            *one_round(kilobytes, federation__listen=f"{SERVER}:0", federation__advertise=told),
            env=ENV,
        )
        folder = write_client(directory / "data", (0, 1))
        host.work = lambda: federation.join("a", folder, env=ENV)
        host.go.set()
        host.started.wait()
        code = federation.server.wait(250)
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest().run_id
        (row,) = ledger.rounds.all(run)
        updates = ledger.updates.of_round(row.key)
        up = collect(ledger, run).bytes_of(Direction.UP).wire
    said = {
        "code": code,
        "updates": [u.status for u in updates].count(UpdateStatus.COUNTED),
        "connections": federation.log("server").read_text().count(" connected ("),
        "up": up,
        "dropped": line.dropped,
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
