"""What lies on disks: segments of a spool, states, ledgers of every version, a backup."""

from __future__ import annotations

import gzip
import hashlib
import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

from fcil_protocol.ids import Digest, RoundKey, UpdateId, named_client_id
from fcil_protocol.payloads.payload import pack
from fcil_protocol.storage.segment import RecordKind, Segment
from fcil_server.aggregation.store import StateStore
from fcil_server.federation.config import as_file, load
from fcil_server.ledger.databases.schema import APPLICATION_ID, MIGRATIONS, SCHEMA_VERSION
from fcil_server.ledger.enums import Answer, Cause, CountSource, Direction, Outcome
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.ledger.rows import ByteCount
from fcil_server.rounds.classes import ClassRegistry
from fcil_server.storage.backup import backup
from freezing.common import (
    CLIENT,
    CLIENT_KEYS,
    NOW,
    PASSPHRASE,
    RELAY,
    ROOT,
    RUN,
    SCHEMA,
    SERVER,
    STATE,
    Folder,
    payload_of,
)


def segment(folder: Folder) -> None:
    if folder.has("segment"):
        return
    stored = (folder.directory / "inventory.envelope").read_bytes()
    with tempfile.TemporaryDirectory() as place:
        made = Segment.create(Path(place), 1)
        made.append(RecordKind.DATA, "first", stored)
        made.append(RecordKind.DATA, "second", b"short")
        made.append(RecordKind.REMOVED, "second")
        made.close()
        records = [["DATA", "first", len(stored)], ["DATA", "second", 5], ["REMOVED", "second", 0]]
        said = {
            "file": made.path.name,
            "records": records,
            "left": {"first": hashlib.sha256(stored).hexdigest()},
        }
        folder.add("segment", said, seg=made.path.read_bytes())


def state(folder: Folder) -> None:
    if not folder.has("state"):
        with tempfile.TemporaryDirectory() as place:
            store = StateStore(Path(place))
            digest = store.save(7, payload_of(STATE["tensors"], STATE["meta"]), Digest(SCHEMA), 2)
            data, record = store.pair(7)
        said = {"number": 7, "payload": STATE, "digest": digest, "parent": SCHEMA, "task": 2}
        folder.add("state", said, safetensors=data, record=record)


def story(ledger: Ledger) -> str:
    """Write a little of everything through today's code; returns the digest of state 1."""
    other = named_client_id("another")
    for client, keys in ((CLIENT, CLIENT_KEYS), (other, RELAY)):
        public = keys.public
        ledger.clients.add(
            client, client[:5], curve=public.curve,
            signing=public.signing, sealing=public.sealing[:40],
            device="x86-64",
        )  # fmt: skip
    ledger.runs.add(
        RUN, method="running_mean", method_version="1", config='[method]\nname = "running_mean"\n',
        hparams={"rank": 4}, backbone={}, schema_digest=SCHEMA, seed=1993,
        environment={"python": "3.11"},
    )  # fmt: skip
    registry = ClassRegistry(ledger, RUN)
    registry.announce(CLIENT, ["Käse", "oak"])
    registry.open_task(0)
    made = hashlib.sha256(pack(payload_of(STATE["tensors"], STATE["meta"]))).hexdigest()
    ledger.states.add(RoundKey(RUN, 0, "open", 0), 0, Digest(SCHEMA), None)
    done, going = RoundKey(RUN, 0, "train", 0), RoundKey(RUN, 0, "train", 1)
    ledger.rounds.open(done, asked=(CLIENT, other), base_state=0, remaining_s=600.0)
    with ledger.transaction():
        ledger.updates.accept(
            done,
            CLIENT,
            update_id=UpdateId("1" * 64),
            samples=240,
            tensor_bytes=900,
            sealed_bytes=1000,
            train_loss=0.75,
            train_accuracy=0.5,
        )
    ledger.answers.set(done, other, Answer.DECLINED, "not_now")
    with ledger.transaction():
        ledger.updates.mark_counted(done)
        ledger.states.add(done, 1, Digest(made), Digest(SCHEMA))
        ledger.rounds.close(done, Outcome.DONE, new_state=1, phases={"collect_s": 2.0})
    ledger.rounds.open(going, asked=(CLIENT,), base_state=1)
    sizes = {"tensor": 900, "sealed": 1000, "application": 0, "wire": 1100}
    flow = (Direction.UP, Cause.UPDATE, CountSource.PREDICTED)
    ledger.bytes.add([ByteCount(*done, CLIENT, *flow, **sizes)])
    ledger.evaluations.add(RUN, 0, CLIENT, {0: (3, 4), 1: (4, 4)})
    ledger.events.add("info", "test", "an event", run=RUN)
    ledger.refusals.add(CLIENT, "stale_update", "made from state 0, expected 1.")
    ledger.audit.add("somebody", "enrol", "camera 1")
    return made


