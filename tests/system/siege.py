"""A server under attack while honest clients learn: do rounds go on, and what does it cost?"""

import asyncio
import os
from dataclasses import dataclass

from fcil_protocol.process import control_socket
from fcil_server.ledger.enums import Outcome, UpdateStatus
from system.kit import open_ledger, settings, write_client

HONEST = ("ann", "bob")
MORE_ROUNDS = 2  # that must open and close, with both, while an attack goes on

# Rounds without end. Whoever is asked and does not answer is waited for half a second, and a
# round without both honest updates is opened again, so a slow machine fails nothing.
ENDLESS = {
    "round__rounds_per_task": 10_000,
    "round__deadline_s": 0.5,
    "round__max_reopens": 1_000_000,
    "run__evaluate": False,
    "tasks__classes": [["0", "1"]],
}


@dataclass(frozen=True)
class Facts:
    """What the kernel says of the server's process, and what lies in its way.

    Attributes:
        peak: most memory since the last look, MB.
        files: open descriptors.
        incoming: bytes of envelopes that are arriving or were left behind, MB.
    """

    peak: float
    files: int
    incoming: float


def size_of(path):
    """Return the bytes of a file of a server at work; none, if it has just been removed."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class Siege:
    """Honest clients of a running federation, and its server's process."""

    def __init__(self, federation, folder, **extra):
        self.federation = federation
        federation.serve(*settings(**ENDLESS | extra))
        for i, name in enumerate(HONEST):
            federation.join(name, write_client(folder / name, range(2), offset=12 * i))
        with open_ledger(federation) as ledger:
            self.run = ledger.runs.newest().run_id
        self._until_closed(3)

    # --- rounds -----------------------------------------------------------------------------

    def closed(self):
        """Return how many rounds are closed."""
        with open_ledger(self.federation) as ledger:
            return ledger.rounds.count_closed(self.run, 0)

    def _until_closed(self, count):
        while self.closed() < count:
            self.federation.until("update")

    async def passes(self):
        """Yield until more rounds have opened and closed since the start; then check them."""
        first, number = self.closed() + 1, 0
        while number == 0 or self.closed() < first + MORE_ROUNDS:
            yield number
            number += 1
        self._check(first)

    def _check(self, first):
        self.federation.check_clients()
        with open_ledger(self.federation) as ledger:
            names = {c.client_id: c.name for c in ledger.clients.all()}
            for row in ledger.rounds.all(self.run)[first : first + MORE_ROUNDS]:
                assert row.outcome is Outcome.DONE
                counted = [
                    u for u in ledger.updates.of_round(row.key) if u.status is UpdateStatus.COUNTED
                ]
                who = {names[u.client].rpartition(":")[2] for u in counted}
                assert who == set(HONEST), "both are counted and nobody else"

    def check_all(self):
        """Check that every closed round counted both honest clients, each once."""
        with open_ledger(self.federation) as ledger:
            names = {c.client_id: c.name for c in ledger.clients.all()}
            for row in ledger.rounds.all(self.run):
                if row.outcome is not Outcome.DONE:
                    continue
                found = ledger.updates.of_round(row.key)
                counted = [u.client for u in found if u.status is UpdateStatus.COUNTED]
                assert sorted(names[c].rpartition(":")[2] for c in counted) == sorted(HONEST)

    async def next_update(self):
        """Wait until an honest client's update has come."""
        await asyncio.to_thread(self.federation.until, "update")

    # --- what it costs ----------------------------------------------------------------------

    def facts(self):
        """Look at the server's process; the next peak is counted from now."""
        proc = f"/proc/{self.federation.server.pid}"
        with open(f"{proc}/status") as file:
            fields = dict(line.split(":", 1) for line in file)
        with open(f"{proc}/clear_refs", "w") as file:
            file.write("5")  # the peak begins anew
        incoming = self.federation.federation.glob("runs/*/incoming/*")
        return Facts(
            peak=int(fields["VmHWM"].split()[0]) / 1e3,
            files=len(os.listdir(f"{proc}/fd")),
            incoming=sum(map(size_of, incoming)) / 1e6,
        )

    def until_files(self, count):
        """Wait until the server has no more open descriptors than this; return how many."""
        for _ in range(200):  # updates: some twenty seconds
            if self.facts().files <= count:
                break
            self.federation.until("update")
        return self.facts().files

    def until_nothing_incoming(self):
        """Wait until the end of a round has swept away what nobody goes on with."""
        while self.facts().incoming:
            self.federation.until("update")

    def _written(self):
        """Have the server write down what it has heard of."""
        control_socket.ask(self.federation.federation, "status")

    # --- what is written down ---------------------------------------------------------------

    def refusals(self, client):
        """Return code -> how many rows tell of refused messages of a client."""
        self._written()
        found = {}
        with open_ledger(self.federation) as ledger:
            for row in ledger.refusals.newest(limit=10_000):
                if row.client == client:
                    assert row.reason
                    found[row.code] = found.get(row.code, 0) + 1
        return found

    def refused(self):
        """Return how many messages were ever refused."""
        self._written()
        with open_ledger(self.federation) as ledger:
            return sum(ledger.refusals.counts().values())
