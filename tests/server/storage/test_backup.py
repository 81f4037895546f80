"""A backup is whole or refused; a restore writes everything or nothing; keys are never clear."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from byte_counts import add_bytes
from fcil_protocol.errors import (
    CannotOpen,
    CorruptFile,
    DiskFull,
    KeyFileError,
    StorageError,
    UsageError,
)
from fcil_protocol.ids import Digest, RoundKey, new_run_id
from fcil_protocol.storage import atomic_files
from fcil_protocol.trust import passphrase
from fcil_protocol.trust.certificate import Certificate, RootKey
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.cli.show_storage import show_restored
from fcil_server.federation.config import load, to_toml
from fcil_server.federation.directory import CONFIG, Federation
from fcil_server.ledger.databases import sqlite as database_module
from fcil_server.ledger.databases.sqlite import SqliteDatabase
from fcil_server.ledger.enums import Cause, Direction, RunStatus
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.runs.run_queue import RunQueue, next_run
from fcil_server.storage import backup as backup_module
from fcil_server.storage import restore as restore_module
from fcil_server.storage.archive import CERTIFICATE, MANIFEST, BackupManifest, verify
from fcil_server.storage.backup import audit_backup, backup
from fcil_server.storage.check import check
from fcil_server.storage.restore import Keys, Restored, restore
from server.storage_kit import (
    OPEN_STATE,
    Built,
    build,
    flip,
    killed_at,
    spoil_index,
    tree,
)
from tiers import sampled

PHRASE = "correct horse battery"
ROOT_ONLY = "root.json"


@pytest.fixture(autouse=True)
def _cheap_passphrases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guess costs 0.4 s, and there are many here; the file says which cost it has."""
    monkeypatch.setattr(passphrase, "_LOG2_N", 4)


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build(tmp_path / "fed")


@pytest.fixture
def file(built: Built, tmp_path: Path) -> Path:
    return backup(built.directory, tmp_path / "b.tar", passphrase=PHRASE).file


def again(file: Path, directory: Path, keys: Keys | None = None) -> Restored:
    return restore(file, directory, keys or Keys(passphrase=PHRASE), actor="me")


