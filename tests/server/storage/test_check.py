"""`check` names everything that is wrong, and never touches it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fcil_protocol.envelopes.stored_envelope import StoredEnvelope
from fcil_protocol.errors import StorageError
from fcil_protocol.storage.spool import Spool
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.cli.main import app
from fcil_server.ledger.ledger import LEDGER_NAME
from fcil_server.storage import check as module
from fcil_server.storage.check import check
from fcil_server.storage.findings import CheckFinding, Severity
from server.storage_kit import OPEN_STATE, Built, build, flip, spoil_index, tree


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build(tmp_path / "fed")


def bad(found: list[CheckFinding]) -> list[CheckFinding]:
    return [f for f in found if f.level is not Severity.OK]


def sql(built: Built, statement: str) -> None:
    with sqlite3.connect(built.directory / LEDGER_NAME) as db:
        db.execute(statement)
    db.close()


def test_a_whole_federation_has_nothing_wrong(built: Built) -> None:
    found = check(built.directory)
    assert bad(found) == []
    texts = " ".join(f.text for f in found)
    assert "task 2 train round 0 is open with 1 update" in texts
    assert "3 tasks, 7 rounds, 7 states" in texts


def remove(name: str) -> Callable[[Built], None]:
    return lambda built: (built.directory / name).unlink()


def statement(text: str) -> Callable[[Built], None]:
    return lambda built: sql(built, text)


def loosen(built: Built) -> None:
    (built.directory / "keys" / "server.json").chmod(0o644)


def other_key(built: Built) -> None:
    path = built.directory / "keys" / "server.json"
    path.unlink()
    PrivateKeys.generate().save(path)


def empty_spool(built: Built) -> None:
    for path in built.spool.iterdir():
        path.unlink()


def flip_spool(built: Built) -> None:
    (path,) = built.spool.iterdir()
    flip(path)


def scramble_config(built: Built) -> None:
    (built.directory / "federation.toml").write_text("[round]\nquorun = 3\n")


def scramble_ledger(built: Built) -> None:
    path = built.directory / LEDGER_NAME
    data = bytearray(path.read_bytes())
    data[4096 * 3 : 4096 * 12] = b"\x55" * (4096 * 9)
    path.write_bytes(data)


def foreign_update(built: Built) -> None:
    """The update in the spool was signed by a key that is not its client's."""
    sql(built, f"UPDATE updates SET client = '{'b' * 26}' WHERE update_id = '{built.update}'")


FAILURES: dict[str, tuple[Callable[[Built], None], str]] = {
    "no config": (remove("federation.toml"), "federation.toml"),
    "bad config": (scramble_config, "quorun"),
    "no server key": (remove("keys/server.json"), "server.json does not exist"),
    "open server key": (loosen, "permissions 0644"),
    "another server key": (other_key, "certifies"),
    "damaged certificate": (lambda b: flip(b.directory / "keys/certificate"), "certificate"),
    "damaged root key": (lambda b: flip(b.directory / "keys/root.json"), "root.json"),
    "no ledger": (remove(LEDGER_NAME), "there is no ledger"),
    "damaged ledger": (scramble_ledger, "damaged"),
    "newest state": (lambda b: flip(b.state(OPEN_STATE)), "000006.safetensors is damaged"),
    "no newest state": (lambda b: b.state(OPEN_STATE).unlink(), "000006.safetensors is missing"),
    "its record": (lambda b: flip(b.state(OPEN_STATE).with_suffix(".json"), 0.1), "000006"),
    "parent chain": (
        statement("UPDATE states SET parent = 'x' WHERE state = 4"),
        "state 4 does not follow from state 3",
    ),
    "state numbers": (statement("DELETE FROM states WHERE state = 3"), "with gaps"),
    "round numbers": (statement("UPDATE rounds SET seq = 99 WHERE seq = 2"), "without gaps"),
    "unknown state": (
        statement("UPDATE rounds SET new_state = 77 WHERE seq = 1"),
        "made state 77, which is unknown",
    ),
    "uncounted": (
        statement("UPDATE updates SET status = 'accepted' WHERE task = 1 AND kind = 'train'"),
        "neither counted nor excluded",
    ),
    "counted too early": (
        statement("UPDATE updates SET status = 'counted' WHERE task = 2"),
        "is open, but has counted updates",
    ),
    "class ids": (statement("UPDATE classes SET class_id = 40 WHERE class_id = 5"), "class ids"),
    "class tasks": (statement("UPDATE classes SET task = 0 WHERE class_id = 3"), "do not fit"),
    "dangling rows": (
        statement("UPDATE rounds SET task = 9 WHERE seq = 0"),
        "refer to rows that do not exist",
    ),
    "member's key": (
        statement("UPDATE clients SET sealing = x'00' WHERE name = 'a'"),
        "keys cannot be used: a",
    ),
    "empty spool": (empty_spool, "update of a to the open round is lost: it is not in the spool"),
    "damaged spool": (flip_spool, "are damaged"),
    "index": (spoil_index, "sqlite_autoindex_updates_1"),
    "metrics of a round": (
        statement("UPDATE rounds SET metrics = '{]' WHERE seq = 1"),
        "column metrics of table rounds",
    ),
    "clients of a round": (
        statement("UPDATE rounds SET asked = 7 WHERE seq = 1"),
        "column asked of table rounds",
    ),
    "another's update": (
        statement("UPDATE updates SET update_id = 'x' WHERE task = 2"),
        "is lost: it is not in the spool",
    ),
}


