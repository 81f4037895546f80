"""Files: atomic writes, errors as sentences, locks, private files."""

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fcil_protocol.errors import DiskFull, KeyFileError, Locked, StorageError
from fcil_protocol.storage import atomic_files


def leftovers(directory: Path) -> list[str]:
    return [p.name for p in directory.iterdir() if p.name.endswith(".tmp")]


def fail_with(number: int):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


# --- make_private ---------------------------------------------------------------------------


def test_a_directory_and_all_that_was_missing_above_it_are_private(tmp_path):
    old = os.umask(0)
    try:
        (tmp_path / "there").mkdir(mode=0o755)
        atomic_files.make_private(tmp_path / "there" / "a" / "b")
        atomic_files.make_private(tmp_path / "there" / "a" / "b")  # and again
    finally:
        os.umask(old)
    modes = [stat.S_IMODE((tmp_path / "there" / name).stat().st_mode) for name in ("", "a", "a/b")]
    assert modes == [0o755, 0o700, 0o700]


# --- write_atomic ---------------------------------------------------------------------------


def test_a_file_is_written_whole_and_private(tmp_path):
    path = tmp_path / "x"
    atomic_files.write_atomic(path, b"one")
    atomic_files.write_atomic(path, b"second")
    assert path.read_bytes() == b"second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert leftovers(tmp_path) == []


def test_a_mode_can_be_asked_for(tmp_path):
    old = os.umask(0o022)
    try:
        atomic_files.write_atomic(tmp_path / "x", b"", mode=0o644)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o644


def test_the_temporary_file_is_private_from_its_first_moment(tmp_path, monkeypatch):
    modes = []
    write = os.write

    def spy(fd, data):
        modes.append(stat.S_IMODE(os.fstat(fd).st_mode))
        return write(fd, data)

    monkeypatch.setattr(os, "write", spy)
    atomic_files.write_atomic(tmp_path / "x", b"secret")
    assert modes == [0o600]


def test_content_is_synced_before_the_rename_and_the_directory_after(tmp_path, monkeypatch):
    events = []
    replace = Path.replace
    monkeypatch.setattr(atomic_files, "sync_data", lambda fd: events.append("data"))
    monkeypatch.setattr(atomic_files, "sync_directory", lambda directory: events.append("names"))
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (events.append("rename"), replace(self, to))[1]
    )
    atomic_files.write_atomic(tmp_path / "x", b"data")
    assert events == ["data", "rename", "names"]


def test_short_writes_are_continued(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data)[:3]))
    atomic_files.write_atomic(tmp_path / "x", b"0123456789")
    assert (tmp_path / "x").read_bytes() == b"0123456789"


def test_a_full_disk_leaves_the_old_file_and_names_the_disk(tmp_path, monkeypatch):
    path = tmp_path / "x"
    atomic_files.write_atomic(path, b"old")
    monkeypatch.setattr(os, "write", fail_with(errno.ENOSPC))
    with pytest.raises(DiskFull, match=r"cannot write .*the disk at /.* is full \(.* MB free\)"):
        atomic_files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert leftovers(tmp_path) == []


def test_a_real_size_limit_is_a_storage_error(tmp_path):
    """RLIMIT_FSIZE makes the kernel itself refuse the write (EFBIG)."""
    script = """
import resource, sys
from pathlib import Path
from fcil_protocol.errors import StorageError
from fcil_protocol.storage.atomic_files import write_atomic
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_atomic(Path(sys.argv[1]), bytes(5000))
except StorageError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "x")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "file size limit" in done.stdout
    assert list(tmp_path.iterdir()) == []


# --- storage_errors -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "expected", "words"),
    [
        (errno.ENOSPC, DiskFull, "is full"),
        (errno.EDQUOT, DiskFull, "quota"),
        (errno.EACCES, StorageError, "permission denied"),
        (errno.EROFS, StorageError, "read-only"),
        (errno.ENOENT, StorageError, "there is no folder"),
        (errno.EIO, StorageError, "reported a fault"),
        (errno.ENXIO, StorageError, "no such device"),
    ],
)
def test_every_system_error_is_a_sentence_that_names_the_path(tmp_path, number, expected, words):
    with (
        pytest.raises(expected) as caught,
        atomic_files.storage_errors("keep", tmp_path / "a" / "b"),
    ):
        raise OSError(number, os.strerror(number))
    assert type(caught.value) is expected
    assert words in caught.value.message
    assert f"cannot keep {tmp_path}/a/b:" in caught.value.message


def test_what_does_not_exist_is_the_file_or_its_folder(tmp_path):
    for name, said in (("file", "it does not exist"), ("no/file", f"no folder {tmp_path}/no")):
        with (
            pytest.raises(StorageError, match=said),
            atomic_files.storage_errors("read", tmp_path / name),
        ):
            (tmp_path / name).read_bytes()


def test_named_errors_and_defects_pass_through_unchanged(tmp_path):
    with pytest.raises(Locked), atomic_files.storage_errors("x", tmp_path):
        raise Locked("in use")
    with pytest.raises(ValueError, match="ours"), atomic_files.storage_errors("x", tmp_path):
        raise ValueError("ours")


# --- DirectoryLock --------------------------------------------------------------------------


def test_a_second_taker_is_refused_and_told_who_has_the_lock(tmp_path):
    lock = atomic_files.DirectoryLock.acquire(tmp_path, "federation")
    with lock, pytest.raises(Locked, match=f"federation directory .* process {os.getpid()}"):
        atomic_files.DirectoryLock.acquire(tmp_path, "federation")
    atomic_files.DirectoryLock.acquire(tmp_path, "federation").release()


def test_release_may_be_called_twice(tmp_path):
    lock = atomic_files.DirectoryLock.acquire(tmp_path, "client")
    lock.release()
    lock.release()
    atomic_files.DirectoryLock.acquire(tmp_path, "client").release()


def test_a_lock_ends_with_a_killed_process_and_its_half_files_are_removed(tmp_path):
    script = """