class TestBackup:
    def test_it_holds_what_a_federation_cannot_do_without(self, built: Built, file: Path) -> None:
        manifest = verify(file)
        states = {f"runs/{built.run}/states/{n:06d}" for n in range(OPEN_STATE + 1)}
        assert set(manifest.files) == {
            "federation.toml", "certificate", "keys.sealed", "ledger.sqlite",
            *(f"{s}.safetensors" for s in states), *(f"{s}.json" for s in states),
        }  # fmt: skip
        assert (manifest.run, manifest.state, manifest.keys) == (built.run, OPEN_STATE, True)
        assert file.stat().st_mode & 0o777 == 0o600

    def test_it_holds_the_adapter_that_a_run_began_with(self, built: Built, tmp_path: Path) -> None:
        begun = built.directory / "runs" / built.run / "start.safetensors"
        begun.write_bytes(b"LoRA")
        file = backup(built.directory, tmp_path / "c.tar", passphrase=PHRASE).file
        again(file, tmp_path / "new")
        assert (tmp_path / "new" / begun.relative_to(built.directory)).read_bytes() == b"LoRA"

    def test_no_key_is_in_it_in_clear(self, built: Built, tmp_path: Path) -> None:
        secrets = []
        for name in ("server.json", "root.json"):
            fields = json.loads((built.directory / "keys" / name).read_text())
            secrets += [str(v) for k, v in fields.items() if k in ("curve", "signing", "sealing")]
        assert len(secrets) == 4
        for phrase in (PHRASE, None):
            path = tmp_path / f"{phrase}.tar"
            data = backup(built.directory, path, passphrase=phrase).file.read_bytes()
            assert not [s for s in secrets if s.encode() in data]
            assert b"keys.sealed" in data or phrase is None

    def test_it_overwrites_nothing(self, built: Built, file: Path) -> None:
        before = file.read_bytes()
        with pytest.raises(UsageError, match="exists already"):
            backup(built.directory, file, passphrase=None)
        assert file.read_bytes() == before

    def test_a_file_that_somebody_made_meanwhile_is_not_overwritten(
        self, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target, real = tmp_path / "b.tar", backup_module._write_patiently

        def slow(*args: Any) -> BackupManifest:
            target.write_bytes(b"another")
            return real(*args)

        monkeypatch.setattr(backup_module, "_write_patiently", slow)
        with pytest.raises(UsageError, match="exists already"):
            backup(built.directory, target, passphrase=None)
        assert target.read_bytes() == b"another"
        assert sorted(p.name for p in tmp_path.iterdir()) == ["b.tar", "fed"]

    def test_another_one_that_runs_into_the_same_folder_is_left_alone(
        self, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also in another container or on another host, where its process id is unknown here."""
        monkeypatch.setattr(os, "getpid", lambda: 4_194_305)  # more than a system has
        with atomic_files.scratch(tmp_path, backup_module.SCRATCH) as name:
            name("file").write_bytes(b"half")
            backup(built.directory, tmp_path / "b.tar", passphrase=None)
            assert name("file").read_bytes() == b"half"
        assert sorted(p.name for p in tmp_path.iterdir()) == ["b.tar", "fed"]

    def test_a_short_passphrase_is_refused_and_leaves_nothing(
        self, built: Built, tmp_path: Path
    ) -> None:
        with pytest.raises(UsageError, match="at least 12 characters"):
            backup(built.directory, tmp_path / "b.tar", passphrase="short")
        assert [p.name for p in tmp_path.iterdir()] == ["fed"]

    def test_a_damaged_newest_state_is_no_backup(self, built: Built, tmp_path: Path) -> None:
        flip(built.state(OPEN_STATE))
        with pytest.raises(CorruptFile, match=r"000006\.safetensors is damaged"):
            backup(built.directory, tmp_path / "b.tar", passphrase=None)
        assert [p.name for p in tmp_path.iterdir()] == ["fed"]

    def test_an_older_damaged_state_is_left_out(self, built: Built, tmp_path: Path) -> None:
        flip(built.state(2))
        done = backup(built.directory, tmp_path / "b.tar", passphrase=None)
        names = set(done.manifest.files)
        assert f"runs/{built.run}/states/000002.json" not in names
        assert f"runs/{built.run}/states/000003.json" in names

    def test_a_damaged_ledger_is_no_backup(self, built: Built, tmp_path: Path) -> None:
        path = built.directory / LEDGER_NAME
        data = bytearray(path.read_bytes())
        data[4096 * 3 : 4096 * 12] = os.urandom(4096 * 9)
        path.write_bytes(data)
        with pytest.raises(CorruptFile, match="is damaged"):
            backup(built.directory, tmp_path / "b.tar", passphrase=None)

    def test_an_index_that_does_not_fit_its_table_is_no_backup(
        self, built: Built, tmp_path: Path
    ) -> None:
        spoil_index(built)
        with pytest.raises(CorruptFile, match=r"is damaged.*index"):
            backup(built.directory, tmp_path / "b.tar", passphrase=None)
        assert [p.name for p in tmp_path.iterdir()] == ["fed"]

    def test_a_server_that_is_always_faster_is_said_to_be(
        self, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """At each try it makes a state and removes the one that the copied ledger names."""
        copy_to, made = SqliteDatabase.copy_to, [OPEN_STATE]

        def outrun(self: SqliteDatabase, target: Path) -> None:
            copy_to(self, target)
            built.state(made[-1]).unlink(missing_ok=True)
            made.append(made[-1] + 1)
            with built.ledger() as ledger:
                key = RoundKey(built.run, 2, "train", made[-1])
                ledger.states.add(key, made[-1], Digest("0" * 64), None)

        monkeypatch.setattr(SqliteDatabase, "copy_to", outrun)
        with pytest.raises(StorageError, match="the server was faster") as caught:
            backup(built.directory, tmp_path / "b.tar", passphrase=None)
        assert "fcil-server pause" in caught.value.action
        assert len(made) == 4
        assert [p.name for p in tmp_path.iterdir()] == ["fed"]

    def test_keys_are_sealed_before_the_moment_of_the_backup(
        self, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Sealing is slow, and a fast server removes meanwhile what is to be copied."""
        done: list[str] = []
        copy_to, seal = SqliteDatabase.copy_to, backup_module.seal_with_passphrase
        monkeypatch.setattr(
            SqliteDatabase, "copy_to", lambda *a: (done.append("copied"), copy_to(*a))[1]
        )
        monkeypatch.setattr(
            backup_module, "seal_with_passphrase", lambda *a: (done.append("sealed"), seal(*a))[1]
        )
        backup(built.directory, tmp_path / "b.tar", passphrase=PHRASE)
        assert done == ["sealed", "copied"]

    def test_it_is_of_one_moment_while_others_write(self, built: Built, tmp_path: Path) -> None:
        """Each transaction adds one byte to two flows; a copy must never see one of them."""
        begun, over = threading.Event(), threading.Event()

        def write() -> None:
            with built.ledger() as ledger:
                while not over.is_set():
                    with ledger.transaction(durable=False):
                        for way in Direction:
                            add_bytes(ledger, way, Cause.CONTROL, wire=1)
                    begun.set()

        thread = threading.Thread(target=write)
        thread.start()
        try:
            assert begun.wait(60)
            for i in range(3):
                done = backup(built.directory, tmp_path / f"{i}.tar", passphrase=None)
                restored = again(done.file, tmp_path / f"new{i}", Keys(fresh=True))
                assert restored.fork is not None
                with Ledger(tmp_path / f"new{i}" / LEDGER_NAME) as ledger:
                    up, down = ledger.bytes.all(None)
                    assert up.wire == down.wire > 0
        finally:
            over.set()
            thread.join()

    def test_it_is_noted_in_the_audit_log(self, built: Built, file: Path) -> None:
        done = backup(built.directory, file.with_name("c.tar"), passphrase=None)
        assert audit_backup(built.directory, done, "uid 7")
        with built.ledger() as ledger:
            entry = ledger.audit.newest()[-1]
        assert (entry.actor, entry.action) == ("uid 7", "backup")
        assert entry.detail == "c.tar, without keys"

    def test_a_name_that_is_no_utf8_is_noted_readably(self, built: Built, file: Path) -> None:
        done = backup(built.directory, file.with_name(os.fsdecode(b"b\xff.tar")), passphrase=None)
        assert audit_backup(built.directory, done, "uid 7")
        with built.ledger() as ledger:
            assert "tar, without keys" in ledger.audit.newest()[-1].detail

    @pytest.mark.parametrize("call", sampled([0, 3, 6, 8, 9, 10], (0, 8, 10)))
    def test_a_kill_at_any_sync_leaves_no_half_backup(
        self, built: Built, tmp_path: Path, call: int
    ) -> None:
        """Killed at its n-th write to the disk, it leaves no file, or a whole one."""
        before = {n: d for n, d in tree(built.directory).items() if not n.startswith(LEDGER_NAME)}
        target = tmp_path / "b.tar"
        assert killed_at(
            call, f"backup(P({str(built.directory)!r}), P({str(target)!r}), passphrase=None)"
        )
        after = {n: d for n, d in tree(built.directory).items() if not n.startswith(LEDGER_NAME)}
        assert after == before
        if target.exists():
            assert verify(target).state == OPEN_STATE
            target.unlink()
        backup(built.directory, target, passphrase=None)  # and removes what was left behind
        assert sorted(p.name for p in tmp_path.iterdir()) == ["b.tar", "fed"]


class TestDamagedFiles:
    def test_every_flipped_bit_is_found(self, file: Path, tmp_path: Path) -> None:
        """Only the padding between members may change without a word: nobody reads it."""
        whole = file.read_bytes()
        accepted = 0
        for position in range(0, len(whole), len(whole) // 150):
            data = bytearray(whole)
            data[position] ^= 1 << (position % 8)
            file.write_bytes(data)
            try:
                verify(file)
            except (CorruptFile, UsageError):
                continue
            accepted += 1
            assert _is_padding(whole, position), position
        assert accepted < 75

    @pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 0.95])
    def test_a_cut_file_is_refused(self, file: Path, tmp_path: Path, share: float) -> None:
        data = file.read_bytes()
        end = data.rindex(b'"version"')
        file.write_bytes(data[: int(end * share)])
        with pytest.raises(CorruptFile, match="backup"):
            again(file, tmp_path / "new")
        assert not (tmp_path / "new").exists()

    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("../evil", tarfile.REGTYPE),
            ("/etc/evil", tarfile.REGTYPE),
            ("runs/../../evil", tarfile.REGTYPE),
            ("keys/server.json", tarfile.REGTYPE),
            ("federation.toml", tarfile.SYMTYPE),
            ("federation.toml", tarfile.LNKTYPE),
            ("federation.toml", tarfile.CHRTYPE),
            ("federation.toml", tarfile.FIFOTYPE),
            ("runs", tarfile.DIRTYPE),
            ("certificate", tarfile.GNUTYPE_SPARSE),
            ("federation.toml\n", tarfile.REGTYPE),
        ],
    )
    def test_what_no_backup_holds_is_refused(self, tmp_path: Path, name: str, kind: bytes) -> None:
        path = tmp_path / "evil.tar"
        with tarfile.open(path, "w") as tar:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
        with pytest.raises(CorruptFile, match="no backup holds|is damaged"):
            again(path, tmp_path / "new")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["evil.tar"]

    def test_a_member_that_the_manifest_does_not_name_is_refused(
        self, file: Path, tmp_path: Path
    ) -> None:
        rewrite(file, extra=("runs/r20260101-000000-abcd/states/000000.json", b"{}"))
        with pytest.raises(CorruptFile, match=r"000000\.json differs"):
            again(file, tmp_path / "new")

    def test_a_member_that_stands_twice_is_refused(self, file: Path, tmp_path: Path) -> None:
        rewrite(file, extra=("certificate", b"x"))
        with pytest.raises(CorruptFile, match="'certificate' twice"):
            again(file, tmp_path / "new")

    @pytest.mark.parametrize("data", [b"", b"no tar at all" * 100, b"\0" * 4096])
    def test_another_file_is_no_backup(self, tmp_path: Path, data: bytes) -> None:
        path = tmp_path / "other"
        path.write_bytes(data)
        with pytest.raises(CorruptFile, match="backup"):
            verify(path)

    def test_a_backup_of_a_later_form_names_the_version(self, file: Path) -> None:
        def later(fields: dict) -> None:
            fields["version"], fields["fcil"] = 2, "9.9"

        rewrite(file, manifest=later)
        with pytest.raises(UsageError, match="format 2") as caught:
            verify(file)
        assert "9.9" in caught.value.action

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("created_at", "x"),
            ("created_at", float("nan")),
            ("created_at", 1e30),
            ("federation", "\xe9"),
            ("federation", "\x1b[31m"),
            ("state", "x"),
        ],
    )
    def test_a_manifest_with_fields_of_other_types_is_damaged(
        self, file: Path, tmp_path: Path, field: str, value: object
    ) -> None:
        rewrite(file, manifest=lambda fields: fields.update({field: value}))
        with pytest.raises(CorruptFile, match=r"manifest\.json is damaged"):
            again(file, tmp_path / "new")

    @pytest.mark.parametrize(
        ("name", "data", "said"),
        [
            (LEDGER_NAME, None, f"{LEDGER_NAME} is missing"),
            (CONFIG, None, f"{CONFIG} is missing"),
            (CERTIFICATE, None, f"{CERTIFICATE} is missing"),
            (LEDGER_NAME, b"", f"{LEDGER_NAME} in it is empty"),
            (LEDGER_NAME, b"not a database" * 500, f"{LEDGER_NAME} in it is damaged"),
            (CONFIG, b"\xff\xfe", f"{CONFIG} in it is no TOML"),
            (CERTIFICATE, b"xx", "its certificate is damaged"),
        ],
    )
    def test_a_backup_without_what_a_federation_is_becomes_none(
        self, file: Path, tmp_path: Path, name: str, data: bytes | None, said: str
    ) -> None:
        replace_member(file, name, data)
        with pytest.raises(CorruptFile, match=said):
            again(file, tmp_path / "new")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["b.tar", "fed"]

    def test_a_certificate_of_another_federation_is_refused(
        self, file: Path, tmp_path: Path
    ) -> None:
        root, own = RootKey.generate(), PrivateKeys.generate()
        replace_member(file, CERTIFICATE, root.certify(own.public).to_bytes())
        with pytest.raises(CorruptFile, match="certificate is of another federation"):
            again(file, tmp_path / "new", Keys(fresh=True))

    @pytest.mark.parametrize(
        ("records", "said"),
        [
            ({"comment": "x" * 5000}, "expected at most 4096"),
            ({"GNU.sparse.map": "0,1", "GNU.sparse.size": "5"}, "is sparse"),
            ({"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}, "is sparse"),
        ],
    )
    def test_an_extended_header_is_short_and_of_a_plain_file(
        self, tmp_path: Path, records: dict[str, str], said: str
    ) -> None:
        path = tmp_path / "evil.tar"
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
            member = tarfile.TarInfo(CONFIG)
            member.pax_headers, member.size = records, 4
            tar.addfile(member, io.BytesIO(b"a=1\n"))
        with pytest.raises(CorruptFile, match=said):
            verify(path)

    def test_a_map_of_holes_is_not_read(self, tmp_path: Path) -> None:
        """Older than those of extended headers; it goes on from block to block."""
        path, holes = tmp_path / "evil.tar", tarfile.TarInfo(CONFIG)
        holes.type = tarfile.GNUTYPE_SPARSE
        with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
            tar.addfile(holes)
        with pytest.raises(CorruptFile, match="is sparse"):
            verify(path)


def _is_padding(data: bytes, position: int) -> bool:
    """Say whether a byte lies behind a member's content, or behind the archive's end."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            if member.offset <= position < member.offset_data + member.size:
                return member.offset_data > position and data[position] in b"\x000"
    return True


def rewrite(file: Path, *, extra: tuple[str, bytes] | None = None, manifest=None) -> None:
    """Write a backup's members again, with one more or another manifest."""
    with tarfile.open(file) as tar:
        members = [(m.name, tar.extractfile(m).read()) for m in tar]
    if manifest is not None:
        fields = json.loads(members[-1][1])
        manifest(fields)
        members[-1] = (MANIFEST, json.dumps(fields).encode())
    if extra is not None:
        members.insert(len(members) - 1, extra)
    with tarfile.open(file, "w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def replace_member(file: Path, name: str, data: bytes | None) -> None:
    """Write a backup again with another member of this name, or without it; its manifest fits."""
    with tarfile.open(file) as tar:
        members = {m.name: tar.extractfile(m).read() for m in tar}
    fields = json.loads(members.pop(MANIFEST))
    del members[name], fields["files"][name]
    if data is not None:
        members[name] = data
        digest = hashlib.sha256(data).hexdigest()
        fields["files"][name] = {"sha256": digest, "size_bytes": len(data)}
    with tarfile.open(file, "w") as tar:
        for member_name, content in (*members.items(), (MANIFEST, json.dumps(fields).encode())):
            member = tarfile.TarInfo(member_name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


class TestRestore:
    def test_a_mount_point_is_refused_before_any_work(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "new")
        with pytest.raises(UsageError, match="mount point") as caught:
            again(tmp_path / "no backup is read", tmp_path / "new")
        assert f"--dir {tmp_path / 'new' / 'federation'}" in caught.value.action

    def test_the_federation_is_the_same_and_its_run_a_fork(
        self, built: Built, file: Path, tmp_path: Path
    ) -> None:
        done = again(file, tmp_path / "new")
        assert done.members == ["a", "b"]
        federation = Federation.open(tmp_path / "new", None, ())
        try:
            assert (
                federation.id
                == Certificate.from_bytes(
                    (built.directory / "keys" / "certificate").read_bytes()
                ).federation
            )
            run = federation.ledger.runs.newest()
            assert (run.parent_run, run.parent_state) == (built.run, OPEN_STATE)
            assert federation.ledger.runs.all()[0].status is RunStatus.STOPPED
            assert federation.ledger.rounds.current(run.run_id) is None
        finally:
            federation.close()
        modes = {p.stat().st_mode & 0o077 for p in (tmp_path / "new").rglob("*")}
        assert modes == {0}
        assert not list((tmp_path / "new").rglob("*sealed"))

    def test_clients_that_saw_later_keys_accept_the_restored_ones(
        self, built: Built, file: Path, tmp_path: Path
    ) -> None:
        federation = Federation.open(built.directory, None, ())
        try:
            with pytest.raises(UsageError, match="is open, and clients seal their updates"):
                federation.rotate_keys("me")
            federation.ledger.runs.set_status(built.run, RunStatus.STOPPED)
            federation.rotate_keys("me")
            known = federation.certificate
        finally:
            federation.close()
        assert again(file, tmp_path / "new").recertified
        shown = Certificate.from_bytes((tmp_path / "new/keys/certificate").read_bytes())
        shown.refuse_older(known)
        assert shown.keys != known.keys

    def test_a_wrong_passphrase_writes_nothing(self, file: Path, tmp_path: Path) -> None:
        with pytest.raises(CannotOpen, match="passphrase is wrong"):
            again(file, tmp_path / "new", Keys(passphrase=PHRASE + "!"))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["b.tar", "fed"]

    def test_sealed_keys_do_not_open_in_another_federations_backup(
        self, file: Path, tmp_path: Path
    ) -> None:
        """What is sealed is bound to the federation whose name stands in the manifest."""
        rewrite(file, manifest=lambda fields: fields.update(federation="0" * 32))
        with pytest.raises(CannotOpen):
            again(file, tmp_path / "new")

    def test_a_directory_in_use_is_never_written_to(self, built: Built, file: Path) -> None:
        before = tree(built.directory)
        with pytest.raises(UsageError, match="is not empty"):
            again(file, built.directory)
        assert tree(built.directory) == before

    def test_an_empty_directory_will_do(self, file: Path, tmp_path: Path) -> None:
        (tmp_path / "new").mkdir()
        assert again(file, tmp_path / "new").fork is not None

    @pytest.mark.parametrize(
        "keys", [Keys(), Keys(passphrase=PHRASE, fresh=True), Keys(folder=Path(), fresh=True)]
    )
    def test_the_keys_come_from_one_place(self, file: Path, tmp_path: Path, keys: Keys) -> None:
        with pytest.raises(UsageError, match="say where the server's keys come from"):
            again(file, tmp_path / "new", keys)

    def test_keys_of_ones_own_are_taken_if_they_are_the_right_ones(
        self, built: Built, tmp_path: Path
    ) -> None:
        file = backup(built.directory, tmp_path / "b.tar", passphrase=None).file
        other = tmp_path / "other"
        other.mkdir()
        PrivateKeys.generate().save(other / "server.json")
        with pytest.raises(KeyFileError, match="is not the one that the backup's certificate"):
            again(file, tmp_path / "new", Keys(folder=other))
        PrivateKeys.load(built.directory / "keys/server.json").save(other / "server.json")
        RootKey.generate().save(other / ROOT_ONLY)
        with pytest.raises(KeyFileError, match="the root key is of federation"):
            again(file, tmp_path / "new", Keys(folder=other))
        (other / ROOT_ONLY).unlink()
        done = again(file, tmp_path / "new", Keys(folder=other))
        assert not done.recertified
        Federation.open(tmp_path / "new", None, ()).close()

    def test_new_keys_make_another_federation_without_members(
        self, built: Built, file: Path, tmp_path: Path
    ) -> None:
        done = again(file, tmp_path / "new", Keys(fresh=True))
        assert done.members == []
        federation = Federation.open(tmp_path / "new", None, ())
        try:
            assert federation.id != done.manifest.federation
            assert federation.ledger.clients.by_name("a") is None  # the name is free again
        finally:
            federation.close()

    def test_tickets_of_the_backup_are_good_no_more(self, built: Built, tmp_path: Path) -> None:
        """One that was used since would let a second device in."""
        with built.ledger() as ledger:
            ledger.tickets.add("c", curve=b"1" * 32, signing=b"2" * 32, expires_at=4e9)
        file = backup(built.directory, tmp_path / "b.tar", passphrase=PHRASE).file
        assert again(file, tmp_path / "new").withdrawn == 1
        with Ledger(tmp_path / "new" / LEDGER_NAME) as ledger:
            assert ledger.tickets.all()[0].withdrawn_at is not None

    def test_a_run_without_a_state_begins_again_before_the_queue(
        self, built: Built, tmp_path: Path
    ) -> None:
        settings = ["method.name=running_mean", "tasks.schedule=listed"]
        settings.append('tasks.classes=[["ant"],["bee"]]')
        run = new_run_id()
        with built.ledger() as ledger:
            ledger.runs.set_status(built.run, RunStatus.STOPPED)
            old = ledger.runs.add(
                run, method="running_mean", method_version="1",
                config=to_toml(load(None, settings)), hparams={"a": 1}, backbone={"name": "b"},
                schema_digest="0" * 64, seed=3, environment={"python": "3"},
            )  # fmt: skip
        begun = built.directory / "runs" / run / "start.safetensors"
        begun.parent.mkdir(parents=True)
        begun.write_bytes(b"LoRA")
        RunQueue(built.directory).append("next", {}, "me")
        file = backup(built.directory, tmp_path / "b.tar", passphrase=PHRASE).file
        done = again(file, tmp_path / "new")
        with Ledger(tmp_path / "new" / LEDGER_NAME) as ledger:
            row, entry = next_run(RunQueue(tmp_path / "new"), ledger, new=False)
            assert (row, entry, done.fork) == (done.begun, None, None)
            assert row.run_id != run, "clients may have seen states of that one"
            same = replace(row, run_id=run, created_at=old.created_at)
            assert (same, row.parent_run) == (old, None)
            assert [c.name for c in ledger.classes.all(row.run_id)] == ["ant", "bee"]
            assert ledger.runs.get(run).status is RunStatus.STOPPED
        start = tmp_path / "new" / "runs" / row.run_id / "start.safetensors"
        assert start.read_bytes() == b"LoRA"

    def test_settings_that_are_refused_stop_that_run_alone_and_are_named(
        self, built: Built, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run = new_run_id()
        with built.ledger() as ledger:
            ledger.runs.set_status(built.run, RunStatus.STOPPED)
            ledger.runs.add(
                run, method="running_mean", method_version="1", config="[round]\nold = 1\n",
                hparams={}, backbone={}, schema_digest="0" * 64, seed=3, environment={},
            )  # fmt: skip
        file = backup(built.directory, tmp_path / "b.tar", passphrase=PHRASE).file
        done = again(file, tmp_path / "new")
        assert done.begun is None
        with Ledger(tmp_path / "new" / LEDGER_NAME) as ledger:
            assert ledger.runs.get(run).status is RunStatus.STOPPED
        show_restored(done, tmp_path / "new", fresh=False)
        said = capsys.readouterr().out
        assert f"run {run} had no state yet and is stopped: unknown key 'round.old'" in said

    @pytest.mark.parametrize("status", [RunStatus.DONE, RunStatus.STOPPED])
    def test_a_run_that_was_over_is_not_forked(
        self, built: Built, tmp_path: Path, status: RunStatus
    ) -> None:
        with built.ledger() as ledger:
            ledger.runs.set_status(built.run, status)
        file = backup(built.directory, tmp_path / "b.tar", passphrase=PHRASE).file
        assert again(file, tmp_path / "new").fork is None
        with Ledger(tmp_path / "new" / LEDGER_NAME) as ledger:
            assert [r.status for r in ledger.runs.all()] == [status]

    @pytest.mark.parametrize("call", sampled([0, 4, 40, 120, 200, 240, 262], (4, 120, 262)))
    def test_a_kill_at_any_moment_leaves_no_half_directory(
        self, built: Built, tmp_path: Path, call: int
    ) -> None:
        file = backup(built.directory, tmp_path / "b.tar", passphrase=None).file
        new = tmp_path / "new"
        killed_at(call, f"restore(P({str(file)!r}), P({str(new)!r}), Keys(fresh=True), actor='me')")
        if not new.exists():
            again(file, new, Keys(fresh=True))
        with Ledger(new / LEDGER_NAME) as ledger:
            assert ledger.database.faults() == []
            assert len(ledger.runs.all()) == 2
        Federation.open(new, None, ()).close()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["b.tar", "fed", "new"]

    def test_the_directory_appears_at_once(
        self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is the one that was written and synced under another name, not a copy of it."""
        synced: list[int] = []
        real = restore_module._sync_all
        monkeypatch.setattr(
            restore_module, "_sync_all", lambda d: (synced.append(d.stat().st_ino), real(d))
        )
        again(file, tmp_path / "new")
        assert synced == [(tmp_path / "new").stat().st_ino]

    def test_a_full_disk_leaves_nothing(
        self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise DiskFull("no space.")

        monkeypatch.setattr(restore_module, "_sync_all", full)
        with pytest.raises(DiskFull):
            again(file, tmp_path / "new")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["b.tar", "fed"]


def test_the_ledger_of_an_older_version_is_backed_up_as_it_is(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before an upgrade, by the newer fcil: with the backup the older one can go on."""
    ledger = built.directory / LEDGER_NAME
    newer = (*database_module.MIGRATIONS, "CREATE TABLE more (one INTEGER);")
    monkeypatch.setattr(database_module, "MIGRATIONS", newer)
    monkeypatch.setattr(database_module, "SCHEMA_VERSION", len(newer))
    with Ledger(ledger, read_only=True) as held:
        assert held.database.is_older
    done = backup(built.directory, tmp_path / "older.tar", passphrase=PHRASE)
    assert not audit_backup(built.directory, done, "me")
    assert done.manifest.state == OPEN_STATE
    with Ledger(ledger, read_only=True) as held:
        assert held.database.is_older
    with tarfile.open(done.file) as archive:
        archive.extract(LEDGER_NAME, tmp_path, filter="data")
    with Ledger(tmp_path / LEDGER_NAME, read_only=True) as held:
        assert held.database.is_older


def test_a_restored_ledger_of_an_older_version_leaves_no_copy_of_before(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on as a fork: its clients have seen more than that copy."""
    done = backup(built.directory, tmp_path / "older.tar", passphrase=PHRASE)
    newer = (*database_module.MIGRATIONS, "CREATE TABLE more (one INTEGER);")
    monkeypatch.setattr(database_module, "MIGRATIONS", newer)
    monkeypatch.setattr(database_module, "SCHEMA_VERSION", len(newer))
    again(done.file, tmp_path / "new")
    assert list((tmp_path / "new").glob("ledger.version-*")) == []
    with Ledger(built.directory / LEDGER_NAME):
        pass
    [kept] = built.directory.glob("ledger.version-*")
    names = {finding.about for finding in check(built.directory)}
    assert "leftovers" not in names
    assert kept.exists()
