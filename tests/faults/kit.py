"""What the fault tests share: plans for the planter, a federation to start from, three promises.

Every test ends with `keeps_its_promises`: no acknowledged update is lost, none is counted twice,
and the final state is that of the undisturbed run, or a round is openly declared short.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fcil_client.state import sent_journal
from fcil_protocol.errors import LinkError
from fcil_server.aggregation.store import StateStore
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import Outcome, RunStatus, UpdateStatus
from system.kit import open_ledger, settings, write_client

PLANT = Path(__file__).parent / "plant"
KILLED = -9
SERVER, CLIENT = "fcil_server", "fcil_client"
SERVER_WORKER, CLIENT_WORKER = "fcil_server.aggregation.worker", "fcil_client.rounds.worker"
TASKS = [["0", "1"], ["2", "3"]]

# Nobody is given up: a killed client comes back, and the round waits for it.
PATIENT = {"tasks__classes": TASKS, "round__grace_s": 600.0, "round__rounds_per_task": 1}


def planted(where: Path, *plans) -> dict[str, str]:
    """Return the environment that plants these plans into a process and its worker."""
    path = where / "plan.json"
    path.write_text(json.dumps(plans))
    search = os.pathsep.join(filter(None, (str(PLANT), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": search, "FCIL_PLANT": str(path)}


def rule(op, where="", *, do="kill", **more):
    """Return a rule of a plan (see plant/sitecustomize.py)."""
    return {"op": f"^({op})$", "where": where, "do": do, **more}


def walk_plan(federation, program: str, done: Path, part=(0, 1), **more) -> dict:
    """Return the plan that kills a program at every point once, or at a part of them."""
    walk = {"done": str(done), "part": list(part), **more}
    return {"program": program, "root": str(federation.directory), "walk": walk}


# --- a federation with members and nothing learned ------------------------------------------


@dataclass
class Scene:
    """A federation directory with some members, which tests copy; data folders stay in place."""

    directory: Path
    port: int
    folders: dict[str, Path]
    options: dict = field(default_factory=dict)
    copies: int = 0
    expected: dict[str, object] = field(default_factory=dict)

    @classmethod
    def make(cls, directory: Path, port: int = 0, names: str = "ab", **options):
        """Make a scene with these clients; its runs have these settings."""
        folders = {
            name: write_client(directory / "images" / name, range(4), offset=12 * i)
            for i, name in enumerate(names)
        }
        with LocalFederation(directory / "made", port) as federation:
            federation.serve(*settings(**PATIENT | options | {"round__min_clients": 99}))
            for name, folder in folders.items():
                federation.join(name, folder)
                federation.until("announced", text=name)
            port = federation.port
        return cls(directory, port, folders, options)

    @classmethod
    def masked(cls, directory: Path):
        """Make a masked scene: three clients, all needed in each sum, and one task."""
        options = {"round__min_clients": 3, "privacy__secure": "masks"}
        return cls.make(directory, names="abc", tasks__classes=TASKS[:1], **options)

    def copy(self) -> LocalFederation:
        """Return the federation anew, as it was before the first round."""
        self.copies += 1
        place = self.directory / f"copy{self.copies}"
        shutil.copytree(self.directory / "made", place)
        for socket in place.rglob("*.sock"):
            socket.unlink()
        return LocalFederation(place, self.port)

    def arguments(self, **extra) -> list[str]:
        return ["--until-done", *settings(**PATIENT | self.options | extra)]

    @property
    def has_masks(self) -> bool:
        return self.options.get("privacy__secure") == "masks"

    def undisturbed(self, **extra):
        """Return the digest of the final state when nothing goes wrong.

        Behind masks: the tensors of the final state without masks.
        """
        key = json.dumps(extra)
        if key not in self.expected:
            plain = {"privacy__secure": "off"} if self.has_masks else {}
            with self.copy() as federation:
                Keeper(federation, self, extra=extra | plain, new_run=self.has_masks).run()
                final = final_tensors if self.has_masks else final_digest
                self.expected[key] = final(federation)
        return self.expected[key]


@dataclass
class Keeper:
    """Runs a federation to its end, starting again whoever was killed.

    Attributes:
        server_env, client_env: environments with plans in them, or nothing.
        kills: how often a process was killed by its plan.
        new_run: start a new run instead of resuming the scene's.
    """

    federation: LocalFederation
    scene: Scene
    server_env: dict[str, str] = field(default_factory=dict)
    client_env: dict[str, str] = field(default_factory=dict)
    planted_clients: tuple[str, ...] = ("a", "b")
    kills: int = 0
    extra: dict = field(default_factory=dict)
    new_run: bool = False

    def serve(self) -> None:
        arguments = self.scene.arguments(**self.extra)
        arguments += ["--new-run"] if self.new_run else []
        while True:
            try:
                self.federation.serve(*arguments, env=self.server_env)
            except LinkError:
                code = self.federation.server.returncode
                if code == 0:
                    return  # the run was done already
                self.ended("server", code)
            else:
                return

    def ended(self, name: str, code: int) -> None:
        """Judge a process that ended: it was killed by its plan, or the test fails."""
        assert code == KILLED, self.federation.last_words(name, 20)
        self.kills += 1

    def join(self, name: str) -> None:
        env = self.client_env if name in self.planted_clients else None
        self.federation.join(name, self.scene.folders[name], env=env)

    def run(self, limit_s: float = 120.0) -> None:
        """Serve and join until the run is done, however often somebody is killed."""
        self.serve()
        for name in self.scene.folders:
            self.join(name)
        while (code := self.turn(limit_s)) is None:
            pass
        assert code == 0, self.federation.last_words("server", 20)

    def turn(self, limit_s: float) -> int | None:
        """Restart killed clients until the server ends; its exit code, None if it was killed.

        The limit is about silence: it begins again with every process that ends.
        """
        step = 0.05
        left = int(limit_s / step)
        while left:
            left -= 1
            for name, process in list(self.federation.clients.items()):
                if process.poll() is not None:
                    self.ended(name, process.returncode)
                    self.join(name)
                    left = int(limit_s / step)
            try:
                code = self.federation.server.wait(step)
            except subprocess.TimeoutExpired:
                continue
            if code == 0:
                return code
            self.ended("server", code)
            self.serve()
            return None
        words = {n: self.federation.last_words(n, 8) for n in ("server", *self.scene.folders)}
        raise AssertionError(f"nothing happened in {limit_s:.0f} s: {words}")


# --- the three promises -----------------------------------------------------------------------


def final_digest(federation) -> str:
    with open_ledger(federation) as ledger:
        return ledger.states.newest(ledger.runs.newest().run_id).digest


def final_tensors(federation) -> Mapping[str, np.ndarray]:
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest().run_id
        newest = ledger.states.newest(run)
    return StateStore(federation.federation / "runs" / run / "states").load(newest.state).tensors


def client_homes(federation) -> list[Path]:
    return sorted(p.parent for p in (federation.directory / "state").rglob("client.json"))


def acknowledged(home: Path) -> list[dict]:
    """Return what the client knows to be acknowledged, inventories apart."""
    rows, damaged = sent_journal.read(home)
    assert damaged == 0 or home, "half a line is where a kill was"
    return [r for r in rows if r["answer"] == "acked" and r["kind"] not in (None, "inventory")]


def keeps_its_promises(federation, expected, *, excluded: bool = False) -> None:
    """Assert that nothing acknowledged is lost, nothing counts twice, and the state is right.

    Args:
        expected: of `Scene.undisturbed`; None: the state may differ, since updates were left out.
        excluded: updates may be left out, if the ledger gives a reason. A masked state is compared
            all the same, since a sum that is missing would show there.
    """
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest()
        assert run.status is RunStatus.DONE
        rounds = ledger.rounds.all(run.run_id)
        updates = {u.update_id: u for row in rounds for u in ledger.updates.of_round(row.key)}
        openly = [u for u in updates.values() if u.status is UpdateStatus.EXCLUDED and u.reason]
        for row in rounds:
            clients = [u.client for u in ledger.updates.of_round(row.key)]
            assert len(set(clients)) == len(clients), f"{row.key}: a client counts twice"
            openly += [row] if row.outcome is not Outcome.DONE else []
            openly += ledger.answers.of_round(row.key)
        final = ledger.states.newest(run.run_id)
        kinds = {row.kind for row in rounds}
    for home in client_homes(federation):
        nothing_acknowledged_is_lost(home, updates)
    path = federation.federation / "runs" / run.run_id / "states" / f"{final.state:06d}.safetensors"
    assert path.stat().st_size > 0
    assert expected is not None or (excluded and openly), "it should have been said openly"
    if not (excluded and openly):
        assert openly == [], f"a round is short, or an update left out, without need: {openly}"
        if isinstance(expected, str):
            assert final.digest == expected, "the final state is not that of the undisturbed run"
    if isinstance(expected, Mapping):
        assert {"mask_keys", "unmask"} <= kinds, "there were no masks"
        is_the_plain_state(final_tensors(federation), expected)
    for name in ("server", *federation.clients):
        log = federation.log(name)
        if log.exists():
            assert "Traceback" not in log.read_text(), log.read_text()[-3000:]


def is_the_plain_state(tensors, plain) -> None:
    """Assert that masked sums led to the same state, but for the last digits of fixed point."""
    assert tensors.keys() == plain.keys() != set()
    for name, array in plain.items():
        close = np.allclose(tensors[name], array, rtol=1e-5, atol=1e-6)
        assert close, f"the final {name} is not that of the undisturbed run without masks"


def nothing_acknowledged_is_lost(home: Path, updates: dict) -> None:
    """Every acknowledged update is in the ledger, judged, and was never asked for again."""
    rows, _ = sent_journal.read(home)
    for acked in acknowledged(home):
        held = updates.get(acked["digest"])
        assert held is not None, f"an acknowledged update is lost: {acked}"
        assert held.status is not UpdateStatus.ACCEPTED, "an acknowledged update was forgotten"
        if held.status is UpdateStatus.EXCLUDED:
            assert held.reason, "left out without a word"
        key = (acked["run"], acked["task"], acked["kind"], acked["round"])
        later = [
            r
            for r in rows
            if (r["run"], r["task"], r["kind"], r["round"]) == key
            and r["sealed_at"] > acked["answered_at"]
        ]
        assert not later, f"an acknowledged update was asked for again: {later}"
