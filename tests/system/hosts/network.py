"""Several hosts on one bridge: network namespaces, each of which can lose its line. Linux only.

The caller runs in a namespace of its own (`unshare -rn`), in which the bridge is.
"""

import contextlib
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from fcil_protocol.process.children import LAUNCHER, ChildProcess, module_command
from fcil_server.lab.local.federation import LocalFederation

BRIDGE = "fcil-bridge"


def do(command):
    subprocess.run(command.split(), check=True)


class Host:
    """One host.

    Attributes:
        address: its own.
        enter: words before a command that let it run there.
    """

    def __init__(self, number):
        self.address = f"10.97.0.{number}"
        self._line = f"line{number}"
        self._ethernet = f"02:00:00:00:00:{number:02x}"
        ready = ["sh", "-c", "echo ready; exec sleep infinity >&-"]
        self._held = subprocess.Popen(["unshare", "-n", *ready], stdout=subprocess.PIPE)
        try:
            with self._held.stdout as words:
                assert words.readline() == b"ready\n"  # it has its own namespace by now
            self.enter = ["nsenter", "-t", str(self._held.pid), "-n"]
            do(f"ip link add {self._line} type veth peer name net0 netns {self._held.pid}")
            do(f"ip link set {self._line} master {BRIDGE} up")
            self.do("ip link set lo up")
            self.do(f"ip link set net0 address {self._ethernet}")
            self.do(f"ip addr add {self.address}/24 dev net0")
            self.do("ip link set net0 up")
        except BaseException:
            self.close()
            raise

    def do(self, command):
        """Run a command there."""
        do(" ".join([*self.enter, command]))

    def reach_for_ever(self, other):
        """Send another host's packets even if it is gone, as to a host behind a router."""
        self.do(f"ip neigh replace {other.address} lladdr {other._ethernet} dev net0 nud permanent")

    def unplug(self):
        """Cut its line without a notice: from now on nothing leaves and nothing comes."""
        do(f"ip link set {self._line} nomaster")

    def plug_in(self):
        """Connect its line again."""
        do(f"ip link set {self._line} master {BRIDGE}")

    def close(self):
        """End it."""
        self._held.kill()
        self._held.wait()


@contextlib.contextmanager
def hosts(count):
    """Yield that many hosts, all of which reach each other and this process's host."""
    do("ip link set lo up")
    do(f"ip link add {BRIDGE} type bridge")
    do(f"ip addr add 10.97.0.254/24 dev {BRIDGE}")
    do(f"ip link set {BRIDGE} up")
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(Host(n))) for n in range(1, count + 1)]


def why_no_hosts():
    """Return why no hosts can be made here; empty: they can."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return "unshare or ip is not installed"
    probe = [
        "unshare",
        "-rn",
        "sh",
        "-c",
        "ip link add fcil-b type bridge && ip link add fcil-v type veth",
    ]
    tried = subprocess.run(probe, capture_output=True, check=False, text=True)
    return (tried.stderr.strip() or "the probe failed") if tried.returncode else ""


@dataclass
class Spread(LocalFederation):
    """A federation whose processes are on several hosts.

    Attributes:
        places: a process's name -> its host; "": all others'.
    """

    places: dict[str, Host] = field(default_factory=dict)

    def _start(self, name, arguments, extra):
        log = self._files.enter_context(self.log(name).open("ab"))
        host = self.places.get(name, self.places[""])
        command = [*host.enter, *module_command(LAUNCHER, *arguments)]
        environment = {**self.environment(), **(extra or {})}
        return ChildProcess(command, env=environment, stdout=log, stderr=log)


def started_on(host, folder, bin_folder):
    """Start Postgres on a host; return it. It cannot run as root, which this process may be."""
    from postgres_kit import Cluster

    as_user = ["unshare", "--map-user=1000", "--map-group=1000"]
    return Cluster(Path(folder), bin_folder, [*host.enter, *as_user], address=host.address)
