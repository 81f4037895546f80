"""Two hosts of which one moves; run in namespaces of its own, with no rights needed.

    unshare -rmn python tests/system/hosts/moving.py DIRECTORY client|server

A client on another host (a network namespace behind a veth pair) loses its address in the middle
and gets another; or the name under which it knows the server leads elsewhere from then on.
Prints a line of JSON: how many seconds until the client was back.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tests"))

from fcil_server.lab.local.federation import LocalFederation  # noqa: E402
from system.kit import settings, write_client  # noqa: E402

HERE, THERE, MOVED, ELSEWHERE = "10.98.0.1", "10.98.0.2", "10.98.0.3", "10.98.0.4"


def do(command):
    subprocess.run(command.split(), check=True)


class Hosts(LocalFederation):
    """The server is on this host, clients are on the other one."""

    def prepare(self):
        hosts = self.directory / "hosts"
        hosts.write_text("")
        do(f"mount --bind {hosts} /etc/hosts")
        told = ["sh", "-c", "echo there; exec sleep 600 >&-"]
        self.other = subprocess.Popen(["unshare", "-n", *told], stdout=subprocess.PIPE)
        with self.other.stdout as words:
            assert words.readline() == b"there\n"  # it has its own namespace by now
        do(f"ip link add v0 type veth peer name v1 netns {self.other.pid}")
        do("ip link set lo up")
        do(f"ip addr add {HERE}/24 dev v0")
        do(f"ip addr add {ELSEWHERE}/24 dev v0")
        do("ip link set v0 up")
        self.there("ip link set lo up")
        self.there(f"ip addr add {THERE}/24 dev v1")
        self.there("ip link set v1 up")
        self.name(HERE)

    def there(self, command):
        do(f"nsenter -t {self.other.pid} -n {command}")

    def name(self, address):
        Path("/etc/hosts").write_text(f"{address} fcil-lab\n")

    def _start(self, name, arguments, extra):
        if arguments[0] != "fcil_client":
            return super()._start(name, arguments, extra)
        log = self._files.enter_context(self.log(name).open("ab"))
        enter = ["nsenter", "-t", str(self.other.pid), "-n"]
        return subprocess.Popen(
            [*enter, sys.executable, "-m", *arguments],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment(),
        )  # fmt: skip


def main(directory, who):
    federation = Hosts(directory)
    federation.port = 7710
    try:
        federation.prepare()
        arguments = settings(
            tasks__classes=[["0", "1"], ["2", "3"]], round__min_clients=1,
            federation__advertise=["fcil-lab:7710"],
        )  # fmt: skip
        federation.serve("-c", f"federation.listen={HERE}:7710", *arguments)
        federation.join("a", write_client(directory / "a", range(4)))
        federation.until("announced")
        federation.until("run_done")
        began = time.monotonic()
        if who == "client":
            federation.there(f"ip addr add {MOVED}/24 dev v1")
            federation.there(f"ip addr del {THERE}/24 dev v1")
            federation.there(f"ip addr replace {MOVED}/24 dev v1")
        else:
            federation.kill_server()
            federation.name(ELSEWHERE)
            federation.serve("-c", f"federation.listen={ELSEWHERE}:7710", *arguments)
        federation.until("announced")
        print(json.dumps({"back_s": round(time.monotonic() - began, 1)}))
    finally:
        federation.stop()
        federation.other.send_signal(signal.SIGKILL)
        federation.other.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
