"""A log of lines after a kill, a full disk, and many threads; its syncs, and full files."""

import errno
import os
import threading

import pytest

from fcil_protocol.errors import DiskFull
from fcil_protocol.storage import append_log
from fcil_protocol.storage.append_log import AppendLog


@pytest.fixture
def synced(monkeypatch):
    """Return what is synced, in order: sizes of files, and folders."""
    seen = []
    monkeypatch.setattr(append_log, "sync_data", lambda fd: seen.append(os.fstat(fd).st_size))
    monkeypatch.setattr(append_log, "sync_directory", seen.append)
    return seen


def log(tmp_path, *, keeps_half=True, **more):
    return AppendLog(tmp_path / "log", "write", keeps_half=keeps_half, **more)


def test_lines_are_on_the_disk_and_the_files_name_once(tmp_path, synced):
    own = log(tmp_path)
    own.append(b"one", sync=False)
    assert synced == []
    own.append(b"two")
    own.append(b"three")
    assert synced == [8, tmp_path, 14]
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\nthree\n"
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("keeps_half", "after"), [(True, b"one\nha\nnext\n"), (False, b"one\nnext\n")]
)
def test_half_a_line_of_a_kill_is_kept_or_removed(tmp_path, keeps_half, after):
    (tmp_path / "log").write_bytes(b"one\nha")
    log(tmp_path, keeps_half=keeps_half).append(b"next")
    assert (tmp_path / "log").read_bytes() == after


def test_half_a_first_line_is_removed_whole(tmp_path):
    (tmp_path / "log").write_bytes(b"ha")
    log(tmp_path, keeps_half=False).append(b"next")
    assert (tmp_path / "log").read_bytes() == b"next\n"


@pytest.mark.parametrize("keeps_half", [True, False])
def test_a_disk_that_fills_in_the_middle_of_a_line_costs_that_line(
    tmp_path, monkeypatch, keeps_half
):
    own, write = log(tmp_path, keeps_half=keeps_half), append_log.write_all
    own.append(b"one")

    def half(fd, data):
        os.write(fd, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(append_log, "write_all", half)
    with pytest.raises(DiskFull, match="cannot write"):
        own.append(b"lost")
    monkeypatch.setattr(append_log, "write_all", write)
    own.append(b"two")
    lines = (tmp_path / "log").read_bytes().split(b"\n")
    assert lines[0] == b"one"
    assert lines[-2:] == [b"two", b""]
    assert (b"lo" in lines) == keeps_half


def test_a_full_file_gets_its_name_once_its_lines_are_on_the_disk(tmp_path, synced):
    names = iter(["log.1", "log.2"])
    own = log(tmp_path, full_at=6, full_name=lambda: next(names))
    own.append(b"one")
    own.append(b"two", sync=False)
    own.append(b"three", sync=False)  # without a sync no file is renamed
    own.append(b"four")
    assert (tmp_path / "log.1").read_bytes() == b"one\ntwo\nthree\n"
    assert (tmp_path / "log").read_bytes() == b"four\n"
    assert synced == [4, tmp_path, 14, 5, tmp_path]


def test_threads_do_not_mix_their_lines(tmp_path):
    own = log(tmp_path, full_at=500, full_name=iter(f"log.{n}" for n in range(99)).__next__)
    lines = [bytes([65 + k]) * 40 for k in range(8)]
    threads = [
        threading.Thread(target=lambda line=line: [own.append(line) for _ in range(20)])
        for line in lines
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = b"".join(path.read_bytes() for path in tmp_path.iterdir()).splitlines()
    assert sorted(found) == sorted(lines * 20)
