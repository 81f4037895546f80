"""Attacks beside honest clients on a real server: what each costs in memory, disk and rounds.

A server with the numpy method and two honest clients learn without end; for each attack they are
started anew, and attacked by a process of its own (`attackers.py`). Four more need no server: what
a folder of images, or somebody with a copy of a cookie, can do.

.venv/bin/python scripts/bench/attacks.py [--only NAME ...] [--most-s 60] [--check] [--list]

--check exits with 1 where a bound in bytes or counts does not hold. Seconds are printed, and
never checked.
"""

import argparse
import itertools
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import attackers
import still_attacks
from attackers import Came, Place
from processes import descriptors, status_mb

from fcil_protocol.errors import LinkError
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import Outcome, UpdateStatus
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from system.kit import settings, write_client

HONEST = ("ann", "bob")
ENDLESS = {
    "round__rounds_per_task": 100_000,
    "round__deadline_s": 60,
    "run__evaluate": False,
    "tasks__classes": [["0", "1"]],
}
WARM, AFTER = 5, 3  # rounds before an attack is begun, and after its end
ATTACK_WAIT_S = 60.0  # for these
LOOK_S = 0.05
MOST_MB = 64.0  # that an attack may cost in memory, and of log of the ledger
MOST_FILES = 16  # descriptors that may stay open
HEAD = (
    "attack", "RSS before", "at most", "after, MB", "WAL at most, MB", "ledger +, MB", "log +, MB",
    "files before / at most / after", "rounds with both / closed", "longest gap, s", "attacker",
)  # fmt: skip


@dataclass
class Look:
    """A server's figures at one moment, MB and descriptors."""

    rss: float
    wal: float
    ledger: float
    log: float
    files: int


