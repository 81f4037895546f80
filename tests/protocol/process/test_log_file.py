"""A log file rotates, survives a full disk, and keeps to itself."""

import errno
import json
import logging
import os
import stat

import pytest

from fcil_protocol.errors import StorageError
from fcil_protocol.process import log_file
from fcil_protocol.process.log_file import KEPT_LOGS, DaemonOutput, LogFile, LogFormat


@pytest.fixture
def log(tmp_path):
    file = LogFile(tmp_path / "log")
    yield file
    file.close()


def lines(path):
    return path.read_text().splitlines()


def test_a_line_has_an_iso_time_in_utc_and_a_level(log, tmp_path):
    log.write(0.0, "warning", "the sky falls", "sky")
    assert lines(tmp_path / "log") == ["1970-01-01T00:00:00.000Z WARNING the sky falls"]


def test_in_jsonl_every_line_is_an_object(tmp_path):
    LogFile(tmp_path / "log", LogFormat.JSONL).write(1.5, "info", 'say "ä"', "said")
    [line] = lines(tmp_path / "log")
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:01.500Z", "level": "info", "code": "said", "text": 'say "ä"',
    }  # fmt: skip


def test_only_its_owner_reads_it(log, tmp_path):
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600


def test_a_full_log_is_set_aside_and_the_oldest_goes(tmp_path):
    log = LogFile(tmp_path / "log", max_bytes=100)
    for n in range(20):
        log.write(0.0, "info", f"{n:02}" + "x" * 60)  # one line fits, two do not
    log.close()
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["log", *(f"log.{n}" for n in range(1, KEPT_LOGS + 1))]
    numbers = [lines(tmp_path / name)[0].split()[2][:2] for name in names]
    assert numbers == ["19", "18", "17", "16", "15", "14"]


def test_after_a_rename_and_reopen_lines_go_to_the_new_file(log, tmp_path):
    log.write(0.0, "info", "before")
    (tmp_path / "log").rename(tmp_path / "log.old")
    log.write(0.0, "info", "between")
    log.reopen()
    log.write(0.0, "info", "after")
    assert [line.split()[2] for line in lines(tmp_path / "log.old")] == ["before", "between"]
    assert [line.split()[2] for line in lines(tmp_path / "log")] == ["after"]


def test_a_full_disk_raises_nothing_and_what_was_lost_is_told_later(log, tmp_path, monkeypatch):
    log.write(0.0, "info", "one")

    def half(fd, data):
        os.write(fd, bytes(data)[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(log_file, "write_all", half)
        log.write(0.0, "info", "two")
        log.write(0.0, "info", "three")
    log.write(0.0, "info", "four")
    whole = [line for line in lines(tmp_path / "log") if "Z " in line]
    assert [line.split("Z ")[1] for line in whole] == [
        "INFO    one", "WARNING 2 lines before this one were lost", "INFO    four",
    ]  # fmt: skip


def test_a_log_that_cannot_be_opened_is_said_at_the_start(tmp_path):
    with pytest.raises(StorageError, match="cannot open the log"):
        LogFile(tmp_path / "no" / "log")


@pytest.mark.parametrize("read", [False, True])
def test_a_pipe_is_refused_at_once_instead_of_waited_for(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK) if read else None
    with pytest.raises(StorageError, match="expected a file, got a pipe or a device"):
        LogFile(tmp_path / "pipe")
    if reader is not None:
        os.close(reader)


def test_a_pipe_in_the_place_of_the_log_leaves_the_old_file_in_use(log, tmp_path):
    log.write(0.0, "info", "before")
    (tmp_path / "log").rename(tmp_path / "log.old")
    os.mkfifo(tmp_path / "log")
    with pytest.raises(StorageError, match="expected a file"):
        log.reopen()
    log.write(0.0, "info", "after")
    assert [line.split()[2] for line in lines(tmp_path / "log.old")] == ["before", "after"]


def test_a_log_that_others_could_read_is_closed_to_them(tmp_path):
    (tmp_path / "log").touch()
    (tmp_path / "log").chmod(0o644)
    LogFile(tmp_path / "log").close()
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600


def test_the_log_gets_what_libraries_log_and_no_control_characters(log, tmp_path, capsys):
    root = logging.getLogger()
    before = list(root.handlers)
    try:
        said = DaemonOutput(log)
        said(0.0, "info", "a\x1b[31mb")
        logging.getLogger("library").error("odd\nthings")
    finally:
        root.handlers[:] = before
    assert [line.split("Z ")[1] for line in lines(tmp_path / "log")] == [
        "INFO    a\N{REPLACEMENT CHARACTER}[31mb", "ERROR   odd", "ERROR   things",
    ]  # fmt: skip
    assert capsys.readouterr().err == ""  # no terminal: the file has it
