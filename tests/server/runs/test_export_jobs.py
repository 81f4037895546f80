"""Exports for programs: one at a time, each with a record; the command itself is a stand-in here."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sys
import time
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fcil_protocol.errors import DiskFull, NotNow, StorageError, UsageError, WorkerDied
from fcil_server.reports.export_records import (
    FOLDER,
    KEPT,
    ExportRecord,
    all_records,
    find_record,
)
from fcil_server.runs import export_jobs as module
from fcil_server.runs.export_jobs import ExportJobs
from fcil_server.storage.check import check
from server.storage_kit import Built, build

# Stands in for `fcil-server export`: it waits for a pipe's other end if asked to, and writes its target.
COMMAND = """
import json, os, sys
words = sys.argv[1:]
target = words[words.index("--state") + 3]
if "FCIL_TEST_HOLD" in os.environ:
    open(os.environ["FCIL_TEST_HOLD"], "rb").read()
if "--onnx" in words:
    open(target, "wb").write(b"onnx")
elif "--timm" in words:
    os.mkdir(target)
    for name in ("config.json", "model.safetensors"):
        open(os.path.join(target, name), "wb").write(name.encode())
else:
    print(json.dumps({"status": "error", "data": {
        "code": "method_mismatch", "message": "it has no LoRA.", "action": "Choose another."}}))
    sys.exit(4)
