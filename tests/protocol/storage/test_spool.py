"""The spool: what was synced is there after anything; damage costs the damaged record only."""

import errno
import hashlib
import os
import shutil
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcil_protocol.envelopes.stored_envelope import StoredEnvelope
from fcil_protocol.errors import AlreadyHave, CorruptFile, DiskFull, StorageError
from fcil_protocol.storage import segment, segment_list, spool
from fcil_protocol.storage.atomic_files import sync_data
from fcil_protocol.storage.segment import HEAD_BYTES
from fcil_protocol.storage.spool import Spool


def filled(directory: Path, *records: tuple[str, bytes], segment_bytes: int = 1 << 20) -> Spool:
    made = Spool(directory, segment_bytes=segment_bytes)
    for key, body in records:
        made.append(key, body)
    made.sync()
    return made


def content(of: Spool) -> dict[str, bytes]:
    keys = of.keys()
    return {key: of.get(key) for key in keys}


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.seg"))


def quarantined(directory: Path) -> list[Path]:
    return sorted(directory.glob("quarantine/*"))


def size_of(key: str, body: bytes) -> int:
    return HEAD_BYTES + len(key.encode()) + len(body)


ABC = (("a", b"alpha" * 20), ("b", b"beta" * 8), ("c", b"gamma" * 4))


# --- the plain way --------------------------------------------------------------------------


def test_what_was_appended_and_synced_is_read_back_now_and_later(tmp_path):
    with_empty = (*ABC, ("empty", b""), ("ü" * 100, b"a key of 200 bytes"))
    first = filled(tmp_path / "new" / "spool", *with_empty)
    assert content(first) == dict(with_empty)
    first.close()
    again = Spool(tmp_path / "new" / "spool")
    assert content(again) == dict(with_empty)
    assert again.keys() == [key for key, _ in with_empty]
    assert again.recovered == []


def test_a_key_counts_as_there_only_once_it_is_durable(tmp_path):
    """`in` decides whether an Ack may be sent."""
    own = Spool(tmp_path)
    own.append("a", b"x")
    assert "a" not in own
    assert own.keys() == []
    assert own.get("a") == b"x"
    own.sync()
    assert "a" in own
    assert own.keys() == ["a"]


def test_the_same_key_twice_is_refused_and_the_first_counts(tmp_path):
    own = Spool(tmp_path)
    own.append("a", b"first")
    with pytest.raises(AlreadyHave, match="first one counts"):
        own.append("a", b"second")
    own.sync()
    with pytest.raises(AlreadyHave):
        own.append("a", b"second")
    assert content(own) == {"a": b"first"}


def test_a_record_that_is_not_there_is_a_named_error(tmp_path):
    """Damage at opening takes records away that a ledger still names."""
    with pytest.raises(CorruptFile, match="no record 'none'"):
        Spool(tmp_path).get("none")


@pytest.mark.parametrize("key", ["", "x" * 201, "ü" * 101])
def test_a_key_without_or_with_too_many_bytes_is_our_defect(tmp_path, key):
    with pytest.raises(AssertionError):
        Spool(tmp_path).append(key, b"")


def test_a_batch_is_one_fdatasync_and_the_directory_only_for_a_new_segment(tmp_path, monkeypatch):
    own = Spool(tmp_path)
    calls = []
    monkeypatch.setattr(spool, "sync_data", lambda fd: calls.append("data"))
    monkeypatch.setattr(spool, "sync_directory", lambda directory: calls.append("names"))
    for key in "abcdef":
        own.append(key, bytes(1000))
    assert calls == []
    own.sync()
    assert calls == ["data", "names"]
    own.append("g", b"")
    own.sync()
    assert calls == ["data", "names", "data"]
    own.sync()
    assert calls == ["data", "names", "data"]


def test_files_and_directories_are_private(tmp_path):
    filled(tmp_path / "s", *ABC)
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in segments(tmp_path / "s")} == {0o600}


def test_other_files_in_the_directory_are_left_alone(tmp_path):
    (tmp_path / "lock").write_bytes(b"1")
    (tmp_path / "00000001-xyz.seg").write_bytes(b"not ours")
    own = filled(tmp_path, *ABC)
    own.remove("abc")
    assert own.recovered == []
    assert (tmp_path / "00000001-xyz.seg").read_bytes() == b"not ours"