# What every version of the ledger can hold: its first tables, in columns of its first version.
FIRST = f"""
INSERT INTO clients (client_id, name, curve, signing, sealing, enrolled_at) VALUES
  ('{CLIENT}', 'alice', x'0101', x'02', x'03', {NOW}.5);
INSERT INTO runs (run_id, created_at, method, method_version, config, hparams, backbone,
  schema_digest, seed, status, environment)
  VALUES ('{RUN}', {NOW}.0, 'running_mean', '1', '', '{{}}', '{{}}',
  '{SCHEMA}', 7, 'running', '{{}}');
INSERT INTO classes (run, key, name, class_id, task, first_seen_by, seen_at)
  VALUES ('{RUN}', 'oak', 'Oak', 0, 0, '{CLIENT}', {NOW}.0);
INSERT INTO class_aliases VALUES ('{RUN}', 'eiche', 'Eiche', 'oak');
INSERT INTO tasks (run, task, class_ids, opened_at) VALUES ('{RUN}', 0, '[0]', {NOW}.0);
INSERT INTO rounds (run, task, kind, round, seq, opened_at, asked, base_state,
  new_state, closed_at, outcome)
  VALUES ('{RUN}', 0, 'train', 0, 0, {NOW}.0, '["{CLIENT}"]', 0, 1, {NOW}.5, 'done');
INSERT INTO updates (run, client, task, kind, round, update_id, accepted_at, samples,
  tensor_bytes, sealed_bytes, status) VALUES ('{RUN}', '{CLIENT}', 0, 'train', 0, '{"1" * 64}',
  {NOW}.2, 240, 900, 1000, 'counted');
INSERT INTO answers (run, task, kind, round, client, answer, reason, at)
  VALUES ('{RUN}', 0, 'train', 0, '{CLIENT}', 'lost', 'away', {NOW}.3);
INSERT INTO bytes (run, task, kind, round, client, direction, cause, source,
  tensor, sealed, application, wire)
  VALUES ('{RUN}', 0, 'train', 0, '{CLIENT}', 'up', 'update', 'predicted', 900, 1000, 1050, 1100);
INSERT INTO evaluations VALUES ('{RUN}', 0, '{CLIENT}', 0, 3, 4);
INSERT INTO states (run, state, digest, parent, task, kind, round, created_at)
  VALUES ('{RUN}', 1, '{SCHEMA}', NULL, 0, 'train', 0, {NOW}.5);
INSERT INTO events (at, level, run, client, code, text)
  VALUES ({NOW}.0, 'info', '{RUN}', NULL, 'test', 'an event');
INSERT INTO audit (at, actor, action, detail) VALUES ({NOW}.0, 'somebody', 'enrol', 'alice');
"""


def rows_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return all that a ledger holds, by table; empty tables are left out."""
    db = sqlite3.connect(path)
    db.row_factory = sqlite3.Row
    names = [
        r[0]
        for r in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
    ]
    tables = {
        n: [dict(r) for r in db.execute(f"SELECT * FROM {n}")]
        for n in names
        if not n.startswith("sqlite_")
    }
    db.close()
    return {name: rows for name, rows in tables.items() if rows}


def ledgers(folder: Folder) -> None:
    for version in range(1, SCHEMA_VERSION + 1):
        name = f"ledger-{version}"
        if folder.has(name):
            continue
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / LEDGER_NAME
            if version == SCHEMA_VERSION:
                with Ledger(path, clock=lambda: float(NOW)) as ledger:
                    story(ledger)
                    ledger.database.empty_log()
            else:
                db = sqlite3.connect(path)
                db.executescript("".join(MIGRATIONS[:version]) + FIRST)
                db.executescript(
                    f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {version};"
                )
                db.close()
            data = gzip.compress(path.read_bytes(), mtime=0)
            said = {
                "version": version,
                "script_sha256": hashlib.sha256(MIGRATIONS[version - 1].encode()).hexdigest(),
            }
            folder.add(name, {**said, "tables": rows_of(path)}, **{"sqlite.gz": data})


def saved(folder: Folder) -> None:
    if folder.has("backup"):
        return
    with tempfile.TemporaryDirectory() as place:
        home, file = Path(place) / "federation", Path(place) / "backup"
        states = home / "runs" / RUN / "states"
        (home / "keys").mkdir(parents=True)
        (home / "federation.toml").write_text(as_file(load(None, ["method.name=running_mean"])))
        SERVER.save(home / "keys" / "server.json")
        ROOT.save(home / "keys" / "root.json")
        shutil.copy(folder.directory / "certificate.certificate", home / "keys" / "certificate")
        with Ledger(home / LEDGER_NAME, clock=lambda: float(NOW)) as ledger:
            digest = story(ledger)
        StateStore(states).save(1, payload_of(STATE["tensors"], STATE["meta"]), Digest(SCHEMA), 0)
        done = backup(home, file, passphrase=PASSPHRASE)
        said = {
            "manifest": vars(done.manifest)
            | {"files": {n: vars(e) for n, e in done.manifest.files.items()}}
        }
        folder.add(
            "backup",
            {**said, "state": digest},
            **{"fcil.gz": gzip.compress(file.read_bytes(), mtime=0)},
        )


def freeze(folder: Folder) -> None:
    """Freeze what is stored; the envelopes and the certificate are frozen before."""
    segment(folder)
    state(folder)
    ledgers(folder)
    saved(folder)