print(json.dumps({"status": "ok", "data": {"file": target}}))
"""


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    monkeypatch.setattr(
        module, "module_command", lambda _, *words: [sys.executable, "-c", COMMAND, *words[1:]]
    )
    return build(tmp_path / "fed")


def carried_out(built: Built, *wanted: dict[str, Any], hold: Path | None = None) -> list[Any]:
    """Start exports one after the other, each when the one before is done; return what is noted."""
    notes: list[Any] = []

    async def work() -> None:
        with built.ledger() as ledger:
            ended = asyncio.Event()

            def notify(*note: str) -> None:
                notes.append(note)
                ended.set()

            jobs = ExportJobs(built.directory, ledger, notify)
            for fields in wanted:
                ended.clear()
                told = await jobs.start(fields, "uid 7")
                assert told["status"] == "running"
                assert find_record(built.directory, told["id"]) == ExportRecord(**told)
                if hold is not None:
                    with pytest.raises(NotNow, match="an export is under way"):
                        await jobs.start(fields, "uid 7")
                    await asyncio.to_thread(hold.write_bytes, b"")  # ends when the child reads
                await ended.wait()
            await jobs.close()

    asyncio.run(work())
    return notes


def tidied(built: Built) -> list[Any]:
    """Tidy as the start of a server does; return what is noted."""
    notes: list[Any] = []

    async def work() -> None:
        with built.ledger() as ledger:
            await ExportJobs(built.directory, ledger, lambda *note: notes.append(note)).tidy()

    asyncio.run(work())
    return notes


def test_a_file_is_there_when_the_export_is_done(built: Built, tmp_path, monkeypatch) -> None:
    hold = tmp_path / "go"
    os.mkfifo(hold)
    monkeypatch.setenv("FCIL_TEST_HOLD", str(hold))
    notes = carried_out(built, {"format": "onnx", "state": "2"}, hold=hold)
    (record,) = all_records(built.directory)
    assert (record.status, record.run, record.state, record.by) == ("done", built.run, "2", "uid 7")
    assert (record.name, record.bytes, record.error) == ("model.onnx", 4, None)
    folder = record.folder(built.directory)
    assert (folder / "model.onnx").stat().st_mode & 0o777 == 0o600
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "record.json"} == {
        "model.onnx": b"onnx"
    }
    assert os.stat(folder).st_mode & 0o077 == 0
    assert [note[:2] for note in notes] == [("info", "exported")]


@pytest.mark.parametrize("hurry", [False, True])
def test_before_the_next_run_an_export_has_its_time_unless_the_server_is_told_to_end(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hurry: bool
) -> None:
    hold = tmp_path / "go"
    os.mkfifo(hold)
    monkeypatch.setenv("FCIL_TEST_HOLD", str(hold))

    async def work() -> None:
        with built.ledger() as ledger:
            jobs, leaving = ExportJobs(built.directory, ledger, lambda *_: None), asyncio.Event()
            await jobs.start({"format": "onnx", "state": "2"}, "uid 7")
            finishing = asyncio.create_task(jobs.finish(leaving))
            if hurry:
                leaving.set()
            else:
                await asyncio.to_thread(hold.write_bytes, b"")  # ends when the child reads
            await finishing
            await jobs.close()

    asyncio.run(work())
    assert [one.status for one in all_records(built.directory)] == ["failed" if hurry else "done"]


def test_a_folder_becomes_an_archive(built: Built) -> None:
    carried_out(built, {"format": "timm"})
    (record,) = all_records(built.directory)
    folder = record.folder(built.directory)
    assert sorted(p.name for p in folder.iterdir()) == ["record.json", "timm.zip"]
    with zipfile.ZipFile(folder / "timm.zip") as file:
        assert file.namelist() == ["config.json", "model.safetensors"]
        assert file.read("config.json") == b"config.json"


def test_a_check_of_the_directory_finds_nothing_strange_in_it(built: Built) -> None:
    carried_out(built, {"format": "onnx"})
    assert "exports" not in " ".join(one.text for one in check(built.directory))


def test_a_failure_has_the_commands_own_words(built: Built) -> None:
    notes = carried_out(built, {"format": "peft"})
    (record,) = all_records(built.directory)
    assert (record.status, record.name) == ("failed", None)
    assert record.error == {
        "code": "method_mismatch", "message": "it has no LoRA.", "action": "Choose another.",
    }  # fmt: skip
    assert notes[0][:2] == ("warning", "export_failed")
    assert sorted(p.name for p in record.folder(built.directory).iterdir()) == ["record.json"]


def test_the_oldest_exports_go(built: Built) -> None:
    carried_out(built, *[{"format": "onnx"}] * (KEPT + 2))
    assert len(all_records(built.directory)) == KEPT
    assert len(list((built.directory / FOLDER).iterdir())) == KEPT


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"format": "pickle"}, "unknown format 'pickle'; expected onnx, peft"),
        ({}, "unknown format 'None'"),
        ({"format": "onnx", "run": "x2"}, "no run's id begins with 'x2'"),
        ({"format": "onnx", "state": "99"}, "no file of state 99"),
        ({"format": "onnx", "state": "x"}, "unknown state 'x'"),
    ],
)
def test_a_wrong_wish_begins_nothing(built: Built, fields, says) -> None:
    async def work() -> None:
        with built.ledger() as ledger:
            await ExportJobs(built.directory, ledger, lambda *_: None).start(fields, "uid 7")

    with pytest.raises(UsageError, match=says):
        asyncio.run(work())
    assert all_records(built.directory) == []


def test_what_a_kill_left_is_marked_and_its_files_go(built: Built) -> None:
    left = ExportRecord("f" * 16, built.run, "2", "onnx", "me", "running", 1.0)
    left.save(built.directory)
    (left.folder(built.directory) / "new-model.onnx").write_bytes(b"half")
    (built.directory / FOLDER / "stray").mkdir()
    carried_out(built, {"format": "onnx"})
    first, second = all_records(built.directory)
    assert (first.id, first.status, second.status) == (left.id, "failed", "done")
    assert first.error is not None
    assert first.error["message"] == "the server ended before the export was complete."
    assert sorted(p.name for p in left.folder(built.directory).iterdir()) == ["record.json"]
    assert not (built.directory / FOLDER / "stray").exists()


def test_a_servers_start_ends_what_a_kill_left(built: Built) -> None:
    """A program that asks for the export hears of its end, though nobody begins another."""
    left = ExportRecord("f" * 16, built.run, "2", "onnx", "me", "running", 1.0)
    left.save(built.directory)
    (left.folder(built.directory) / "new-model.onnx").write_bytes(b"half")
    (built.directory / FOLDER / "stray").write_bytes(b"a file, not a folder")
    tidied(built)
    (record,) = all_records(built.directory)
    assert (record.status, record.error and record.error["code"]) == ("failed", WorkerDied.code)
    assert [p.name for p in record.folder(built.directory).iterdir()] == ["record.json"]
    assert not (built.directory / FOLDER / "stray").exists()


def test_a_folder_that_cannot_be_tidied_is_noted_and_stops_no_server(built, monkeypatch) -> None:
    def fails(*_: Path) -> None:
        raise StorageError("cannot remove it.")

    (built.directory / FOLDER).mkdir()
    monkeypatch.setattr(module, "remove_older", fails)
    assert tidied(built) == [("error", StorageError.code, "exports: cannot remove it.")]


def test_an_export_that_cannot_be_started_is_failed(built: Built, monkeypatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(module, "ChildProcess", fails)
    notes = carried_out(built, {"format": "onnx"})
    (record,) = all_records(built.directory)
    assert (record.status, record.error and record.error["code"]) == ("failed", StorageError.code)
    assert [note[:2] for note in notes] == [("warning", "export_failed")]


def test_an_end_that_could_not_be_recorded_is_made_up_for(built: Built, monkeypatch) -> None:
    save = ExportRecord.save

    def full(record: ExportRecord, directory: Path) -> None:
        if record.status != "running":
            raise DiskFull("the disk is full.")
        save(record, directory)

    async def work() -> None:
        with built.ledger() as ledger:
            ended = asyncio.Event()
            jobs = ExportJobs(built.directory, ledger, lambda *_: ended.set())
            monkeypatch.setattr(ExportRecord, "save", full)
            await jobs.start({"format": "onnx"}, "uid 7")
            await ended.wait()
            monkeypatch.setattr(ExportRecord, "save", save)
            ended.clear()
            await jobs.start({"format": "onnx"}, "uid 7")
            await ended.wait()
            await jobs.close()

    asyncio.run(work())
    assert [record.status for record in all_records(built.directory)] == ["failed", "done"]


def test_files_from_before_1980_are_archived(built: Built) -> None:
    folder = built.directory / "old"
    folder.mkdir()
    (folder / "config.json").write_bytes(b"{}")
    os.utime(folder / "config.json", (0, 0))  # of a machine without a clock
    with zipfile.ZipFile(module._archive(folder, built.directory / "old.zip")) as file:
        assert file.read("config.json") == b"{}"


def test_an_export_of_a_clock_that_was_set_back_is_kept(built: Built) -> None:
    later = time.time() + 1e6
    for number in range(KEPT):
        ExportRecord(f"{number:016x}", built.run, "2", "onnx", "me", "failed", later).save(
            built.directory
        )
    carried_out(built, {"format": "onnx"})
    kept = all_records(built.directory)
    assert (len(kept), [r.status for r in kept].count("done")) == (KEPT, 1)


def test_a_server_that_ends_begins_none(built: Built) -> None:
    async def work() -> None:
        with built.ledger() as ledger:
            jobs = ExportJobs(built.directory, ledger, lambda *_: None)
            begun = asyncio.create_task(jobs.start({"format": "onnx"}, "uid 7"))
            await asyncio.sleep(0)  # it has begun to prepare, and has no process yet
            await jobs.close()
            assert begun.done()
            with pytest.raises(NotNow, match="the server ends"):
                await jobs.start({"format": "onnx"}, "uid 7")

    asyncio.run(work())
    assert "running" not in [record.status for record in all_records(built.directory)]


def test_the_servers_end_ends_the_export(built: Built, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FCIL_TEST_HOLD", str(tmp_path / "never"))

    async def work() -> None:
        with built.ledger() as ledger:
            jobs = ExportJobs(built.directory, ledger, lambda *_: None)
            await jobs.start({"format": "onnx"}, "uid 7")
            await jobs.close()
            assert jobs._process.poll() is not None

    asyncio.run(work())
    (record,) = all_records(built.directory)
    assert record.status == "failed"
    assert record.error is not None
    assert record.error["message"] == "the server ended before the export was complete."


def test_a_damaged_or_foreign_record_is_none(built: Built) -> None:
    folder = built.directory / FOLDER / ("a" * 16)
    whole = ExportRecord("a" * 16, built.run, "2", "onnx", "me", "done", 1.0, 2.0, "model.onnx", 4)
    whole.save(built.directory)
    assert find_record(built.directory, whole.id) == whole
    wrong = [{"bytes": "many"}, {"started_at": None}, {"status": "gone"}, {"error": {"code": 3}}]
    texts = [json.dumps(asdict(whole) | fields).encode() for fields in wrong]
    for text in (b"", b"{", b"[]", b"{}", json.dumps({"id": "b" * 16}).encode(), *texts):
        (folder / "record.json").write_bytes(text)
        assert find_record(built.directory, "a" * 16) is None
    for name in ("..", "", "a" * 15, "../runs", "A" * 16):
        assert find_record(built.directory, name) is None
