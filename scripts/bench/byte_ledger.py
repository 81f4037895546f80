"""The ledger's bytes against a network device's own counters, at each level and size.

A server and a client in two network namespaces, joined by a veth pair whose devices neither
merge nor split segments. After a run the ledger's kernel counts, as Ethernet frames, must be
what the server's device has counted. Needs user namespaces; nothing leaves the machine.

.venv/bin/python scripts/bench/byte_ledger.py [--kilobytes 10 100 1000 10000] [--rounds 3]
"""

import argparse
import ctypes
import fcntl
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from processes import again_inside, with_method

from fcil_protocol.process.children import module_command
from fcil_server.lab.local.demo import write_digits
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import Direction
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.reports.results.round_views import Bytes

HERE, THERE = "10.9.0.1", "10.9.0.2"
METHOD = Path(__file__).parent / "payload_method"

_SIOCETHTOOL = 0x8946
_OFF = (0x1F, 0x24, 0x2C)  # ETHTOOL_STSO, SGSO, SGRO: do not merge segments


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def keep_segments(device: str) -> None:
    """Switch off what would show several segments as one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for command in _OFF:
            value = ctypes.create_string_buffer(struct.pack("=II", command, 0))
            request = struct.pack("@16sP16x", device.encode(), ctypes.addressof(value))
            fcntl.ioctl(sock, _SIOCETHTOOL, request)


def device_bytes(device: str) -> tuple[int, int]:
    """Return what a device of this namespace has received and sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == device:
            fields = numbers.split()
            return int(fields[0]), int(fields[8])
    raise SystemExit(f"there is no device {device}")


@contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Yield what a command is prefixed with to run on the other host."""
    pipe = subprocess.PIPE
    with subprocess.Popen(["unshare", "-n", "cat"], stdin=pipe, stdout=pipe) as other:
        prefix = ["nsenter", "-t", str(other.pid), "-n"]
        try:
            assert other.stdin is not None
            assert other.stdout is not None
            other.stdin.write(b"there?\n")
            other.stdin.flush()
            other.stdout.readline()  # cat answers once it is in its own namespace
            ip("link", "set", "lo", "up")
            ip("link", "add", "v0", "type", "veth", "peer", "name", "v1")
            ip("link", "set", "v1", "netns", str(other.pid))
            ip("addr", "add", f"{HERE}/24", "dev", "v0")
            ip("link", "set", "v0", "up")
            subprocess.run([*prefix, "ip", "addr", "add", f"{THERE}/24", "dev", "v1"], check=True)
            subprocess.run([*prefix, "ip", "link", "set", "v1", "up"], check=True)
            keep_segments("v0")
            code = f"import sys; sys.path[:0] = {sys.path!r}; import byte_ledger as b"
            there = [*prefix, sys.executable, "-c", f"{code}; b.keep_segments('v1')"]
            subprocess.run(there, check=True)
            yield prefix
        finally:
            assert other.stdin is not None
            other.stdin.close()


def measure(kilobytes: float, rounds: int, prefix: list[str], directory: Path) -> list[str]:
    """Run a federation over the wire; return a row for each direction."""
    [data] = write_digits(directory / "data", 1)
    settings = {
        "method.name": "payload",
        "method.kilobytes": kilobytes,
        "tasks.schedule": "listed",
        "tasks.classes": '[["0", "1"]]',
        "round.rounds_per_task": rounds,
        "round.min_clients": 1,
        "federation.listen": f"{HERE}:7710",
        "run.evaluate": "false",
    }
    before = device_bytes("v0")
    with LocalFederation(directory, port=7710) as federation, ExitStack() as stack:
        federation.serve(
            "--until-done", *(a for k, v in settings.items() for a in ("-c", f"{k}={v}"))
        )
        log = stack.enter_context((directory / "logs" / "client.log").open("ab"))
        federation.clients["client"] = subprocess.Popen(
            [*prefix, *module_command("fcil_client", "join", "--data", str(data))],
            env=federation.environment(),
            stdout=log,
            stderr=log,
        )
        assert federation.server is not None
        if federation.server.wait(600) != 0:
            raise SystemExit(federation.last_words("server"))
    after = device_bytes("v0")
    with Ledger(federation.federation / LEDGER_NAME, read_only=True) as ledger:
        run = ledger.runs.newest()
        assert run is not None
        flows = [*ledger.bytes.all(run.run_id), *ledger.bytes.all(None)]
    return [
        row(kilobytes, d, Bytes.total(f for f in flows if f.direction is d), after[i] - before[i])
        for i, d in enumerate((Direction.UP, Direction.DOWN))
    ]


def row(kilobytes: float, direction: Direction, b: Bytes, device: int) -> str:
    """Return a line of the table."""
    levels = (b.tensor, b.sealed, b.application, b.wire, b.wire_kernel, b.link)
    cells = [f"{100 * (n - device) / device:+.2f} %" for n in levels]
    return (
        f"| {kilobytes:g} kB | {direction.value} | {device:,} | {' | '.join(cells)} "
        f"| {b.link - device:+,} B |"
    )


def inside(args: argparse.Namespace) -> None:
    with_method(METHOD)
    levels = "tensors | sealed | messages | predicted | kernel | frames"
    print(f"| tensors, each round | | device | {levels} | |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with two_hosts() as prefix:
        for kilobytes in args.kilobytes:
            directory = Path(tempfile.mkdtemp(prefix="fcil-bytes-"))
            try:
                print(*measure(kilobytes, args.rounds, prefix, directory), sep="\n", flush=True)
            finally:
                shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kilobytes", type=float, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        inside(args)
        return
    sys.exit(again_inside("-rnm"))


if __name__ == "__main__":
    main()