def test_an_envelope_survives_the_way_through_a_record(tmp_path):
    stored = StoredEnvelope(b"header", b"s" * 64, b"wrap", bytes(5000))
    own = filled(tmp_path, ("a", stored.to_bytes()))
    assert StoredEnvelope.from_bytes(own.get("a")) == stored


# --- segments -------------------------------------------------------------------------------


def test_a_new_segment_begins_when_one_is_full_and_large_records_have_their_own(tmp_path):
    records = [(f"k{i}", bytes([i]) * size) for i, size in enumerate([400, 400, 400, 5000, 10])]
    own = filled(tmp_path, *records, segment_bytes=1000)
    assert len(segments(tmp_path)) == 4
    own.close()
    assert content(Spool(tmp_path, segment_bytes=1000)) == dict(records)


def test_appending_goes_on_in_the_last_segment_after_a_restart(tmp_path):
    filled(tmp_path, ABC[0]).close()
    again = filled(tmp_path, ABC[1])
    assert len(segments(tmp_path)) == 1
    assert again.keys() == ["a", "b"]


def test_a_segment_is_deleted_when_nothing_in_it_counts(tmp_path):
    records = [(f"k{i}", bytes(400)) for i in range(6)]  # two records for each segment
    own = filled(tmp_path, *records, segment_bytes=1000)
    first, second, third = segments(tmp_path)
    own.remove(["k0", "k3"])
    assert {first, second, third} <= set(segments(tmp_path))
    own.remove(["k1"])
    assert first not in segments(tmp_path)
    own.sync()
    assert own.keys() == ["k2", "k4", "k5"]
    own.remove(["k2", "k4", "k5"])
    assert segments(tmp_path) == []
    own.append("k0", b"again")
    own.sync()
    assert content(own) == {"k0": b"again"}


def test_removed_stays_removed_after_a_restart(tmp_path):
    own = filled(tmp_path, *ABC)
    own.remove(["b", "unknown"])
    assert "b" not in own
    own.sync()
    own.close()
    again = Spool(tmp_path)
    assert again.keys() == ["a", "c"]
    again.append("b", b"new")
    again.close()
    assert content(Spool(tmp_path))["b"] == b"new"


@pytest.mark.parametrize("restart", [False, True])
def test_a_note_of_removal_outlives_the_record_that_it_removes(tmp_path, restart):
    """Else a removed record would come back when its note's segment is deleted first."""
    own = filled(tmp_path, ("old", bytes(400)), ("kept", bytes(400)), segment_bytes=1000)
    own.append("new", bytes(400))
    own.remove(["old"])  # noted in the second segment
    own.sync()
    if restart:
        own.close()
        own = Spool(tmp_path, segment_bytes=1000)
    own.remove(["new"])  # nothing in the second segment counts any more
    own.close()
    again = Spool(tmp_path, segment_bytes=1000)
    assert again.keys() == ["kept"]
    again.remove(["kept"])
    assert segments(tmp_path) == []


def test_a_removal_of_everything_needs_no_space(tmp_path, monkeypatch):
    own = filled(tmp_path, *ABC)
    monkeypatch.setattr(os, "write", no_space)
    own.remove(own.keys())
    assert own.keys() == []
    assert segments(tmp_path) == []


def test_a_removal_that_cannot_be_noted_did_not_happen(tmp_path, monkeypatch):
    own = filled(tmp_path, *ABC)
    own.append("d", b"not synced")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", no_space)
        with pytest.raises(DiskFull):
            own.remove(["b", "d"])
    assert own.keys() == ["a", "b", "c"]
    assert "d" not in own
    own.remove(["a", "c"])
    own.close()
    assert content(Spool(tmp_path)) == {"b": ABC[1][1], "d": b"not synced"}


# --- torn ends ------------------------------------------------------------------------------


def test_a_tail_torn_at_any_byte_is_cut_off_and_reported(tmp_path):
    """The last record is cut after each of its bytes in turn."""
    filled(tmp_path / "whole", *ABC).close()
    (whole,) = segments(tmp_path / "whole")
    data = whole.read_bytes()
    start = len(data) - size_of(*ABC[2])
    for end in range(start, len(data)):
        directory = tmp_path / str(end)
        directory.mkdir()
        (directory / whole.name).write_bytes(data[:end])
        own = Spool(directory)
        assert content(own) == dict(ABC[:2])
        assert len(own.recovered) == (1 if end > start else 0)
        assert all("never durable" in message for message in own.recovered)
        assert quarantined(directory) == []
        own.append("c", b"once more")
        own.close()
        again = Spool(directory)
        assert content(again) == {**dict(ABC[:2]), "c": b"once more"}
        assert again.recovered == []
        shutil.rmtree(directory)


