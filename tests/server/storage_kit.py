"""A federation directory with everything that a server leaves: real keys, files and rows.

Two tasks of two rounds are closed, and one round of the third task is open with one update.
Task k has the states 3 k (its opening), 3 k + 1 and 3 k + 2; the third has its opening only.
"""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from byte_counts import add_bytes
from fcil_adapters.contract.backbone_info import NO_BACKBONE, backbone_fields
from fcil_adapters.contract.half_precision import forms_of
from fcil_adapters.contract.registry import load_method, make_hparams, schema_digest, with_forms
from fcil_protocol.envelopes.envelope import Core, seal, wrap_key
from fcil_protocol.ids import ClientId, Digest, RoundKey, RunId, UpdateId, new_run_id
from fcil_protocol.payloads.payload import Payload, pack
from fcil_protocol.storage.spool import Spool
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.aggregation.store import StateStore, states_folder
from fcil_server.federation.config import load, to_toml
from fcil_server.federation.directory import Federation
from fcil_server.ledger.enums import OPENING, Cause, Direction, Outcome
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.rounds.classes import ClassRegistry

ALICE, BOB = (ClientId(c * 26) for c in "ab")
TASKS = (("ant", "bee"), ("cat", "dog"), ("eel", "fox"))
OPEN_STATE = 6  # the newest: the opening of the third task


@dataclass
class Built:
    """What was made.

    Attributes:
        update: the digest of the open round's update.
        digests: of the states, by number.
    """

    directory: Path
    run: RunId
    clients: dict[ClientId, PrivateKeys]
    update: str
    digests: list[Digest]

    def ledger(self) -> Ledger:
        """Open the ledger."""
        return Ledger(self.directory / LEDGER_NAME)

    def state(self, number: int) -> Path:
        """Return a state's file."""
        return states_folder(self.directory, self.run) / f"{number:06d}.safetensors"

    @property
    def spool(self) -> Path:
        """The run's spool."""
        return self.directory / "runs" / self.run / "spool"


def flip(path: Path, where: float = 0.5) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * where)] ^= 4
    path.write_bytes(data)


def spoil_index(built: Built) -> None:
    """Flip a bit in the index that keeps the open round's update from being taken twice.

    The page stays well-formed, so that only a comparison with the table finds it.
    """
    ledger = built.directory / LEDGER_NAME
    with sqlite3.connect(ledger) as db:
        sql = "SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_updates_1'"
        (root,) = db.execute(sql).fetchone()
        (page,) = db.execute("PRAGMA page_size").fetchone()
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    data = bytearray(ledger.read_bytes())
    at = data.index(built.update.encode(), (root - 1) * page, root * page)
    data[at] ^= 4
    ledger.write_bytes(data)


def tree(directory: Path) -> dict[str, bytes]:
    """Return the content of every file under a directory."""
    return {
        str(p.relative_to(directory)): p.read_bytes()
        for p in sorted(directory.rglob("*"))
        if p.is_file()
    }


def build(directory: Path, *, schedule: str = "discovered") -> Built:
    """Make the directory and leave it as a stopped server does."""
    settings = ["method.name=running_mean", f"tasks.schedule={schedule}"]
    if schedule == "listed":
        settings.append(f"tasks.classes={[list(names) for names in TASKS]}".replace("'", '"'))
    federation = Federation.open(directory, None, tuple(settings))
    try:
        return _fill(federation, to_toml(load(None, settings)), listed=schedule == "listed")
    finally:
        federation.close()


