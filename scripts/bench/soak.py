"""Kill, stop and restart the daemons of one federation for a while; then check what is left.

    .venv/bin/python scripts/bench/soak.py --minutes 30 --clients 20 --seed 7

A first run is undisturbed. Then the same run again and again, while every few seconds a server
or client is killed (kill -9) and started again, stopped for a while (SIGSTOP), or loses its
worker. In the second half of a soak of 4 minutes and more the server is not killed, and one
client never is: their memory shows whether what happens around them leaks. With --intake N the
server has N intake processes, each of which may be killed too. Everything is drawn
from the seed (what the machine makes of it is not). Ends with 1 if anything acknowledged is not
counted exactly once, a final state differs from the undisturbed run in one byte, or something is
left over.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import processes
import soak_checks as checks

from fcil_protocol.errors import FcilError, Timeout
from fcil_protocol.ids import RunId
from fcil_server.lab.local.demo import write_digits
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import RunStatus
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger

LOOK_S = 1.0  # between two looks at memory and ledger
STUCK_S = 120.0  # a run without a new round for so long has lost something
STOPS_S = (0.3, 8.0)  # a stop is shorter or longer than the heartbeat's patience
CALM = "client-1"  # never killed
CALM_MINUTES = 4  # a shorter soak kills the server up to its end


def settings(clients: int, tasks: int, rounds: int, intake: int) -> list[str]:
    """Every client must answer every round, however long that takes."""
    given = {
        "method.name": "running_mean",
        "tasks.schedule": "listed",
        "tasks.classes": [[str(2 * t), str(2 * t + 1)] for t in range(tasks)],
        "round.rounds_per_task": rounds,
        "round.min_clients": clients,
        "round.quorum": clients,
        "round.deadline_s": 86_400.0,
        "round.grace_s": 3600.0,
        "federation.heartbeat_s": 1.0,
        "federation.intake": intake,
        "run.plots": False,
    }
    arguments = []
    for key, value in given.items():
        text = value if isinstance(value, str) else json.dumps(value)
        arguments += ["-c", f"{key}={text}"]
    return arguments


@dataclass
class Soak:
    """One federation under fire."""

    federation: LocalFederation
    folders: dict[str, Path]
    arguments: list[str]
    intake: int
    rng: random.Random
    pause_s: float
    ends: float  # monotonic
    calm_from: float  # monotonic: the server is not killed any more
    began: float = field(default_factory=time.monotonic)
    did: Counter[str] = field(default_factory=Counter)
    watch: checks.Watch = field(default_factory=checks.Watch)
    at_rest: dict[str, list[int]] = field(default_factory=dict)  # open files after each run
    asleep: dict[int, tuple[float, subprocess.Popen[bytes]]] = field(default_factory=dict)

    # --- runs -------------------------------------------------------------------------------

    def newest(self) -> tuple[RunId, RunStatus, int] | None:
        """The newest run, how it stands and how many rounds it has had, from the ledger."""
        with Ledger(self.federation.federation / LEDGER_NAME, read_only=True) as ledger:
            run = ledger.runs.newest()
            rounds = 0 if run is None else len(ledger.rounds.all(run.run_id))
        return None if run is None else (run.run_id, run.status, rounds)

    def start(self, name: str) -> None:
        self.federation.join(name, self.folders[name], "--threads", "1")

    def serve(self, *extra: str) -> None:
        self.federation.serve(*extra, *self.arguments)

    def one_run(self, before: RunId | None, *, disturbed: bool) -> RunId:
        """Go on until a run after ``before`` is complete; return it."""
        moved, seen = time.monotonic(), self.newest()
        next_blow = time.monotonic() + self.rng.expovariate(1 / self.pause_s)
        while True:
            self.alive()
            row = self.newest()
            if row is not None and row[0] != before:
                if row[1] is RunStatus.DONE:
                    return row[0]
                if row[1] is not RunStatus.RUNNING:
                    raise SystemExit(f"run {row[0]} is {row[1]}")
            now = time.monotonic()
            if row != seen:
                moved, seen = now, row
            if now > moved + STUCK_S:
                raise Timeout(f"{row}: no new round for {STUCK_S:.0f} s")
            self.wake(now)
            if disturbed and now >= next_blow:
                self.blow(now, new=row is None or row[0] == before)
                next_blow = time.monotonic() + self.rng.expovariate(1 / self.pause_s)
            self.look(now)
            time.sleep(min(LOOK_S, max(0.01, next_blow - time.monotonic())))

    def alive(self) -> None:
        """Raise if a daemon ended by itself."""
        server = self.federation.server
        assert server is not None
        if server.poll() is not None:
            words = self.federation.last_words("server")
            raise SystemExit(f"the server ended by itself with {server.returncode}: {words}")
        self.federation.check_clients()

    def look(self, now: float) -> None:
        assert self.federation.server is not None
        at = now - self.began
        self.watch.look("server", self.federation.server.pid, at)
        self.watch.look(CALM, self.federation.clients[CALM].pid, at)

    # --- blows ------------------------------------------------------------------------------

    def blow(self, now: float, *, new: bool) -> None:
        """Do one harm, drawn from the seed."""
        deeds = ["kill client", "stop client", "kill client's worker"] * 2
        deeds += ["stop server", "kill server's worker"]
        deeds += ["kill intake process"] * (4 if self.intake else 0)
        deeds += ["kill server"] * (3 if now < self.calm_from else 0)
        deed, name = self.rng.choice(deeds), self.rng.choice(sorted(self.folders))
        length_s = self.rng.uniform(*STOPS_S)
        if deed == "kill client" and name == CALM:
            deed = "stop client"
        process = self.federation.clients[name] if "client" in deed else self.federation.server
        assert process is not None
        self.did[deed] += 1
        match deed:
            case "kill client":
                self.federation.kill_client(name)
                self.start(name)
            case "kill server":
                self.federation.kill_server()
                self.serve(*["--new-run"] * new)
            case "stop client" | "stop server":
                process.send_signal(signal.SIGSTOP)
                self.asleep[process.pid] = (now + length_s, process)
            case "kill intake process":
                self.kill_intake(process)
            case _:
                self.kill_worker(process)

    def kill_worker(self, daemon: subprocess.Popen[bytes]) -> None:
        """Kill what a daemon that we started has started itself."""
        for pid in processes.children(daemon.pid):
            subprocess.run(["kill", "-KILL", str(pid)], check=False, stderr=subprocess.DEVNULL)

    def kill_intake(self, server: subprocess.Popen[bytes]) -> None:
        """Kill one of the server's intake processes; a moment after the last, there may be none."""
        found = [pid for pid in processes.children(server.pid) if processes.is_intake(pid)]
        for pid in found[: self.rng.choice((1, 1, self.intake))]:
            subprocess.run(["kill", "-KILL", str(pid)], check=False, stderr=subprocess.DEVNULL)

    def wake(self, now: float) -> None:
        """Let go on who has slept long enough."""
        for pid, (until, process) in list(self.asleep.items()):
            if now >= until or process.poll() is not None:
                if process.poll() is None:
                    process.send_signal(signal.SIGCONT)
                del self.asleep[pid]

    # --- the whole --------------------------------------------------------------------------

    def run(self) -> tuple[RunId, list[RunId]]:
        """Return the undisturbed run and the disturbed ones."""
        self.serve()
        for name in self.folders:
            self.start(name)
        reference = self.one_run(None, disturbed=False)
        disturbed: list[RunId] = []
        while not disturbed or time.monotonic() < self.ends:
            self.wake(math.inf)
            self.until_at_rest()
            self.again()
            disturbed.append(self.one_run([reference, *disturbed][-1], disturbed=True))
            spent = time.monotonic() - self.began
            print(f"{spent:6.0f} s: {len(disturbed)} runs, {sum(self.did.values())} blows")
        self.wake(math.inf)
        self.until_at_rest()
        return reference, disturbed

    def again(self) -> None:
        """Begin another run: the server is stopped and started as an operator would."""
        server = self.federation.server
        assert server is not None
        server.send_signal(signal.SIGTERM)
        if server.wait(60) != 0:
            raise SystemExit(f"asked to stop, the server ended with {server.returncode}")
        self.serve("--new-run")

    def until_at_rest(self) -> None:
        """Wait until everybody is connected and the server has told of the run's end."""
        ends = time.monotonic() + STUCK_S
        while time.monotonic() < ends:
            self.alive()
            status = self.federation.status()
            here = [c for c in status["clients"] if c["state"] == "ready"] if status else []
            told = {note["code"] for note in status["notes"]} if status else set()
            if len(here) == len(self.folders) and "run_done" in told:
                break
            time.sleep(0.1)
        else:
            raise Timeout(f"not everybody came back within {STUCK_S:.0f} s")
        assert self.federation.server is not None
        daemons = {"server": self.federation.server, CALM: self.federation.clients[CALM]}
        for name, process in daemons.items():
            self.at_rest.setdefault(name, []).append(processes.descriptors(process.pid) or 0)