@pytest.mark.parametrize("tail", [bytes(10), bytes(5000), b"\xff" * 100, b"fsp", b"fspl" * 9])
def test_a_tail_that_is_no_record_is_cut_off(tmp_path, tail):
    """After a power cut the file system may have extended the file with zeros."""
    filled(tmp_path, *ABC).close()
    (path,) = segments(tmp_path)
    with path.open("ab") as file:
        file.write(tail)
    own = Spool(tmp_path)
    assert content(own) == dict(ABC)
    assert len(own.recovered) == 1
    assert f"{len(tail)} bytes" in own.recovered[0]
    own.close()
    assert Spool(tmp_path).recovered == []


def test_what_a_killed_process_appended_without_a_sync_is_made_durable_at_opening(
    tmp_path, monkeypatch
):
    killed = Spool(tmp_path)
    killed.append("a", b"x")
    synced = []
    monkeypatch.setattr(spool, "sync_data", lambda fd: synced.append(os.fstat(fd).st_size))
    again = Spool(tmp_path)
    assert synced == [size_of("a", b"x")]
    assert "a" in again


def test_everything_synced_before_kill_9_is_there_after_it(tmp_path):
    script = """
import os, signal, sys
from pathlib import Path
from fcil_protocol.storage.spool import Spool
spool = Spool(Path(sys.argv[1]), segment_bytes=3000)
for i in range(20):
    spool.append(f"k{i}", bytes([i]) * 500)
spool.sync()
spool.remove(["k3", "k4"])
spool.sync()
spool.append("torn", bytes(100))
write = os.write
def die(fd, data):
    write(fd, bytes(data)[:40])
    os.kill(os.getpid(), signal.SIGKILL)
os.write = die
spool.append("never", bytes(100))
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -9
    own = Spool(tmp_path, segment_bytes=3000)
    kept = [i for i in range(20) if i not in (3, 4)]
    assert own.keys() == [*(f"k{i}" for i in kept), "torn"]
    assert all(own.get(f"k{i}") == bytes([i]) * 500 for i in kept)
    assert len(own.recovered) == 1


# --- damage ---------------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_in_a_middle_record_costs_only_that_record(tmp_path):
    filled(tmp_path / "whole", *ABC).close()
    (whole,) = segments(tmp_path / "whole")
    data = whole.read_bytes()
    start = size_of(*ABC[0])
    size = size_of(*ABC[1])
    for position in range(start, start + size):
        directory = tmp_path / str(position)
        directory.mkdir()
        changed = bytearray(data)
        changed[position] ^= 1 << (position % 8)
        (directory / whole.name).write_bytes(changed)
        own = Spool(directory)
        assert content(own) == {"a": ABC[0][1], "c": ABC[2][1]}
        (moved,) = quarantined(directory)
        assert moved.read_bytes() == changed[start : start + size]
        (message,) = own.recovered
        assert f"{size} bytes at {start}" in message
        assert str(moved) in message
        own.append("b", b"sent again")
        own.close()
        again = Spool(directory)
        assert again.recovered == []  # moved aside once, not met again
        assert content(again) == {"a": ABC[0][1], "c": ABC[2][1], "b": b"sent again"}
        shutil.rmtree(directory)


def test_a_damaged_last_record_is_kept_aside(tmp_path):
    """It was whole once, so it is not merely torn."""
    filled(tmp_path, *ABC).close()
    (path,) = segments(tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    own = Spool(tmp_path)
    assert own.keys() == ["a", "b"]
    assert quarantined(tmp_path)[0].read_bytes() == data[-size_of(*ABC[2]) :]


def test_several_damaged_stretches_are_each_moved_aside(tmp_path):
    records = [(f"k{i}", bytes([i]) * 300) for i in range(8)]
    filled(tmp_path, *records).close()
    (path,) = segments(tmp_path)
    data = bytearray(path.read_bytes())
    size = size_of(*records[0])
    for index, offset in ((1, 0), (2, HEAD_BYTES + 50), (4, 9), (5, 9), (7, 60)):
        data[index * size + offset] ^= 4
    path.write_bytes(data)
    own = Spool(tmp_path)
    assert own.keys() == ["k0", "k3", "k6"]
    assert sum(p.stat().st_size for p in quarantined(tmp_path)) == 5 * size
    own.close()
    assert Spool(tmp_path).recovered == []


def test_damage_across_a_step_of_the_search_is_survived(tmp_path):
    """The next record's mark lies across the 1 MiB steps in which the file is searched."""
    step = segment._STEP_BYTES
    for shift in range(5):
        directory = tmp_path / str(shift)
        filler = bytes(2 * step - HEAD_BYTES - 1 - shift)
        own = filled(directory, ("x", filler), ("y", b"reached"), segment_bytes=1 << 30)
        own.close()
        (path,) = segments(directory)
        with path.open("r+b") as file:
            file.write(b"?")
        again = Spool(directory)
        assert content(again) == {"y": b"reached"}