@dataclass
class Row:
    """What an attack did.

    Attributes:
        closed, both: rounds that closed from its begin on, and those that counted both.
        other: updates of honest clients that have another end.
        gap: longest time without a closed round, seconds.
    """

    name: str
    before: Look
    most: Look
    after: Look
    closed: int
    both: int
    other: list[str]
    gap: float
    came: Came
    more_rounds: bool
    faults: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return it as a line of the table."""
        before, most, after = self.before, self.most, self.after
        came = ", ".join(f"{k} {v}" for k, v in self.came.more.items())
        word = "refused" if self.came.refused else "not refused"
        cells = (
            self.name, f"{before.rss:.0f}", f"{most.rss:.0f}", f"{after.rss:.0f}",
            f"{most.wal:.1f}", f"{after.ledger - before.ledger:.1f}",
            f"{after.log - before.log:.2f}", f"{before.files} / {most.files} / {after.files}",
            f"{self.both} / {self.closed}", f"{self.gap:.1f}",
            f"{word}, {self.came.sent / 1e6:.1f} MB taken" + (f" ({came})" if came else ""),
        )  # fmt: skip
        return line(cells)

    def check(self) -> list[str]:
        """Return a sentence for each bound that does not hold."""
        cost, left = self.most.rss - self.before.rss, self.after.files - self.before.files
        found = {
            f"it cost {cost:.0f} MB of memory, more than {MOST_MB:g}": cost > MOST_MB,
            f"the ledger's log had {self.most.wal:.0f} MB, more than {MOST_MB:g}": self.most.wal
            > MOST_MB,
            f"{left} more descriptors stay open": left > MOST_FILES,
            f"{self.closed - self.both} rounds closed without both": self.both < self.closed,
            f"updates that are not counted: {self.other[:3]}": bool(self.other),
            "rounds do not go on after it": not self.more_rounds,
            "the attacker was not refused": not self.came.refused,
        }
        if self.name == "newcomers":
            entered = self.came.more.get("in", 0)
            found[f"{entered} of 5 newcomers came in"] = entered < 5
        return [text for text, broken in found.items() if broken]


def line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


class Town:
    """A server with two honest clients, and who looks at it all the time."""

    def __init__(self, federation: LocalFederation, folder: Path) -> None:
        self.federation = federation
        federation.serve(*settings(**ENDLESS))
        for number, name in enumerate(HONEST):
            data = write_client(folder / name, range(2), offset=12 * number)
            federation.join(name, data)
        self._ledger = federation.federation / LEDGER_NAME
        self._seen: list[Look] = []
        self._over = threading.Event()
        assert federation.server is not None
        self._pid = federation.server.pid

    def closed(self) -> int:
        with Ledger(self._ledger, read_only=True) as ledger:
            run = ledger.runs.newest()
            return ledger.rounds.count_closed(run.run_id, 0) if run is not None else 0

    def until_closed(self, count: int) -> bool:
        ends = time.monotonic() + ATTACK_WAIT_S
        while self.closed() < count:
            if time.monotonic() > ends:
                return False
            time.sleep(LOOK_S)
        return True

    def look(self) -> Look:
        log = self._ledger.with_name(f"{LEDGER_NAME}-wal")
        said = self.federation.log("server")
        return Look(
            rss=status_mb(self._pid) or 0.0,
            wal=_mb(log), ledger=_mb(self._ledger), log=_mb(said),
            files=descriptors(self._pid) or 0,
        )  # fmt: skip

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            self._seen.append(self.look())

    def attacked(self, name: str, most_s: float) -> Row:
        """Carry out an attack and look at what it does."""
        self.until_closed(WARM)
        before, first, began = self.look(), self.closed(), time.time()
        watcher = threading.Thread(target=self._watch)
        watcher.start()
        try:
            came = attackers.attack(
                name, Place(self.federation.federation, self.federation.port), most_s
            )
            goes_on = self.until_closed(self.closed() + AFTER)
        finally:
            self._over.set()
            watcher.join()
        after = self.look()
        seen = [before, *self._seen, after]
        most = Look(*(max(getattr(look, field_) for look in seen) for field_ in vars(before)))
        rounds, both, other, gap = self._rounds(first, began)
        return Row(name, before, most, after, rounds, both, other, gap, came, goes_on)

    def _rounds(self, first: int, began: float) -> tuple[int, int, list[str], float]:
        with Ledger(self._ledger, read_only=True) as ledger:
            run = ledger.runs.newest()
            assert run is not None
            honest = {c.client_id for c in ledger.clients.all() if c.name.endswith(HONEST)}
            rows = [r for r in ledger.rounds.all(run.run_id) if r.closed_at is not None][first:]
            both, other = 0, []
            for row in rows:
                updates = {
                    u.client: u for u in ledger.updates.of_round(row.key) if u.client in honest
                }
                counted = [u for u in updates.values() if u.status is UpdateStatus.COUNTED]
                both += row.outcome is Outcome.DONE and len(counted) == len(HONEST)
                other += [u.status.value for u in updates.values() if u not in counted]
        ends = [began, *(r.closed_at or 0 for r in rows), time.time()]
        gap = max(b - a for a, b in itertools.pairwise(ends))
        return len(rows), both, other, gap


def _mb(path: Path) -> float:
    try:
        return path.stat().st_size / 1e6
    except FileNotFoundError:
        return 0.0


def besieged(name: str, most_s: float) -> Row:
    """Attack a federation of its own."""
    folder = Path(tempfile.mkdtemp(prefix="fcil-attack-"))
    try:
        with LocalFederation(folder) as federation:
            return Town(federation, folder).attacked(name, most_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(names: list[str], most_s: float) -> Iterator[str]:
    """Print the tables; yield what does not hold."""
    from_outside = [name for name in names if name in attackers.ATTACKS]
    if from_outside:
        print(f"{line(HEAD)}\n{line(tuple('---' for _ in HEAD))}", flush=True)
    for name in from_outside:
        try:
            row = besieged(name, most_s)
        except LinkError as error:
            yield f"{name}: {error}"
            continue
        print(row.text(), flush=True)
        yield from (f"{name}: {fault}" for fault in row.check())
    quiet = [name for name in names if name in still_attacks.ATTACKS]
    if quiet:
        print("\n| attack | found | allowed |\n|---|---|---|", flush=True)
    for name in quiet:
        found = still_attacks.ATTACKS[name](most_s)
        print(line((name, found.text, found.allowed)), flush=True)
        if not found.holds:
            yield f"{name}: {found.text}; allowed: {found.allowed}"


def main() -> None:
    names = [*attackers.ATTACKS, *still_attacks.ATTACKS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=names)
    parser.add_argument("--most-s", type=float, default=60.0, help="for each attack, seconds")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bound is broken")
    parser.add_argument("--list", action="store_true", help="print the names of all attacks")
    args = parser.parse_args()
    if args.list:
        print("\n".join(names))
        return
    faults = list(run(args.only, args.most_s))
    print(*(f"\nnot held: {fault}" for fault in faults), sep="")
    if args.check and faults:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