@pytest.mark.parametrize("what", FAILURES)
def test_whatever_is_lost_is_a_failure_with_an_action(built: Built, what: str) -> None:
    spoil, said = FAILURES[what]
    spoil(built)
    before = tree(built.directory)
    failures = [f for f in check(built.directory) if f.level is Severity.FAILURE]
    assert any(said in f.text for f in failures), failures
    assert all(f.action for f in failures)
    after = {n: d for n, d in tree(built.directory).items() if not n.endswith(("-shm", "-wal"))}
    assert after == {n: d for n, d in before.items() if not n.endswith(("-shm", "-wal"))}


def test_a_settings_text_that_cannot_be_read_is_named_and_not_shown(built: Built) -> None:
    sql(built, "UPDATE runs SET config = CAST(CAST(config AS BLOB) || x'ff' AS TEXT)")
    failures = [f for f in check(built.directory) if f.level is Severity.FAILURE]
    (text,) = {f.text for f in failures if "config" in f.text}
    assert "the text of column config cannot be read" in text
    assert len(text) < 300


def half_write(built: Built) -> None:
    (built.directory / "runs" / ".x.4194305-0123abcd.tmp").write_bytes(b"half")


def stray_run(built: Built) -> None:
    (built.directory / "runs" / "r20260101-000000-abcd").mkdir()


def lose_start(built: Built) -> None:
    sql(built, f"UPDATE runs SET environment = '{json.dumps({'start': {'digest': 'd' * 64}})}'")


WARNINGS: dict[str, tuple[Callable[[Built], None], str]] = {
    "no certificate": (remove("keys/certificate"), "certificate"),
    "older state": (lambda b: flip(b.state(2)), "000002.safetensors is damaged"),
    "uncommitted state": (
        lambda b: b.state(9).with_suffix(".json").write_text("{}"),
        "was never committed",
    ),
    "an incomplete write": (half_write, "is an incomplete write"),
    "stray file": (lambda b: (b.directory / "notes.txt").write_text("x"), "not a file of fcil"),
    "killed backup": (
        lambda b: (b.directory / ".fcil-backup.1-0123abcd.file.tmp").write_bytes(b"half"),
        "belongs to a backup",
    ),
    "the adapter that it began with": (
        lose_start,
        "the adapter that the run began with, is missing",
    ),
    "stray run": (stray_run, "belongs to no run"),
    "open ledger": (lambda b: (b.directory / LEDGER_NAME).chmod(0o640), "permissions 0640"),
}