def test_a_record_that_is_damaged_while_in_use_is_refused_and_the_others_serve(tmp_path):
    own = filled(tmp_path, *ABC)
    (path,) = segments(tmp_path)
    with path.open("r+b") as file:
        file.seek(size_of(*ABC[0]) + HEAD_BYTES + 10)
        file.write(b"?")
    with pytest.raises(CorruptFile, match="'b'"):
        own.get("b")
    assert own.get("a") == ABC[0][1]
    assert own.get("c") == ABC[2][1]


def test_a_body_cannot_contain_a_record_of_somebody_else(tmp_path):
    """A sender knows the format, not the file's salt: damage to its record frees nothing."""

    def forged(salt: bytes) -> bytes:
        fields = struct.pack("<4sBBHQ", b"fspl", 1, 1, 6, 4)
        digest = hashlib.sha256(salt + fields + b"victimEVIL").digest()
        crc = struct.pack("<I", zlib.crc32(salt + fields + digest))
        return fields + digest + crc + b"victimEVIL"

    own = filled(tmp_path / "a", ("x", forged(b"") * 3), ("y", b"ok"))
    own.close()
    (path,) = segments(tmp_path / "a")
    with path.open("r+b") as file:
        file.write(b"?")
    assert content(Spool(tmp_path / "a")) == {"y": b"ok"}
    # The same forgery with the salt would be found: the salt is what protects.
    salt = bytes.fromhex(path.stem.split("-")[1])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / path.name).write_bytes(b"?" * 60 + forged(salt))
    assert content(Spool(tmp_path / "b")) == {"victim": b"EVIL"}


def test_damage_that_cannot_be_moved_for_lack_of_space_is_skipped_and_reported(
    tmp_path, monkeypatch
):
    filled(tmp_path, *ABC).close()
    (path,) = segments(tmp_path)
    data = bytearray(path.read_bytes())
    data[size_of(*ABC[0]) + 3] ^= 1
    path.write_bytes(data)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", no_space)
        own = Spool(tmp_path)
    assert "were skipped: cannot write" in own.recovered[0]
    assert own.keys() == ["a", "c"]
    assert path.read_bytes() == data
    own.append("b", b"again")
    own.close()
    assert Spool(tmp_path).keys() == ["a", "c", "b"]


def test_records_of_a_newer_format_are_not_touched(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(segment, "_VERSION", 2)
        filled(tmp_path, *ABC).close()
    before = {p.name: p.read_bytes() for p in segments(tmp_path)}
    with pytest.raises(StorageError, match="format 2"):
        Spool(tmp_path)
    assert {p.name: p.read_bytes() for p in segments(tmp_path)} == before


# --- full disks and other faults ------------------------------------------------------------


def no_space(*args):
    raise OSError(errno.ENOSPC, "no space left on device")


def failing_after(good_bytes: int, number: int):
    """An os.write that takes so many bytes and then fails, as a disk that fills up."""
    write = os.write
    left = good_bytes

    def limited(fd, data):
        nonlocal left
        if left <= 0:
            raise OSError(number, os.strerror(number))
        done = write(fd, bytes(data)[:left])
        left -= done
        return done

    return limited


@pytest.mark.parametrize("good_bytes", [0, 1, HEAD_BYTES, HEAD_BYTES + 1, HEAD_BYTES + 50])
def test_a_disk_that_fills_up_at_any_point_leaves_the_spool_usable(
    tmp_path, monkeypatch, good_bytes
):
    own = filled(tmp_path, *ABC)
    (path,) = segments(tmp_path)
    size = path.stat().st_size
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing_after(good_bytes, errno.ENOSPC))
        with pytest.raises(DiskFull, match="MB free"):
            own.append("d", bytes(100))
    assert path.stat().st_size == size
    own.append("d", b"after space was made")
    own.close()
    again = Spool(tmp_path)
    assert again.recovered == []
    assert content(again) == {**dict(ABC), "d": b"after space was made"}