def _fill(federation: Federation, config: str, *, listed: bool) -> Built:
    ledger, run = federation.ledger, new_run_id()
    clients = {client: PrivateKeys.generate() for client in (ALICE, BOB)}
    for client, keys in clients.items():
        public = keys.public
        ledger.clients.add(
            client, client[:1], curve=public.curve, signing=public.signing, sealing=public.sealing
        )
    method = with_forms(
        load_method("running_mean"), forms_of(load(None, ()).wire.half, "running_mean", ())
    )
    ledger.runs.add(
        run, method="running_mean", method_version="1", config=config, hparams={},
        backbone=backbone_fields(NO_BACKBONE),
        schema_digest=schema_digest(method, make_hparams(method, {}), NO_BACKBONE), seed=1,
    )  # fmt: skip
    registry = ClassRegistry(ledger, run)
    if listed:
        registry.register_listed(TASKS)
    states = StateStore(states_folder(federation.directory, run))
    digests: list[Digest] = []

    def state(task: int, kind: str, number: int) -> int:
        parent = digests[-1] if digests else None
        made = Payload({"w": np.full(100, len(digests), np.float32)}, {})
        digests.append(states.save(len(digests), made, parent, task))
        key = RoundKey(run, task, kind, number)
        ledger.states.add(key, len(digests) - 1, digests[-1], parent)
        return len(digests) - 1

    for task, names in enumerate(TASKS):
        registry.announce(ALICE, names)
        registry.open_task(task)
        state(task, OPENING, 0)
        if task < len(TASKS) - 1:
            _learn(ledger, run, task, state)
    update = _open_round(federation, run, clients[ALICE])
    return Built(federation.directory, run, clients, update, digests)


def _learn(ledger: Ledger, run: RunId, task: int, state) -> None:
    for kind, number in (("train", 0), ("train", 1), ("evaluate", 0)):
        key = RoundKey(run, task, kind, number)
        newest = ledger.states.newest(run).state
        ledger.rounds.open(key, asked=(ALICE, BOB), base_state=newest)
        for client in (ALICE, BOB):
            _accept(ledger, key, client, Digest(f"{task}{number}{client[:1] * 62}"), kind)
            for direction in Direction:
                add_bytes(
                    ledger,
                    direction,
                    Cause.UPDATE,
                    round_key=key,
                    client=client,
                    wire=1000,
                    tensor=900,
                )
        with ledger.transaction():
            ledger.updates.mark_counted(key)
            made = state(task, kind, number) if kind == "train" else None
            ledger.rounds.close(key, Outcome.DONE, new_state=made)
    ledger.evaluations.add(run, task, ALICE, dict.fromkeys(range(2 * task + 2), (3, 4)))
    ledger.tasks.close(run, task)


def _accept(ledger: Ledger, key: RoundKey, client: ClientId, digest: str, kind: str) -> None:
    name = digest.replace("b", "c") if kind == "train" else digest[::-1].replace("b", "d")
    with ledger.transaction():
        ledger.updates.accept(
            key, client, update_id=UpdateId(name), samples=5, tensor_bytes=900, sealed_bytes=950
        )


def _open_round(federation: Federation, run: RunId, keys: PrivateKeys) -> str:
    ledger = federation.ledger
    key = RoundKey(run, len(TASKS) - 1, "train", 0)
    ledger.rounds.open(key, asked=(ALICE, BOB), base_state=OPEN_STATE)
    core = Core(
        protocol=1, federation=federation.id, run=run, direction="update", sender=ALICE,
        sender_key=keys.public.fingerprint, recipient="server", method="running_mean",
        schema="0" * 64, task=key.task, round=0, kind="train", base=OPEN_STATE, part="",
    )  # fmt: skip
    sealed, content = seal(pack(Payload({"w": np.ones(50, np.float32)}, {})), core, keys)
    stored = sealed.stored(wrap_key(content, sealed.header, federation.keys.public))
    digest = sealed.parsed.update_id
    spool = Spool(federation.directory / "runs" / run / "spool")
    spool.append(digest, stored.to_bytes())
    spool.close()
    with ledger.transaction():
        ledger.updates.accept(
            key, ALICE, update_id=UpdateId(digest), samples=5, tensor_bytes=200, sealed_bytes=900
        )
    return digest


def killed_at(call: int, what: str) -> bool:
    """Run something in a process that kills itself at its n-th call to the disk.

    Says whether it did; False: it came to its end before.
    """
    code = f"""
import os, signal, sys
from pathlib import Path as P
from fcil_server.storage.backup import backup
from fcil_server.storage.restore import Keys, restore
from fcil_server.runs.fork import fork
from fcil_server.ledger.ledger import Ledger
calls = 0
def plant(name):
    real = getattr(os, name)
    def fake(*args, **more):
        global calls
        calls += 1
        if calls > {call}:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **more)
    setattr(os, name, fake)
for name in ("open", "fchmod", "write", "fsync", "fdatasync", "replace", "mkdir", "unlink"):
    plant(name)
{what}
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, timeout=60
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr.decode()
    return done.returncode != 0