@pytest.mark.parametrize("what", WARNINGS)
def test_what_can_be_lived_with_is_a_warning(built: Built, what: str) -> None:
    spoil, said = WARNINGS[what]
    spoil(built)
    (found,) = bad(check(built.directory))
    assert found.level is Severity.WARNING
    assert said in found.text
    assert found.action


def test_logs_in_the_directory_are_nothing_odd(built: Built) -> None:
    """The worker's, the one that it sets aside, and the server's own if it is kept here."""
    for name in ("worker.log", "worker.log.1", "server.log", "server.log.5", "audit.jsonl.2"):
        (built.directory / name).write_text("x")
    assert bad(check(built.directory)) == []


def test_an_update_under_anothers_name_is_found(built: Built) -> None:
    """Bob's row points at what Alice signed: her key is not his, and his name not hers."""
    foreign_update(built)
    (found,) = bad(check(built.directory))
    assert "the update of b to the open round is lost" in found.text


def test_a_sum_of_a_relay_is_whole_and_that_of_a_client_is_none(built: Built) -> None:
    """Alice's row points at a record that a relay, or only Bob, has signed."""
    with built.ledger() as ledger:
        rows = {row.name: row for row in ledger.clients.all()}
    sql(built, f"UPDATE updates SET client = '{rows['b'].client_id}', sum_id = update_id "
        f"WHERE update_id = '{built.update}'")  # fmt: skip
    (found,) = bad(check(built.directory))
    assert "another client sent it" in found.text
    sql(built, f"UPDATE clients SET role = 'relay' WHERE client_id = '{rows['a'].client_id}'")
    assert not [f for f in bad(check(built.directory)) if "is lost" in f.text]


@pytest.mark.parametrize("piece", ["signature", "wrap", "body"])
def test_an_update_that_was_exchanged_under_its_name_is_found(built: Built, piece: str) -> None:
    """The spool's own checksums fit: somebody wrote it anew."""
    spool = Spool(built.spool)
    stored = StoredEnvelope.from_bytes(spool.get(built.update))
    other = bytearray(getattr(stored, piece))
    other[-1] ^= 1
    spool.remove([built.update])
    spool.append(built.update, replace(stored, **{piece: bytes(other)}).to_bytes())
    spool.close()
    (found,) = bad(check(built.directory))
    assert "the update of a to the open round is lost" in found.text


def test_a_low_disk_is_told(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, level in (
        (10**12, Severity.OK),
        (10**8, Severity.WARNING),
        (10**6, Severity.FAILURE),
    ):
        monkeypatch.setattr(
            module.shutil, "disk_usage", lambda _, free=free: type("U", (), {"free": free})
        )
        assert [f.level for f in check(built.directory) if f.about == "disk"] == [level]


def test_a_folder_without_a_federation_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="holds no federation"):
        check(tmp_path)


class TestCommand:
    def test_the_exit_code_says_whether_something_is_lost(self, built: Built) -> None:
        run = CliRunner()
        place = ["check", "--dir", str(built.directory)]
        done = run.invoke(app, place)
        assert (done.exit_code, "0 failures" in done.stdout) == (0, True)
        flip(built.state(2))
        assert run.invoke(app, place).exit_code == 0  # a warning
        flip(built.state(OPEN_STATE))
        done = run.invoke(app, place)
        assert done.exit_code == 1
        assert "FAILURE" in done.stdout
        assert "-> Start the server" in done.stdout

    def test_json_has_every_line(self, built: Built) -> None:
        flip(built.state(OPEN_STATE))
        done = CliRunner().invoke(app, ["check", "--dir", str(built.directory), "--json"])
        answer = json.loads(done.stdout)
        assert answer["status"] == "error"
        assert answer["data"]["count"]["failure"] == 1
        assert {"level", "about", "text", "action"} == set(answer["data"]["findings"][0])


def test_every_action_of_the_audit_log_is_counted(built: Built) -> None:
    with built.ledger() as ledger, ledger.transaction():
        before = ledger.audit.count()
        for number in range(1_500):
            ledger.audit.add("me", "planted", str(number))
    found = [f.text for f in check(built.directory) if f.about == "ledger"]
    assert any(text.endswith(f"{before + 1_500:,} actions") for text in found), found