def test_a_real_size_limit_leaves_the_spool_usable(tmp_path):
    """RLIMIT_FSIZE: the kernel writes up to the limit, then answers EFBIG."""
    script = """
import resource, sys
from pathlib import Path
from fcil_protocol.errors import StorageError
from fcil_protocol.storage.spool import Spool
spool = Spool(Path(sys.argv[1]))
spool.append("a", bytes(1000))
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    spool.append("big", bytes(5000))
except StorageError as error:
    print(error)
spool.append("b", bytes(100))
spool.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "file size limit" in done.stdout
    own = Spool(tmp_path)
    assert own.keys() == ["a", "b"]
    assert own.recovered == []


def test_a_rollback_that_fails_too_moves_on_to_a_new_segment(tmp_path, monkeypatch):
    own = filled(tmp_path, *ABC)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing_after(20, errno.EIO))
        patch.setattr(os, "ftruncate", no_space)
        with pytest.raises(StorageError):
            own.append("d", bytes(100))
    own.append("d", b"elsewhere")
    own.sync()
    assert content(own) == {**dict(ABC), "d": b"elsewhere"}
    assert len(segments(tmp_path)) == 2
    own.close()
    again = Spool(tmp_path)
    assert content(again) == {**dict(ABC), "d": b"elsewhere"}
    assert "20 bytes" in again.recovered[0]


def broken_sync(fd):
    raise OSError(errno.EIO, "input/output error")


def test_after_a_failed_sync_nothing_of_the_batch_counts(tmp_path, monkeypatch):
    own = filled(tmp_path, *ABC)
    own.append("d", b"x")
    own.append("e", b"y")
    with monkeypatch.context() as patch:
        patch.setattr(spool, "sync_data", broken_sync)
        with pytest.raises(StorageError, match="fault"):
            own.sync()
    assert own.keys() == ["a", "b", "c"]
    with pytest.raises(CorruptFile, match="no record 'd'"):
        own.get("d")
    own.append("d", b"sent again")
    own.sync()
    own.close()
    again = Spool(tmp_path)
    assert content(again) == {**dict(ABC), "d": b"sent again"}
    assert again.recovered == []


def test_a_failed_sync_of_the_directory_is_made_up_for(tmp_path, monkeypatch):
    own = Spool(tmp_path)
    own.append("a", b"x")
    with monkeypatch.context() as patch:
        patch.setattr(spool, "sync_directory", broken_sync)
        with pytest.raises(StorageError):
            own.sync()
    assert own.keys() == []
    names = []
    monkeypatch.setattr(spool, "sync_directory", names.append)
    own.append("a", b"x")
    own.sync()
    assert names == [tmp_path]
    assert "a" in own


def test_an_unusable_directory_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot create"):
        Spool(tmp_path / "file")
    with pytest.raises(StorageError, match="not a directory"):
        Spool(tmp_path / "file" / "below")


# --- dead bytes -----------------------------------------------------------------------------


def on_disk(directory: Path) -> int:
    return sum(path.stat().st_size for path in segments(directory))


def test_dead_records_do_not_pile_up_behind_one_that_always_counts(tmp_path):
    """As rounds do: the updates of the last one still count while the next come in."""
    own = Spool(tmp_path, segment_bytes=1 << 20)
    most = 0
    for turn in range(200):
        for i in range(3):
            own.append(f"{turn}-{i}", bytes(1500))
        own.sync()
        most = max(most, on_disk(tmp_path))
        own.remove([key for key in own.keys() if not key.startswith(f"{turn}-2")])  # noqa: SIM118
        own.sync()
        assert own.keys() == [f"{turn}-2"]
    assert most < 40_000, "a little may be dead, 16 kB here, and few times what counts"
    own.close()
    assert Spool(tmp_path).keys() == ["199-2"]


@pytest.mark.parametrize("restarts", [False, True])
def test_records_that_count_for_ever_do_not_keep_the_dead_ones_around_them(tmp_path, restarts):
    own = Spool(tmp_path, segment_bytes=20_000)
    for turn in range(200):
        for i in range(20):
            own.append(f"{turn}-{i}", bytes([turn]) * 500)
        own.sync()
        own.remove([f"{turn}-{i}" for i in range(20) if i != turn % 20])
        own.sync()
        if restarts and turn % 10 == 9:
            own.close()
            own = Spool(tmp_path, segment_bytes=20_000)
            assert own.recovered == []
        counts = (turn + 1) * 600
        assert on_disk(tmp_path) < 5 * counts + 40_000
    kept = {f"{turn}-{turn % 20}": bytes([turn]) * 500 for turn in range(200)}
    assert content(own) == kept
    own.close()
    assert content(Spool(tmp_path)) == kept


def wasteful(directory: Path, monkeypatch) -> Spool:
    """A segment of which a fifth counts; the next `remove` copies that."""
    records = [(f"k{i}", bytes([i]) * 300) for i in range(10)]
    own = filled(directory, *records, segment_bytes=4000)
    own.append("next", b"n" * 500)
    with monkeypatch.context() as patch:
        patch.setattr(spool, "_COPY_AT", 1000)
        own.remove(DROPPED)
    own.sync()
    return own


KEPT = {"k3": bytes([3]) * 300, "k7": bytes([7]) * 300, "next": b"n" * 500}
DROPPED = [f"k{i}" for i in range(10) if i not in (3, 7)]


def test_a_kill_before_any_call_to_the_disk_while_records_are_copied_keeps_what_counts(
    tmp_path, monkeypatch
):
    """The directory is taken as a kill would leave it, half a write included, and opened."""
    copies = []

    def taken(name, original):
        def call(*arguments):
            for torn in (0, 30) if name == "write" else (0,):
                copy = tmp_path / f"{len(copies)}"
                shutil.copytree(tmp_path / "own", copy)
                if torn:
                    with segments(copy)[-1].open("ab") as file:
                        file.write(bytes(arguments[1])[:torn])
                copies.append((name, copy))
            return original(*arguments)

        return call

    own = wasteful(tmp_path / "own", monkeypatch)
    before = segments(tmp_path / "own")
    for name in ("write", "open", "unlink"):
        monkeypatch.setattr(os, name, taken(name, getattr(os, name)))
    for module, name in (
        (spool, "sync_data"),
        (spool, "sync_directory"),
        (segment_list, "sync_directory"),
    ):
        monkeypatch.setattr(module, name, taken(name, getattr(module, name)))
    own.remove([])
    monkeypatch.undo()
    assert before[0] not in segments(tmp_path / "own"), "it was copied and deleted"
    names = [name for name, _ in copies]
    order = [names.index(name) for name in ("write", "sync_data", "sync_directory", "unlink")]
    assert order == sorted(order), "durable before the old ones go, against a power cut"
    assert content(own) == KEPT
    own.remove(["k3"])
    own.close()
    assert content(Spool(tmp_path / "own")) == {k: KEPT[k] for k in ("k7", "next")}
    for name, copy in copies:
        again = Spool(copy)  # with large segments: nothing more is copied
        assert content(again) == KEPT, name
        again.remove(["k3", "next"])
        again.close()
        again = filled(copy, ("k0", b"anew"))
        again.close()
        assert content(Spool(copy)) == {"k7": KEPT["k7"], "k0": b"anew"}, name


def test_what_is_not_yet_durable_is_not_made_so_by_copying_it(tmp_path, monkeypatch):
    """Else a record whose sync failed, and which its sender was refused, would come back."""
    records = [(f"k{i}", bytes([i]) * 300) for i in range(10)]
    own = filled(tmp_path, *records, segment_bytes=20_000)
    own.append("new", b"x")
    own.remove(DROPPED)
    with monkeypatch.context() as patch:
        patch.setattr(spool, "sync_data", broken_sync)
        with pytest.raises(StorageError):
            own.sync()
    own.close()
    again = Spool(tmp_path)
    assert {"k3", "k7"} <= set(again.keys())
    assert "new" not in again.keys()  # noqa: SIM118


def test_nothing_is_copied_out_of_a_segment_whose_notes_of_removal_are_needed(tmp_path):
    own = filled(tmp_path, ("old", bytes(900)), ("kept", bytes(2900)), segment_bytes=4000)
    for i in range(10):
        own.append(f"k{i}", bytes([i]) * 300)
    own.remove(["old"])
    own.sync()
    own.remove(DROPPED)
    own.sync()
    before = segments(tmp_path)
    own.remove([])
    assert segments(tmp_path) == before
    own.remove(["kept"])
    assert content(own) == {k: KEPT[k] for k in ("k3", "k7")}
    assert on_disk(tmp_path) < 1000


@pytest.mark.parametrize("broken", ["write", "sync"])
def test_records_that_cannot_be_copied_stay_where_they_are_until_they_can(
    tmp_path, monkeypatch, broken
):
    own = wasteful(tmp_path, monkeypatch)
    before = segments(tmp_path)
    with monkeypatch.context() as patch:
        if broken == "write":
            patch.setattr(os, "write", failing_after(500, errno.ENOSPC))
        else:
            patch.setattr(spool, "sync_data", broken_sync)
        own.remove([])
        assert content(own) == KEPT
        assert segments(tmp_path) == before
    own.remove([])
    assert segments(tmp_path)[0] != before[0]
    own.append("more", b"m")
    own.close()
    assert content(Spool(tmp_path)) == {**KEPT, "more": b"m"}


def test_a_full_disk_gets_room_from_dead_records_when_something_is_appended(tmp_path, monkeypatch):
    records = (("dead", bytes(5000)), ("small", b"s" * 100), ("large", bytes(4000)))
    own = filled(tmp_path, *records, segment_bytes=20_000)
    own.remove(["dead"])
    own.remove(["large"])
    own.sync()
    write = os.write

    def limited(fd, data):
        if on_disk(tmp_path) + len(data) > 10_000:
            no_space()
        return write(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", limited)
        own.append("new", bytes(5000))
        own.sync()
        with pytest.raises(DiskFull):
            own.append("too large", bytes(9000))
    assert content(own) == {"small": b"s" * 100, "new": bytes(5000)}
    own.close()
    assert content(Spool(tmp_path)) == {"small": b"s" * 100, "new": bytes(5000)}


def test_a_record_that_is_copied_while_it_is_read_is_read_from_its_copy(tmp_path, monkeypatch):
    own = wasteful(tmp_path, monkeypatch)
    read = segment.Segment.read
    calls = []

    def late(of, record, **options):
        calls.append(of.number)
        if len(calls) == 1:
            own.remove([])  # copies k3 and deletes its segment
        return read(of, record, **options)

    monkeypatch.setattr(segment.Segment, "read", late)
    assert own.get("k3") == KEPT["k3"]
    assert calls[0] < calls[-1]


# --- sync in another thread -----------------------------------------------------------------


class HeldSync:
    """Holds the first sync_data of another thread until it is let go; then it may fail."""

    def __init__(self, monkeypatch, *, fails: bool = False) -> None:
        self.started = threading.Event()
        self.go = threading.Event()
        self.fails = fails
        self.error: Exception | None = None
        monkeypatch.setattr(spool, "sync_data", self._sync)

    def _sync(self, fd: int) -> None:
        if not self.started.is_set():
            self.started.set()
            assert self.go.wait(30)
            if self.fails:
                raise OSError(errno.EIO, "input/output error")
        sync_data(fd)

    def run(self, own: Spool) -> threading.Thread:
        def call():
            try:
                own.sync()
            except StorageError as error:
                self.error = error

        thread = threading.Thread(target=call)
        thread.start()
        assert self.started.wait(30)
        return thread

    def finish(self, thread: threading.Thread) -> None:
        self.go.set()
        thread.join(30)
        assert not thread.is_alive()


def test_what_is_appended_during_a_sync_waits_for_the_next(tmp_path, monkeypatch):
    own = filled(tmp_path, *ABC)
    own.append("d", b"in the batch")
    held = HeldSync(monkeypatch)
    thread = held.run(own)
    own.append("e", b"during it")
    held.finish(thread)
    assert held.error is None
    assert "d" in own
    assert "e" not in own
    synced = []
    monkeypatch.setattr(spool, "sync_data", lambda fd: synced.append(os.fstat(fd).st_size))
    own.sync()
    (path,) = segments(tmp_path)
    assert synced == [path.stat().st_size]
    assert "e" in own


def test_what_is_appended_during_a_failing_sync_fails_with_the_next(tmp_path, monkeypatch):
    """The kernel does not say which bytes it dropped, so none of them may be acknowledged."""
    own = filled(tmp_path, *ABC)
    own.append("d", b"in the batch")
    held = HeldSync(monkeypatch, fails=True)
    thread = held.run(own)
    own.append("e", b"during it")
    held.finish(thread)
    assert held.error is not None
    own.append("f", b"after it, in the same batch as e")
    with pytest.raises(StorageError):
        own.sync()
    assert own.keys() == ["a", "b", "c"]
    for key in "def":
        own.append(key, b"once more")
    own.sync()
    own.close()
    assert Spool(tmp_path).keys() == list("abcdef")


def test_a_segment_may_be_deleted_during_its_sync_and_the_next_one_is_still_synced(
    tmp_path, monkeypatch
):
    own = Spool(tmp_path)
    own.append("a", b"x")
    held = HeldSync(monkeypatch)
    thread = held.run(own)
    own.remove(["a"])
    assert segments(tmp_path) == []
    own.append("b", b"y")
    held.finish(thread)
    assert held.error is None
    assert "b" not in own
    synced = []
    monkeypatch.setattr(spool, "sync_data", lambda fd: synced.append(os.fstat(fd).st_size))
    own.sync()
    assert synced == [size_of("b", b"y")]
    assert own.keys() == ["b"]


# --- against a model ------------------------------------------------------------------------

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 15), st.integers(0, 700)),
        st.tuples(st.just("remove"), st.sets(st.integers(0, 15), max_size=6)),
        st.tuples(st.just("sync")),
        st.tuples(st.just("restart")),
        st.tuples(st.just("fill"), st.integers(0, 15), st.integers(0, 200)),
    ),
    max_size=30,
)


@settings(max_examples=60)
@given(OPERATIONS)
def test_any_sequence_of_operations_matches_a_dictionary(tmp_path_factory, operations):
    """ "restart" is a close and an open; "fill" an append on a disk that is full midway."""
    directory = tmp_path_factory.mktemp("spool")
    own = Spool(directory, segment_bytes=1000)
    model: dict[str, bytes] = {}
    for step, (name, *arguments) in enumerate(operations):
        if name == "append":
            key, body = f"k{arguments[0]}", bytes([step]) * arguments[1]
            if key in model:
                with pytest.raises(AlreadyHave):
                    own.append(key, body)
            else:
                own.append(key, body)
                model[key] = body
        elif name == "remove":
            keys = [f"k{i}" for i in arguments[0]]
            own.remove(keys)
            for key in keys:
                model.pop(key, None)
        elif name == "sync":
            own.sync()
            assert content(own) == model
        elif name == "restart":
            own.close()
            own = Spool(directory, segment_bytes=1000)
            assert own.recovered == []
            assert content(own) == model
        elif f"k{arguments[0]}" not in model:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "write", failing_after(arguments[1], errno.ENOSPC))
                with pytest.raises(DiskFull):
                    own.append(f"k{arguments[0]}", bytes(300))
    own.sync()
    assert content(own) == model
    own.remove(list(model))
    own.close()
    assert segments(directory) == []
    shutil.rmtree(directory)


def test_what_is_purged_leaves_the_disk_and_nothing_else_does(tmp_path):
    spool_ = filled(tmp_path, ("a", b"secret" * 9), ("b", b"stays" * 9), segment_bytes=1 << 20)
    spool_.append("c", b"secret" * 7)  # not synced yet
    assert spool_.purge(["a", "c", "unknown"]) == 2
    assert content(spool_) == {"b": b"stays" * 9}
    assert b"secret" not in b"".join(p.read_bytes() for p in segments(tmp_path))
    spool_.append("a", b"another")
    spool_.sync()
    spool_.close()
    assert content(Spool(tmp_path)) == {"b": b"stays" * 9, "a": b"another"}
