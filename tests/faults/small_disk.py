"""A federation on a real, small disk that fills up and is freed, or becomes read-only.

Run inside a namespace of its own: ``unshare -rm python small_disk.py CASE DIRECTORY``. It
mounts a tmpfs that nobody else sees, and ends with 0 when every promise was kept.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from faults.kit import Keeper, Scene, keeps_its_promises, open_ledger

STEP_S = 0.05
ROUNDS = {"round__rounds_per_task": 8}


def mount(*arguments):
    subprocess.run(["mount", *map(str, arguments)], check=True)


def wait(process, condition, what, limit_s=60.0):
    """Wait until the condition holds; the process is allowed to end meanwhile."""
    for _ in range(int(limit_s / STEP_S)):
        if condition():
            return
        try:
            process.wait(STEP_S)
        except subprocess.TimeoutExpired:
            continue
        assert condition(), f"it ended before {what}"
        return
    raise AssertionError(f"{what}: not within {limit_s:.0f} s")


def fill(disk: Path) -> Path:
    """Fill the disk to its last byte."""
    ballast = disk / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(b"\0" * size) == size:
                    pass
            except OSError:
                continue
    return ballast


def closed(federation) -> int:
    with open_ledger(federation) as ledger:
        return sum(r.closed_at is not None for r in ledger.rounds.all(ledger.runs.newest().run_id))


class EndsOnADisk(Keeper):
    """A server may end on a full disk, with its sentence; it is started when there is room."""

    def ended(self, name, code):
        words = self.federation.last_words(name, 3)
        assert code == 1, words
        assert "Traceback" not in words
        assert "Free space" in words, words
        if (self.federation.directory / "federation" / "ballast").exists():
            (self.federation.directory / "federation" / "ballast").unlink()


def full_server(scene: Scene, disk: Path) -> None:
    """The server's whole directory is on the disk, which fills up in the middle of the run."""
    expected = scene.undisturbed(**ROUNDS)
    with scene.copy() as federation:
        moved = federation.federation.rename(federation.federation.with_name("moved"))
        federation.federation.mkdir()
        # Room for the ledger's log, which grows to 4 MB or so before it is brought in.
        mount("-t", "tmpfs", "-o", "size=12m", "x", federation.federation)
        subprocess.run(["cp", "-a", f"{moved}/.", str(federation.federation)], check=True)
        keeper = EndsOnADisk(federation, scene, extra=ROUNDS)
        keeper.serve()
        for name in scene.folders:
            keeper.join(name)
        wait(federation.server, lambda: closed(federation) >= 2, "two rounds")
        ballast = fill(federation.federation)
        log = federation.log("server")
        wait(
            federation.server,
            lambda: "full" in log.read_text() or "no space" in log.read_text(),
            "a word of it",
        )
        ballast.unlink(missing_ok=True)
        while keeper.turn(60.0) is None:
            pass
        keeps_its_promises(federation, expected)
        subprocess.run(["umount", "-l", str(federation.federation)], check=True)


def full_client(scene: Scene, disk: Path) -> None:
    """A client's whole directory is on the disk; freed, it takes part again by itself."""
    with scene.copy() as federation:
        state = federation.directory / "state"
        moved = state.rename(state.with_name("moved"))
        state.mkdir()
        mount("-t", "tmpfs", "-o", "size=2m", "x", state)
        subprocess.run(["cp", "-a", f"{moved}/.", str(state)], check=True)
        extra = {"round__rounds_per_task": 200, "round__min_clients": 1, "run__evaluate": False}
        keeper = Keeper(federation, scene, extra=extra)
        keeper.serve()
        keeper.join("a")
        wait(federation.server, lambda: closed(federation) >= 2, "two rounds")
        ballast = fill(state)
        log, process = federation.log("a"), federation.clients["a"]
        wait(process, lambda: "is full" in log.read_text(), "a word of it")
        assert process.poll() is None, "the client ended"
        ballast.unlink()
        told = log.read_text().count("the server has the update")
        wait(
            process,
            lambda: log.read_text().count("the server has the update") > told + 3,
            "updates again",
        )
        assert "Traceback" not in log.read_text()
        federation.stop()
        subprocess.run(["umount", "-l", str(state)], check=True)


def read_only_server(scene: Scene, disk: Path) -> None:
    """The states' directory becomes read-only under a running server."""
    expected = scene.undisturbed(**ROUNDS)
    with scene.copy() as federation:
        [states] = federation.federation.glob("runs/*/states")
        keeper = EndsReadOnly(federation, scene, extra=ROUNDS)
        keeper.states = states
        keeper.serve()
        for name in scene.folders:
            keeper.join(name)
        wait(federation.server, lambda: closed(federation) >= 2, "two rounds")
        mount("--bind", states, states)
        mount("-o", "remount,bind,ro", states)
        while keeper.turn(60.0) is None:
            pass
        assert keeper.times == 2, "it was never met"
        keeps_its_promises(federation, expected)


class EndsReadOnly(Keeper):
    """A server on a read-only disk ends with its sentence; it is started when that is mended."""

    states = None
    times = 0

    def ended(self, name, code):
        words = self.federation.last_words(name, 3)
        assert code == 1, words
        assert re.search("read-only.*Mount the disk writable", words), words
        self.times += 1
        if self.times == 2:  # a start on the read-only disk says it again
            subprocess.run(["umount", str(self.states)], check=True)
        assert self.times <= 2


CASES = {
    "full_server": full_server,
    "full_client": full_client,
    "read_only_server": read_only_server,
}

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    place = Path(sys.argv[2])
    CASES[sys.argv[1]](Scene.make(place / "scene"), place)