def judge(
    soak: Soak, reference: RunId, disturbed: list[RunId], rows: list[tuple[str, str]]
) -> list[str]:
    """Return everything that is not as it must be; fill the table."""
    federation, faults = soak.federation, []
    for name in ("server", CALM):
        if math.isfinite(soak.calm_from):  # else a long life is a slow start, which fills caches
            faults += checks.memory_faults(name, soak.watch.longest(name), rows)
        faults += checks.descriptor_faults(name, soak.at_rest[name], rows)
    federation.stop()
    faults += checks.orphan_faults(federation)
    number, digest = checks.final_state(federation, reference)
    for run in (reference, *disturbed):
        faults += checks.run_faults(federation, run, len(soak.folders))
        if checks.final_state(federation, run) != (number, digest):
            faults.append(f"{run}: the final state differs from the undisturbed run's")
    faults += checks.leftover_faults(federation)
    faults += [
        f"{path.name} holds a traceback"
        for path in (federation.directory / "logs").iterdir()
        if "Traceback" in path.read_text(errors="replace")
    ]
    return faults


def _calm_from(args: argparse.Namespace) -> float:
    """After how many minutes the server is not killed any more."""
    if args.spare_server:
        return 0.0
    return float(args.minutes / 2) if args.minutes >= CALM_MINUTES else math.inf


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--tasks", type=int, default=3, choices=range(1, 6))
    parser.add_argument("--rounds", type=int, default=4, help="in each task")
    parser.add_argument("--intake", type=int, default=0, help="intake processes of the server")
    parser.add_argument("--pause", type=float, default=4.0, help="mean seconds between blows")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--spare-server", action="store_true", help="never kill the server")
    parser.add_argument("--keep", type=Path, help="directory to keep everything in")
    args = parser.parse_args()
    directory = args.keep or Path(tempfile.mkdtemp(prefix="fcil-soak-"))
    now = time.monotonic()
    data = write_digits(directory / "data", args.clients)
    rows: list[tuple[str, str]] = []
    with LocalFederation(directory) as federation:
        soak = Soak(
            federation,
            {path.name: path for path in data},
            settings(args.clients, args.tasks, args.rounds, args.intake),
            args.intake,
            random.Random(args.seed),
            args.pause,
            ends=now + 60 * args.minutes,
            calm_from=now + 60 * _calm_from(args),
        )
        try:
            reference, disturbed = soak.run()
            faults = judge(soak, reference, disturbed, rows)
        except (FcilError, SystemExit) as error:
            disturbed, faults = [], [str(error)]
        soak.wake(math.inf)
    minutes = (time.monotonic() - now) / 60
    rows.insert(0, ("minutes, clients, seed", f"{minutes:.1f}, {args.clients}, {args.seed}"))
    rows.insert(1, ("runs beside the undisturbed one", str(len(disturbed))))
    rows[2:2] = [(deed, str(count)) for deed, count in sorted(soak.did.items())]
    for row in rows:
        print(f"{row[0]:58} {row[1]}")
    for fault in faults[:50]:
        print(f"FAULT: {fault}")
    print("faults:", len(faults))
    if not args.keep and not faults:
        shutil.rmtree(directory, ignore_errors=True)
    elif faults:
        print(f"kept: {directory}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