import os, sys, time
from pathlib import Path
from fcil_protocol.storage.atomic_files import DirectoryLock
d = Path(sys.argv[1])
lock = DirectoryLock.acquire(d, "client")
(d / "sub").mkdir()
(d / "sub" / f".x.{os.getpid()}-00000000.tmp").write_bytes(b"half")
print("ready", flush=True)
sys.stdin.read()
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout.readline() == "ready\n"
        with pytest.raises(Locked, match=f"process {holder.pid}"):
            atomic_files.DirectoryLock.acquire(tmp_path, "client")
        assert leftovers(tmp_path / "sub") != []
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=30)
    atomic_files.DirectoryLock.acquire(tmp_path, "client").release()
    assert leftovers(tmp_path / "sub") == []


def test_the_sweep_spares_files_of_living_processes_and_of_other_programs(tmp_path):
    alive = tmp_path / f".x.{os.getppid()}-00000000.tmp"
    foreign = tmp_path / ".something.tmp"
    alive.touch()
    foreign.touch()
    atomic_files.DirectoryLock.acquire(tmp_path, "client").release()
    assert alive.exists()
    assert foreign.exists()


def test_a_missing_directory_cannot_be_locked(tmp_path):
    with pytest.raises(StorageError, match="there is no folder"):
        atomic_files.DirectoryLock.acquire(tmp_path / "none", "client")


# --- place_new and scratch ------------------------------------------------------------------


@pytest.mark.parametrize("links", [True, False])
def test_a_finished_file_gets_its_name_and_no_other_file_loses_its_own(
    tmp_path, monkeypatch, links
):
    """Also on a stick, where a file has one name only."""

    def none(*_args):
        raise OSError(errno.EPERM, "no links here")

    if not links:
        monkeypatch.setattr(Path, "hardlink_to", none)
    for text in ("new", "newer"):
        (tmp_path / text).write_text(text)
    atomic_files.place_new(tmp_path / "new", tmp_path / "x")
    with pytest.raises(FileExistsError):
        atomic_files.place_new(tmp_path / "newer", tmp_path / "x")
    assert (tmp_path / "x").read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["newer", "x"]


HOLD_SCRATCH = """
import sys
from pathlib import Path
from fcil_protocol.storage.atomic_files import scratch
with scratch(Path(sys.argv[1]), "s") as name:
    name("file").touch()
    name("folder").mkdir()
    (name("folder") / "inside").touch()
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_scratch_of_the_living_is_spared_and_that_of_the_killed_removed(tmp_path):
    command = [sys.executable, "-c", HOLD_SCRATCH, str(tmp_path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout.readline() == "ready\n"
        there = sorted(tmp_path.iterdir())
        assert len(there) == 3
        with atomic_files.scratch(tmp_path, "s") as name:
            assert name("file") not in there
            assert set(there) < set(tmp_path.iterdir())
        assert sorted(tmp_path.iterdir()) == there
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=30)
    with atomic_files.scratch(tmp_path, "other"):
        assert set(there) < set(tmp_path.iterdir())
    with atomic_files.scratch(tmp_path, "s"):
        assert not set(there) & set(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []


# --- read_private ---------------------------------------------------------------------------


def test_a_private_file_is_read(tmp_path):
    atomic_files.write_atomic(tmp_path / "key", b"secret")
    assert atomic_files.read_private(tmp_path / "key") == b"secret"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666, 0o610])
def test_a_key_file_that_others_can_use_is_refused_with_the_command_to_run(tmp_path, mode):
    path = tmp_path / "key"
    path.write_bytes(b"secret")
    path.chmod(mode)
    with pytest.raises(KeyFileError, match=f"{mode:04o}.*chmod 600 {path}"):
        atomic_files.read_private(path)


def test_missing_huge_and_special_files_are_no_key_files(tmp_path):
    with pytest.raises(KeyFileError, match="does not exist"):
        atomic_files.read_private(tmp_path / "none")
    atomic_files.write_atomic(tmp_path / "huge", bytes(atomic_files.MAX_PRIVATE_BYTES + 1))
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("huge", "pipe"):
        with pytest.raises(KeyFileError, match="not a key file"):
            atomic_files.read_private(tmp_path / name)
    with pytest.raises(StorageError, match="directory"):
        atomic_files.read_private(tmp_path)


def test_pieces_are_written_one_after_the_other(tmp_path: Path) -> None:
    atomic_files.write_atomic(tmp_path / "x", b"a", bytearray(b"b"), memoryview(b"c"), b"")
    assert (tmp_path / "x").read_bytes() == b"abc"


def test_what_can_be_had_again_waits_for_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(atomic_files, "sync_data", lambda _: synced.append("data"))
    monkeypatch.setattr(atomic_files, "sync_directory", lambda _: synced.append("directory"))
    atomic_files.write_atomic(tmp_path / "x", b"a", sync=False)
    assert synced == []
    atomic_files.write_atomic(tmp_path / "x", b"a")
    assert synced == ["data", "directory"]
